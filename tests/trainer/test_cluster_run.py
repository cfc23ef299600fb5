"""configs/bp-math-32b-64k.yaml itself, on as many ranks as hold its model, with a thin one."""

import json
from pathlib import Path

import pytest

from bapo_megatron.telemetry.sinks import read_metrics
from tests.launch import run
from tests.trainer.dumps import make_random_model, write_dumps

pytestmark = pytest.mark.distributed

CONFIG = "configs/bp-math-32b-64k.yaml"

ONE_RANK = ("parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline=1")


@pytest.mark.exhaustive
def test_tensor_8_by_pipeline_2_of_the_32b_file_trains_as_one_rank_does(
    tmp_path: Path,
) -> None:
    # Its context size, 4, would take 64 ranks. As many key/value heads as the 32B model has.
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    sizes = {**heads, "num_hidden_layers": 2, "max_position_embeddings": 131072}
    thin_model = make_random_model(tmp_path / "model", **sizes)
    dumps = write_dumps(tmp_path / "dumps", thin_model, steps=2)
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
                "train.steps=2",
                "parallel.context=1",
                *layout,
            ],
            ranks=ranks,
            timeout_s=480,
        )
        assert result.returncode == 0, result.stderr
        rows[ranks] = read_metrics(run_dir / "metrics.jsonl")
        assert json.loads((run_dir / "summary.json").read_text())["updates"] == 4
    assert [row["step"] for row in rows[16]] == [1, 2]
    for row, expected in zip(rows[16], rows[1], strict=True):
        # In bfloat16, whose 8 bits round differently for every division.
        assert row["policy/entropy"] == pytest.approx(expected["policy/entropy"], rel=0.01)
        assert row["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=0.1)
        assert row["reward/mean"] == expected["reward/mean"] == 0.5
