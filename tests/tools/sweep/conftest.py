"""A base configuration, and evaluations that fake runs take theirs from."""

from pathlib import Path

import pytest

from bapo_megatron.evaluation.results import write_results
from tests.evaluation.results import result
from tests.tools.sweep.files import write_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run whose files are there."""
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def outcomes(tmp_path: Path) -> Path:
    """The directory of ``tests.fakes.fake_train``: evaluations on ten problems."""
    for seed in range(3):
        for num_right in {2 + seed, 3 + 2 * seed}:
            answers = {f"a:{row}": ["2" if row < num_right else "3"] for row in range(10)}
            scored = result(answers, settings={"seed": seed})
            write_results([scored], tmp_path / "outcomes" / f"{seed}-{num_right}.json")
    return tmp_path / "outcomes"
