"""Whole runs on the local engine with a lag, and in rounds.

``test_environments.py`` has those one step ahead.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from bapo_megatron.data.dump import read_batch
from tests.trainer.chaos import steps
from tests.trainer.runs import assert_same_training, sampling_settings, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 4
MODES: dict[str, dict[str, Any]] = {
    "fixed lag": {"fixed_lag": 2},
    "rounds": {"partial_tokens": 9},
}
RANKS = {"fixed lag": 1, "rounds": 2}
"""Tensor-parallel trainer ranks."""


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> dict[str, Path]:
    """Four steps of two updates, saved at every step, in each mode of generation."""
    directory = tmp_path_factory.mktemp("local")
    paths = {}
    for mode, rollout in MODES.items():
        settings = sampling_settings(
            directory,
            model_dir,
            rollout={"engine": "local", **rollout},
            algorithm={"updates_per_batch": 2},
            train={"steps": STEPS},
            checkpoint={"every_steps": 1, "keep_last": 9},
            eval={"every_steps": 2, "max_prompts": 4},
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


def test_a_resumed_run_equals_the_uninterrupted_one(
    configs: dict[str, Path], finished: dict[str, Path], tmp_path: Path
) -> None:
    # Two batches wait in the checkpoint of step 1, and the last one is sampled after it.
    resumed = tmp_path / "run"
    shutil.copytree(finished["fixed lag"], resumed)
    # Forget what came later, as if the run had been killed.
    (resumed / "checkpoints" / "latest").write_text("step_1\n")
    shutil.rmtree(resumed / "hf")
    _train(configs, "fixed lag", resumed, "resume=true")
    assert_same_training(resumed, finished["fixed lag"])


@pytest.mark.parametrize("mode", MODES)
def test_trainer_and_engine_agree_on_every_token(finished: dict[str, Path], mode: str) -> None:
    rows = steps(finished[mode])
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    fresh = [row for row in rows if row["rollout/age_max"] == 0]
    assert fresh, "only tokens of the newest weights can be compared"
    for row in fresh:
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-4


def test_what_is_sampled_with_a_lag_is_older_by_what_was_asked_for(
    finished: dict[str, Path],
) -> None:
    for row in steps(finished["fixed lag"]):
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
