"""A local engine that accepts new weights and, after the first ones, keeps the old."""

from collections.abc import Callable

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.base import Backend
from bapo_megatron.engine.local.kind import LocalKind


class LosingKind(LocalKind):
    """The engine ``local`` with this fault."""

    def open(self, config: RunConfig, device: str, *, awaits_weights: bool) -> Backend:
        from bapo_megatron.engine.local.engine import LocalBackend, LocalEngine

        class LosingBackend(LocalBackend):
            async def connect(self, address: str) -> LocalEngine:
                engine = await super().connect(address)
                change_weights = engine.weights._change

                async def lose(change: Callable[[], None], version: int | None) -> None:
                    await change_weights((lambda: None) if version else change, version)

                engine.weights._change = lose
                return engine

        return LosingBackend(config.model, config.rollout.local, device)
