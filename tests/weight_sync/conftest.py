"""Servers that take weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.fake_weight_server import FakeWeightServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def servers() -> Iterator[list[FakeWeightServer]]:
    """Two fake servers that take weights."""
    with FakeWeightServer() as first, FakeWeightServer() as second:
        yield [first, second]
