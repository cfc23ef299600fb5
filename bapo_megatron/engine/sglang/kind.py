"""What the commands need of this kind of engine; importing it is cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.engine.base import Backend


class Kind:
    """An ``EngineKind``."""

    packages: ClassVar[Mapping[str, str]] = {"sglang": "0.5.21"}
    """What requirements/ installs."""

    def check(self, config: RunConfig) -> None:
        """See ``EngineKind``."""
        from bapo_megatron.engine.sglang.check import check_servers

        check_servers(config)

    def open(self, config: RunConfig, device: str) -> Backend:
        """See ``EngineKind``."""
        from bapo_megatron.engine.sglang.server import SglangBackend

        return SglangBackend(config, device)

    def serve(self, config: RunConfig, show: Callable[[str], None]) -> None:
        """See ``EngineKind``."""
        from bapo_megatron.engine.sglang.serve import serve

        serve(config, show)
