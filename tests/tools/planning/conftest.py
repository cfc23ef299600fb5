from typing import Any

import pytest

from tests.distributed_launch import run_ranks


@pytest.fixture(scope="session")
def measured() -> dict[str, Any]:
    """What Megatron builds, keeps and sends (tests/tools/planning/measured.py).

    Each part is measured when a test first asks for it.
    """
    return _Measured()


class _Measured(dict[str, Any]):
    def __missing__(self, part: str) -> Any:
        (self[part],) = run_ranks(_measure, 1, part)
        return self[part]


def _measure(part: str) -> Any:
    """Call the function of that name, in a process of its own."""
    from tests.tools.planning import measured  # imports Megatron

    return getattr(measured, part)()
