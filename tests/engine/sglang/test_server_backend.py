"""The servers and clients of a run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bapo_megatron.engine.load import load_kind

if TYPE_CHECKING:
    from tests.engine.helpers import MakeConfig


def test_own_servers_share_random_keys_and_are_connected_to_where_they_listen(
    make_config: MakeConfig,
) -> None:
    config = make_config(server={"count": 2, "port": 30000})
    kind = load_kind("sglang")
    first, second = (kind.open(config, "cpu", awaits_weights=True) for _ in range(2))
    keys = [server.keys for backend in (first, second) for server in backend.servers]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert [len(key) for key in (keys[0].api_key, keys[0].admin_api_key)] == [32, 32]
    assert keys[0].api_key != keys[0].admin_api_key
    addresses = ["http://127.0.0.1:30000", "http://127.0.0.1:30001"]
    assert [server.address for server in first.servers] == addresses
    assert first.addresses() == addresses


def test_servers_of_others_are_connected_to_and_not_started(make_config: MakeConfig) -> None:
    backend = load_kind("sglang").open(
        make_config(servers=("http://node:30000/",)), "cpu", awaits_weights=True
    )
    assert backend.servers == ()
    (address,) = backend.addresses()
    engine = asyncio.run(backend.connect(address))
    assert engine.address == "http://node:30000"
