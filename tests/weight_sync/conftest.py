"""Servers that take weights, real and fake, and models that they are pushed from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engine.sglang.servers import make_server, running
from tests.fakes.fake_weight_server import FakeWeightServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bapo_megatron.engine.sglang.server import SglangServer


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """A real server of its own: tests leave it with other weights."""
    with running(make_server(model_dir, tmp_path_factory.mktemp("server"))) as server:
        yield server


@pytest.fixture
def servers() -> Iterator[list[FakeWeightServer]]:
    """Two fake servers that take weights."""
    with FakeWeightServer() as first, FakeWeightServer() as second:
        yield [first, second]
