"""The SGLang servers of a run: its own, or those of ``rollout.servers``."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.engine.sglang.server import own_servers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.engine.base import Engine, EngineServer


class SglangBackend:
    """A ``Backend``."""

    def __init__(self, config: RunConfig, device: str) -> None:
        """Prepare the servers; nothing is started.

        Args:
            config: The run.
            device: ``cuda`` or ``cpu``.
        """
        self._rollout = config.rollout
        self.servers: Sequence[EngineServer] = ()
        if config.rollout.servers:
            self._keys = ApiKeys.from_environment()
        else:
            self._keys = ApiKeys(secrets.token_hex(16), secrets.token_hex(16))
            self.servers = own_servers(config, device, self._keys)

    async def connect(self) -> list[Engine]:
        """See ``Backend``."""
        addresses = self._rollout.servers or [server.address for server in self.servers]
        timeout_s = self._rollout.request_timeout_s
        return [
            SglangClient(address, self._keys, request_timeout_s=timeout_s) for address in addresses
        ]
