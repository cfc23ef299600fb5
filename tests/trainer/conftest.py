"""A tiny random model, dumps made from it, and the configuration that replays them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from bapo_megatron.data.dump import read_batch
from tests.launch import Launched
from tests.trainer.dumps import MANY_STEPS, make_random_model, replay_settings, write_dumps
from tests.trainer.exact_policy import ExactPolicy


@pytest.fixture(scope="session")
def mixed_dumps(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Path:
    """Six steps of dumps with right and wrong samples in every group."""
    return write_dumps(tmp_path_factory.mktemp("mixed"), random_model, steps=6)


@pytest.fixture(scope="session")
def many_dumps(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Path:
    """So many small steps that a test can end the training in the middle."""
    return write_dumps(
        tmp_path_factory.mktemp("many"),
        random_model,
        steps=MANY_STEPS,
        groups=2,
        samples_per_group=2,
    )


@pytest.fixture(scope="session")
def episode_dump(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Path:
    """A batch of four groups in which most responses have tokens that an environment wrote."""
    root = tmp_path_factory.mktemp("episodes")
    return write_dumps(root, random_model, steps=1, episodes=True) / "step_000001.parquet"


@pytest.fixture(scope="session")
def branch_dump(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Path:
    """A batch of two groups whose episodes have 1 to 4 sequences, with written tokens in most."""
    root = tmp_path_factory.mktemp("branches")
    shape = {"groups": 2, "samples_per_group": 4, "episodes": True, "branches": True}
    return write_dumps(root, random_model, steps=1, **shape) / "step_000001.parquet"


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model than ``random_model``, of the same tokens."""
    return make_random_model(
        tmp_path_factory.mktemp("other"), hidden_size=48, initializer_range=0.1
    )


@pytest.fixture(scope="session")
def exact(random_model: Path, episode_dump: Path) -> ExactPolicy:
    """The responses of ``episode_dump``, by transformers in float64."""
    from tests.trainer.exact_policy import ExactPolicy

    return ExactPolicy(random_model, read_batch(episode_dump))


@pytest.fixture(scope="session")
def replay_config(
    tmp_path_factory: pytest.TempPathFactory, random_model: Path, mixed_dumps: Path
) -> Path:
    """Five steps of two updates in float32 from ``mixed_dumps``."""
    path = tmp_path_factory.mktemp("config") / "replay.yaml"
    path.write_text(yaml.safe_dump(replay_settings(random_model, mixed_dumps, path.parent / "run")))
    return path


@pytest.fixture
def start_long(
    replay_config: Path, many_dumps: Path, started: list[Launched]
) -> Callable[..., Launched]:
    """Starts a run of ``MANY_STEPS`` steps."""

    def start_run(run_dir: Path, *overrides: str, ranks: int = 2, **environment: str) -> Launched:
        long = (f"run_dir={run_dir}", f"replay={many_dumps}", f"train.steps={MANY_STEPS}")
        arguments = ["train", str(replay_config), *long, *overrides]
        started.append(Launched(arguments, ranks=ranks, environment=environment))
        return started[-1]

    return start_run
