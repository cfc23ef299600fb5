"""What a user gets wrong ends in one clear line, a non-zero exit and nothing half-written."""

import re
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.data.dump import read_batch, write_batch
from tests.launch import run
from tests.trainer.dumps import write_dumps
from tests.trainer.runs import refusal

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("algorithm.objektive=clip", "'algorithm.objective'?"),
        ("parallel.tensor=2", "parallel: "),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(
    replay_config: Path, tmp_path: Path, override: str, key: str
) -> None:
    run_dir = tmp_path / "run"
    status, line = refusal(["train", str(replay_config), f"run_dir={run_dir}", override])
    assert status == 2
    assert key in line
    assert not run_dir.exists()


@pytest.fixture(scope="module")
def nan_dumps(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Path:
    """Two steps; in the second, one log-prob of sample 2 of group 5 is NaN at position 4."""
    directory = write_dumps(tmp_path_factory.mktemp("nan"), random_model, steps=2)
    path = directory / "step_000002.parquet"
    batch = read_batch(path)
    sample = batch.groups[1].samples[2]
    sample.behaviour_logprobs = sample.behaviour_logprobs.copy()
    sample.behaviour_logprobs[4] = np.nan
    write_batch(path, batch)
    return directory


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ((), 1),
        (("algorithm.bapo.scope=micro_batch",), 1),
        (("algorithm.behaviour=recomputed", "algorithm.correction.kind=sequence"), 1),
        ((), 2),
    ],
)
def test_nan_logprobs_are_reported_with_sample_and_position(
    replay_config: Path, nan_dumps: Path, tmp_path: Path, settings: tuple[str, ...], ranks: int
) -> None:
    arguments = ["train", str(replay_config), f"run_dir={tmp_path / 'run'}", f"replay={nan_dumps}"]
    result = run([*arguments, "train.steps=2", *settings], ranks=ranks)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    # The first rank that ends may end the other before it has told.
    (line,) = set(re.findall(r"^(?:\[rank 1\] )?bapo-megatron: (.*)$", result.stderr, re.MULTILINE))
    assert line.startswith("step 2: sample 2 of group 5")
    assert "response token 4: behaviour log-prob is nan" in line


@pytest.fixture(scope="module")
def large_dumps(nan_dumps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step; without the group's deviation, advantages are ± 500."""
    directory = tmp_path_factory.mktemp("large")
    batch = read_batch(nan_dumps / "step_000001.parquet")
    for sample in batch.samples:
        sample.reward *= 1000
    write_batch(directory / "step_000001.parquet", batch)
    return directory


@pytest.mark.distributed
@pytest.mark.parametrize(("scope", "ranks"), [("update", 1), ("micro_batch", 1), ("update", 2)])
def test_advantages_beyond_the_exact_sums_are_refused(
    replay_config: Path, large_dumps: Path, tmp_path: Path, scope: str, ranks: int
) -> None:
    """The first of two pipeline stages does not know why."""
    settings = ["train.steps=1", "algorithm.advantage=grpo_no_std", f"replay={large_dumps}"]
    settings += [f"algorithm.bapo.scope={scope}", f"parallel.pipeline={ranks}"]
    arguments = ["train", str(replay_config), f"run_dir={tmp_path / 'run'}", *settings]
    status, line = refusal(arguments, ranks=ranks)
    assert status == 1
    assert line.startswith("step 1: ")
    assert "|weight · advantage| >= 256" in line
