"""A run that was killed and resumed equals one that was not, in every way of saving."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bapo_megatron.telemetry.run_dir import read_starts
from bapo_megatron.telemetry.sinks import read_metrics
from tests.launch import Launched, run
from tests.trainer.chaos import wait_for
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
EVERY_STEP = ("train.steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=9")

TP2, PP2 = "parallel.tensor=2", "parallel.pipeline=2"
ASYNCHRONOUS = ("checkpoint.asynchronous=true",)


def _assert_equal_metrics(
    rows: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float
) -> None:
    for row, reference in zip(rows, expected, strict=True):
        for name in COMPARED:
            assert row[name] == pytest.approx(reference[name], rel=tolerance, abs=tolerance), name


def test_a_resumed_run_equals_the_uninterrupted_one_in_another_layout(
    replay_config: Path, tmp_path: Path
) -> None:
    run_dir, tolerance = tmp_path / "run", 1e-5  # tests/policy has the other layouts
    expected = train(replay_config, run_dir, *EVERY_STEP, *ASYNCHRONOUS, PP2, ranks=2)
    expected_weights = exported_weights(run_dir)
    summaries = [json.loads((run_dir / "summary.json").read_text())]
    # Forget everything after the first step, as if the run had been killed there.
    (run_dir / "checkpoints" / "latest").write_text("step_1\n")
    rows = train(replay_config, run_dir, *EVERY_STEP, TP2, "resume=true", ranks=2)
    summaries.append(json.loads((run_dir / "summary.json").read_text()))
    for name in ("steps", "updates", "generated_tokens"):
        assert summaries[0][name] == summaries[1][name], name
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [(start.step, start.world_size) for start in read_starts(run_dir)] == [(0, 2), (1, 2)]
    _assert_equal_metrics(rows, expected, tolerance)
    weights = exported_weights(run_dir)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        assert (weights[name] - tensor).abs().max() < tolerance, name
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"abandoned_1", "latest", *(f"step_{step}" for step in range(1, 4))}


def _end_in_the_middle(process: Launched, latest: Path, ranks: int, number: signal.Signals) -> str:
    """End a training once it has saved three times, with all of its processes; returns stderr."""

    def has_saved_three() -> bool:
        return latest.is_file() and int(latest.read_text().removeprefix("step_")) >= 3

    wait_for(process, has_saved_three, "three saved steps")
    children = psutil.Process(process.pid).children(recursive=True)
    assert ranks == 1 or len(children) >= ranks
    process.send_signal(number)
    assert psutil.wait_procs(children, timeout=30)[1] == []
    return process.communicate(timeout=30)[1]


SAVES_OFTEN = (
    "checkpoint.every_steps=1",
    "optimizer.schedule=constant",  # the same, however many steps there are
    *ASYNCHRONOUS,
)


@pytest.mark.parametrize(
    ("number", "ranks"), [(signal.SIGKILL, 2), (signal.SIGINT, 1)], ids=["killed", "interrupted"]
)
@pytest.mark.exhaustive
def test_a_run_that_ends_while_it_saves_in_the_background_goes_on_from_its_last_checkpoint(
    start_long: Callable[..., Launched],
    replay_config: Path,
    many_dumps: Path,
    tmp_path: Path,
    number: signal.Signals,
    ranks: int,
) -> None:
    root = tmp_path / "run" / "checkpoints"
    process = start_long(tmp_path / "run", *SAVES_OFTEN, ranks=ranks)
    stderr = _end_in_the_middle(process, root / "latest", ranks, number)
    done = int((root / "latest").read_text().removeprefix("step_"))
    if number == signal.SIGINT:
        assert "Traceback" not in stderr
        last = stderr.strip().splitlines()[-1]
        assert last.startswith("bapo-megatron: stopped by SIGINT; ")
        assert last.endswith(f"{root}/step_{done}, of which bapo-megatron convert makes a model")
    settings = [f"replay={many_dumps}", f"train.steps={done + 2}", *SAVES_OFTEN]
    arguments = ["train", str(replay_config), f"run_dir={tmp_path / 'run'}", *settings]
    result = run([*arguments, "resume=true"], ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert f"resumed from {root}/step_{done}: {done} steps done\n" in result.stderr
    assert "Warning" not in result.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == done + 2
    names = {path.name for path in root.iterdir()}
    assert names == {"latest", f"step_{done + 1}", f"step_{done + 2}"}
    assert (tmp_path / "run" / "saved").read_text() == f"step_{done + 2}\n"
    if number == signal.SIGKILL:
        never = ("checkpoint.every_steps=0", "checkpoint.at_end=false")
        expected = train(replay_config, tmp_path / "whole", *settings, *never, ranks=ranks)
        _assert_equal_metrics(rows, expected, 1e-6)
