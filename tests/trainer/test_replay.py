"""Training from dumps: what moves the weights, and what a run leaves behind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from bapo_megatron.config.load import load_config
from tests.trainer.dumps import write_dumps
from tests.trainer.runs import differing_weights, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.distributed


def test_updates_without_signal_are_skipped_and_weights_stay_bit_equal(
    replay_config: Path, random_model: Path, tmp_path: Path
) -> None:
    dumps = write_dumps(tmp_path / "equal", random_model, steps=2, rewards="equal")
    rows = train(replay_config, tmp_path / "run", f"replay={dumps}", "train.steps=2", ranks=2)
    assert [row["train/skipped_updates"] for row in rows] == [2.0, 2.0]
    assert [row["reward/mixed_groups"] for row in rows] == [0.0, 0.0]
    before = load_file(random_model / "model.safetensors")
    assert not differing_weights(tmp_path / "run", before)


def test_a_run_moves_all_weights_and_writes_its_summary_and_configuration(
    replay_config: Path, random_model: Path, tmp_path: Path
) -> None:
    settings = ("train.steps=2", "algorithm.bapo.contribution=gradient", "algorithm.epochs=2")
    rows = train(replay_config, tmp_path, *settings)
    assert [row["train/updates"] for row in rows] == [4.0, 4.0]
    before = load_file(random_model / "model.safetensors")
    assert sorted(differing_weights(tmp_path, before)) == sorted(before)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["updates"], summary["seed"]) == (2, 8, 0)
    assert summary["accuracy_before"] is None
    assert summary["generated_tokens_per_s"] is None  # whatever the dumps say
    assert summary["versions"]["megatron-core"] == "0.19.2"
    written = tmp_path / "config.yaml"
    assert written.read_text().startswith(f"# commit {summary['commit'] or 'unknown'}\n# bapo-")
    assert load_config(written).train.max_tokens_per_micro_batch == 128
