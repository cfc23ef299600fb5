"""Whole runs on the local engine: they repeat bit for bit, also where they were interrupted."""

from __future__ import annotations

import shutil
import signal
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml

from bapo_megatron.data.dump import read_batch
from tests.launch import start
from tests.trainer.chaos import steps, wait_for
from tests.trainer.runs import assert_same_training, sampling_settings, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 4
GROUPS_PER_STEP = 4
MODES: dict[str, dict[str, Any]] = {
    "ahead": {"async_steps": 1, "oversample_groups": 2, "local": {"decode_steps_ahead": 7}},
    "fixed lag": {"fixed_lag": 2},
    "rounds": {"partial_tokens": 9},
}
RANKS = {"ahead": 1, "fixed lag": 2, "rounds": 1}
"""Tensor-parallel trainer ranks."""


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> dict[str, Path]:
    """Four steps of two updates, saved at every step, in each mode of generation."""
    directory = tmp_path_factory.mktemp("local")
    paths = {}
    for mode, rollout in MODES.items():
        settings = sampling_settings(
            directory,
            random_model,
            rollout={"engine": "local", **rollout},
            algorithm={"updates_per_batch": 2},
            train={"steps": STEPS},
            checkpoint={"every_steps": 1, "keep_last": 9},
            eval={"every_steps": 2},
            log={"tensorboard": False},
        )
        paths[mode] = directory / f"{mode.replace(' ', '_')}.yaml"
        paths[mode].write_text(yaml.safe_dump(settings))
    return paths


def _train(configs: dict[str, Path], mode: str, run_dir: Path, *overrides: str) -> None:
    ranks = RANKS[mode]
    train(configs[mode], run_dir, f"parallel.tensor={ranks}", *overrides, ranks=ranks)


@pytest.fixture(scope="module")
def finished(configs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One uninterrupted run of each mode."""
    root = tmp_path_factory.mktemp("finished")
    for mode in MODES:
        _train(configs, mode, root / mode)
    return {mode: root / mode for mode in MODES}


def test_a_run_that_was_stopped_twice_equals_another_one_bit_for_bit(
    configs: dict[str, Path], finished: dict[str, Path], tmp_path: Path
) -> None:
    stops = "algorithm.advantage=tests.trainer.stub_runs:grpo_and_stop"
    for resume in ("resume=false", "resume=true"):
        _train(configs, "ahead", tmp_path / "again", stops, resume)
        assert (tmp_path / "again" / "stopped").read_text() == "stopped by SIGTERM\n"
    # The second stop came before the evaluation of its step.
    assert [row["step"] for row in steps(tmp_path / "again")] == [1]
    _train(configs, "ahead", tmp_path / "again", "resume=true")
    assert_same_training(tmp_path / "again", finished["ahead"])


@pytest.mark.parametrize("mode", ["fixed lag", "rounds"])
def test_a_resumed_run_equals_the_uninterrupted_one(
    configs: dict[str, Path], finished: dict[str, Path], tmp_path: Path, mode: str
) -> None:
    # With the lag, two batches wait in the checkpoint of step 1, and the last one is sampled after
    # it. With rounds, responses rest in it.
    resumed = tmp_path / "run"
    shutil.copytree(finished[mode], resumed)
    # Forget what came later, as if the run had been killed.
    (resumed / "checkpoints" / "latest").write_text("step_1\n")
    shutil.rmtree(resumed / "hf")
    _train(configs, mode, resumed, "resume=true")
    assert_same_training(resumed, finished[mode])


def test_a_killed_run_continues_bit_for_bit_and_leaves_no_process(
    configs: dict[str, Path], finished: dict[str, Path], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(["train", str(configs["ahead"]), f"run_dir={run_dir}"])
    wait_for(process, lambda: len(steps(run_dir)) >= 2, "two steps")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert psutil.wait_procs(children, timeout=30)[1] == []
    dumps = sorted((run_dir / "rollouts").glob("step_*.parquet"))
    assert len(dumps) >= 2
    # Whatever has its final name is whole.
    assert all(len(read_batch(dump).groups) == GROUPS_PER_STEP for dump in dumps)
    _train(configs, "ahead", run_dir, "resume=true")
    assert_same_training(run_dir, finished["ahead"])


@pytest.mark.parametrize("mode", MODES)
def test_trainer_and_engine_agree_on_every_token(finished: dict[str, Path], mode: str) -> None:
    rows = steps(finished[mode])
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    fresh = [row for row in rows if row["rollout/age_max"] == 0]
    assert fresh, "only tokens of the newest weights can be compared"
    for row in fresh:
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-4


def test_what_is_sampled_ahead_is_older_by_what_was_asked_for(finished: dict[str, Path]) -> None:
    ahead, lag = steps(finished["ahead"]), steps(finished["fixed lag"])
    # Each step has two updates: tokens are 0 or 1 updates old when the batch is trained, and older
    # where they were sampled before the last push.
    assert any(row["rollout/age_max"] >= 2 for row in ahead)
    assert any(row["rollout/resumed_samples"] > 0 for row in ahead)
    for row in lag:
        steps_old = min(row["step"] - 1, 2)
        assert row["rollout/age_mean"] == row["rollout/age_max"] == 2 * steps_old


def test_rounds_divide_responses_over_steps(finished: dict[str, Path]) -> None:
    rows = steps(finished["rounds"])
    assert all(row["rollout/resumed_samples"] > 0 for row in rows)
    assert any(row["rollout/age_max"] >= 2 for row in rows)
    dumps = sorted((finished["rounds"] / "rollouts").glob("step_*.parquet"))
    batches = [read_batch(dump) for dump in dumps]
    samples = [sample for batch in batches for sample in batch.samples]
    assert max(sample.num_sampled for sample in samples) == 24  # 9 + 9 + 6
    assert max(len(sample.versions) for sample in samples) >= 2
    for sample in samples:  # other weights sample only from where a round has ended
        ends = [sum(span.num_tokens for span in sample.versions[:n]) for n in range(1, 3)]
        assert all(end in (9, 18, sample.num_sampled) for end in ends)
