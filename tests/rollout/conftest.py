"""Tests that start collectors."""

from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.rollout.client import CollectorClient
from tests.engine.helpers import descendants
from tests.rollout.forked_collector import forked_collectors, prepare_forks

Open = Callable[..., CollectorClient]
"""The ``open_client`` fixture: of a configuration."""


def changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    """A configuration with other values in a section."""
    content = config.model_dump(mode="json")
    content[section] |= values
    return type(config).model_validate(content)


@pytest.fixture
def open_client() -> Iterator[Open]:
    """Starts clients, with forks as collectors; checks that nothing is left of them."""
    prepare_forks()
    others = descendants()
    clients = []
    progress: list[str] = []

    def open_(config: RunConfig) -> CollectorClient:
        client = CollectorClient(config, on_progress=progress.append)
        clients.append(client)
        with forked_collectors():
            client.launch()
        return client

    yield open_
    started = descendants() - others
    for client in clients:
        client.close()
        client.close()
    assert not psutil.wait_procs(started, timeout=30)[1]
    assert progress
