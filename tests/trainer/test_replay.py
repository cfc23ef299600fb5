"""Training from dumps: deterministic, equal for every layout, and the same after a resume."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from bapo_megatron.config.load import load_config
from bapo_megatron.telemetry.sinks import read_metrics
from tests.launch import run
from tests.trainer.dumps import write_dumps

if TYPE_CHECKING:
    from pathlib import Path

    import torch

pytestmark = pytest.mark.distributed

COMPARED = (
    "loss/policy",
    "policy/grad_norm",
    "policy/entropy",
    "policy/kl_behaviour",
    "bapo/clip_high",
    "bapo/clip_low",
    "bapo/positive_share",
    "clip/fraction_high",
    "clip/fraction_low",
)
THREE_STEPS = "train.steps=3"


def _train(config: Path, run_dir: Path, *overrides: str, ranks: int = 1) -> list[dict[str, float]]:
    result = run(["train", str(config), f"run_dir={run_dir}", *overrides], ranks=ranks)
    assert result.returncode == 0, result.stderr
    return read_metrics(run_dir / "metrics.jsonl")


def _weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "hf" / "model.safetensors")


def _largest_difference(first: Path, second: Path) -> float:
    a, b = _weights(first), _weights(second)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, replay_config: Path) -> Path:
    """Three steps, each saved."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    _train(
        replay_config, run_dir, THREE_STEPS, "checkpoint.every_steps=1", "checkpoint.keep_last=9"
    )
    return run_dir


def test_ranks_and_micro_batches_do_not_change_a_training(
    uninterrupted: Path, replay_config: Path, tmp_path: Path
) -> None:
    # test_layouts.py has the layouts, each by itself.
    overrides = ("parallel.tensor=2", "train.max_tokens_per_micro_batch=64")
    rows = _train(replay_config, tmp_path / "run", THREE_STEPS, *overrides, ranks=2)
    expected = read_metrics(uninterrupted / "metrics.jsonl")
    assert len(rows) == len(expected) == 3
    for row, reference in zip(rows, expected, strict=True):
        for name in COMPARED:
            assert row[name] == pytest.approx(reference[name], rel=1e-4, abs=1e-5), name
    assert rows[0]["loss/policy"] == pytest.approx(expected[0]["loss/policy"], abs=1e-6)
    assert _largest_difference(uninterrupted, tmp_path / "run") < 1e-4


def test_updates_with_signal_change_the_weights(uninterrupted: Path, random_model: Path) -> None:
    before = load_file(random_model / "model.safetensors")
    after = _weights(uninterrupted)
    assert before.keys() == after.keys()
    assert all(not before[name].equal(after[name]) for name in before)


def test_a_resumed_run_equals_the_uninterrupted_one(
    uninterrupted: Path, replay_config: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted, run_dir, ignore=shutil.ignore_patterns("hf", "summary.json"))
    # Forget everything after the first step, as if the run had been killed there.
    (run_dir / "checkpoints" / "latest").write_text("step_1")
    result = run(["train", str(replay_config), f"run_dir={run_dir}", THREE_STEPS, "resume=true"])
    assert result.returncode == 0, result.stderr
    assert f"resumed from {run_dir / 'checkpoints' / 'step_1'}: 1 steps done\n" in result.stderr
    assert "Warning" not in result.stderr
    rows = read_metrics(run_dir / "metrics.jsonl")
    expected = read_metrics(uninterrupted / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row, reference in zip(rows, expected, strict=True):
        for name in COMPARED:
            assert row[name] == pytest.approx(reference[name], rel=1e-6, abs=1e-6), name
        assert row["train/lr"] == reference["train/lr"]
    summaries = [json.loads((d / "summary.json").read_text()) for d in (uninterrupted, run_dir)]
    for name in ("steps", "updates", "generated_tokens", "search_moved_share"):
        assert summaries[0][name] == summaries[1][name], name
    assert _largest_difference(uninterrupted, run_dir) < 1e-6


def test_updates_without_signal_are_skipped_and_weights_stay_bit_equal(
    replay_config: Path, random_model: Path, tmp_path: Path
) -> None:
    dumps = write_dumps(tmp_path / "equal", random_model, steps=2, rewards="equal")
    rows = _train(replay_config, tmp_path / "run", f"replay={dumps}", "train.steps=2", ranks=2)
    assert [row["train/skipped_updates"] for row in rows] == [2.0, 2.0]
    assert [row["reward/mixed_groups"] for row in rows] == [0.0, 0.0]
    before, after = load_file(random_model / "model.safetensors"), _weights(tmp_path / "run")
    assert all(before[name].equal(after[name]) for name in before)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["algorithm.objective=clip"], id="GRPO by one override"),
        pytest.param(["algorithm.objective=none"], id="no clip"),
        pytest.param(["algorithm.bapo.contribution=gradient", "algorithm.epochs=2"], id="gradient"),
    ],
)
def test_other_rules_train_from_the_same_file(
    replay_config: Path, tmp_path: Path, overrides: list[str]
) -> None:
    rows = _train(
        replay_config, tmp_path / "run", "train.steps=1", "checkpoint.at_end=false", *overrides
    )
    assert rows[0]["train/updates"] == (4.0 if "algorithm.epochs=2" in overrides else 2.0)
    assert rows[0]["policy/grad_norm"] > 0
    if "algorithm.objective=clip" in overrides:
        assert (rows[0]["bapo/clip_low"], rows[0]["bapo/clip_high"]) == (0.8, 1.2)


def test_summary_and_resolved_configuration_are_written(uninterrupted: Path) -> None:
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["updates"] == 6
    assert summary["seed"] == 0
    assert summary["accuracy_before"] is None
    assert summary["generated_tokens_per_s"] is None  # whatever the dumps say
    assert summary["versions"]["megatron-core"] == "0.19.2"
    written = uninterrupted / "config.yaml"
    assert written.read_text().startswith(f"# commit {summary['commit'] or 'unknown'}\n# bapo-")
    assert load_config(written).train.max_tokens_per_micro_batch == 128
