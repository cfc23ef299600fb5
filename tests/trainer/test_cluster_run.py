"""configs/bp-math-32b-64k.yaml itself, on as many ranks as hold its model, with a thin one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.tiny.model import build_tokenizer
from tests.launch import run
from tests.policy.tiny_models import make_model
from tests.trainer.dumps import write_dumps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.distributed

CONFIG = "configs/bp-math-32b-64k.yaml"

ONE_RANK = ("parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline=1")


@pytest.fixture(scope="module")
def thin_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with as many key/value heads as the 32B model, and four thin layers."""
    directory = tmp_path_factory.mktemp("thin") / "model"
    tokenizer = build_tokenizer()
    make_model(
        "qwen2",
        directory,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=len(tokenizer),
        max_position_embeddings=131072,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(directory)
    return directory


def test_tensor_8_by_pipeline_2_of_the_32b_file_trains_as_one_rank_does(
    thin_model: Path, tmp_path: Path
) -> None:
    # Its context size, 4, would take 64 ranks.
    dumps = write_dumps(tmp_path / "dumps", thin_model, steps=3)
    rows = {}
    for ranks, layout in ((16, ()), (1, ONE_RANK)):
        run_dir = tmp_path / f"of_{ranks}"
        result = run(
            [
                "train",
                CONFIG,
                f"model.path={thin_model}",
                f"run_dir={run_dir}",
                f"replay={dumps}",
                "train.steps=3",
                "parallel.context=1",
                *layout,
            ],
            ranks=ranks,
            timeout_s=480,
        )
        assert result.returncode == 0, result.stderr
        rows[ranks] = read_metrics(run_dir / "metrics.jsonl")
        assert json.loads((run_dir / "summary.json").read_text())["updates"] == 6
    assert [row["step"] for row in rows[16]] == [1, 2, 3]
    for row, expected in zip(rows[16], rows[1], strict=True):
        # In bfloat16, whose 8 bits round differently for every division.
        assert row["policy/entropy"] == pytest.approx(expected["policy/entropy"], rel=0.01)
        assert row["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=0.1)
        assert row["reward/mean"] == expected["reward/mean"] == 0.5
