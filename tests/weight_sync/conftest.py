"""Servers that take weights."""

from collections.abc import Iterator

import pytest

from tests.fakes.fake_weight_server import FakeWeightServer


@pytest.fixture
def servers() -> Iterator[list[FakeWeightServer]]:
    """Two fake servers that take weights."""
    with FakeWeightServer() as first, FakeWeightServer() as second:
        yield [first, second]
