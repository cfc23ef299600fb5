"""A run that was killed and resumed in another layout equals one that was not."""

import json
from pathlib import Path

import pytest

from bapo_megatron.telemetry.run_dir import read_starts
from tests.trainer.runs import exported_weights, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

COMPARED = (
    "loss/policy",
    "policy/grad_norm",
    "policy/entropy",
    "clip/high",
    "clip/low",
    "train/lr",
)


@pytest.mark.exhaustive
def test_a_resumed_run_equals_the_uninterrupted_one_in_another_layout(
    replay_config: Path, tmp_path: Path
) -> None:
    run_dir, tolerance = tmp_path / "run", 1e-5  # tests/policy has the other layouts
    settings = ("train.steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    saved = (*settings, "checkpoint.asynchronous=true", "parallel.pipeline=2")
    expected = train(replay_config, run_dir, *saved, ranks=2)
    expected_weights = exported_weights(run_dir)
    summaries = [json.loads((run_dir / "summary.json").read_text())]
    # Forget everything after the first step, as if the run had been killed there.
    (run_dir / "checkpoints" / "latest").write_text("step_1\n")
    rows = train(replay_config, run_dir, *settings, "parallel.tensor=2", "resume=true", ranks=2)
    summaries.append(json.loads((run_dir / "summary.json").read_text()))
    for name in ("steps", "updates", "generated_tokens"):
        assert summaries[0][name] == summaries[1][name], name
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [(start.step, start.world_size) for start in read_starts(run_dir)] == [(0, 2), (1, 2)]
    for row, reference in zip(rows, expected, strict=True):
        for name in COMPARED:
            assert row[name] == pytest.approx(reference[name], rel=tolerance, abs=tolerance), name
    weights = exported_weights(run_dir)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        assert (weights[name] - tensor).abs().max() < tolerance, name
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"abandoned_1", "latest", *(f"step_{step}" for step in range(1, 4))}
