"""Servers that take weights."""

from collections.abc import Iterator

import pytest

from tests.fakes.fake_weight_server import FakeWeightServer


@pytest.fixture
def servers() -> Iterator[list[FakeWeightServer]]:
    """Two fake servers that take weights, of one and of two ranks."""
    with FakeWeightServer() as first, FakeWeightServer(tensor_ranks=2) as second:
        yield [first, second]
