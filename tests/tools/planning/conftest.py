import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed_launch import run_ranks


@pytest.fixture(scope="session")
def measured() -> Callable[[str], Any]:
    """What Megatron builds and keeps: calls a function of tests/tools/planning/measured.py once."""
    return functools.cache(lambda part: run_ranks(_measure, 1, part)[0])


def _measure(part: str) -> Any:
    """Call the function of that name, in a process of its own."""
    from tests.tools.planning import measured  # imports Megatron

    return getattr(measured, part)()
