"""A base configuration, and evaluations that fake runs take theirs from."""

import shutil
from pathlib import Path

import pytest

from tests.tools.sweep.files import write_base, write_outcomes


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run whose files are there."""
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def evaluations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``tests.fakes.fake_train`` copies."""
    return write_outcomes(tmp_path_factory.mktemp("evaluations"), seeds=3)


@pytest.fixture
def outcomes(evaluations: Path, tmp_path: Path) -> Path:
    """The directory of ``tests.fakes.fake_train``."""
    return Path(shutil.copytree(evaluations, tmp_path / "outcomes"))
