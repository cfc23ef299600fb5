"""``rollout.engine: sglang``, as the commands see it; importing it is cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from bapo_megatron.config.load import ConfigError
from bapo_megatron.engine.sglang.settings import (
    SERVERS_KEY,
    VERSION,
    check_acceleration,
    check_adapters,
    check_own_servers,
    server_addresses,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.engine.base import Backend


class SglangKind:
    """SGLang servers: the run's own, or those of ``rollout.servers`` or its file."""

    packages: ClassVar[Mapping[str, str]] = {"sglang": VERSION}
    model_types = None

    def check(self, config: RunConfig, *, is_here: bool = True) -> None:
        rollout = config.rollout
        check_acceleration(config)
        check_adapters(config)
        if rollout.starts_servers:
            check_own_servers(config, is_here=is_here)
        num_servers = len(server_addresses(rollout)) or rollout.server.count
        if (rollout.min_servers or 1) > num_servers:
            raise ConfigError(
                f"rollout.min_servers: must be at most the {num_servers} servers of the run, got "
                f"{rollout.min_servers}; lower it, or add servers"
            )

    def open(self, config: RunConfig, device: str, *, awaits_weights: bool) -> Backend:
        from bapo_megatron.engine.sglang.server import SglangBackend

        return SglangBackend(config, device, awaits_weights=awaits_weights)

    def serve(
        self, config: RunConfig, show: Callable[[str], None], *, key: str = SERVERS_KEY
    ) -> None:
        """See ``EngineKind``; also an ``OSError`` if ``run_dir`` cannot be written."""
        if config.rollout.colocated:
            raise ConfigError(
                "rollout.colocated: must be false for serve, got true: only the trainer's own "
                "servers share its GPUs; leave it out"
            )
        if config.rollout.server.host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                "rollout.server.host: must be one address, which the trainer can use, got "
                f"'{config.rollout.server.host}'; give this node's"
            )
        check_acceleration(config)
        check_adapters(config)
        check_own_servers(config)
        from bapo_megatron.engine.sglang.server import serve

        serve(config, show, key)
