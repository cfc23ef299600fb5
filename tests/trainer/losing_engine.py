"""Engines with faults in their weight syncs."""

import os
import signal
from collections.abc import Callable
from typing import Any

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.base import Backend
from bapo_megatron.engine.local.kind import LocalKind
from bapo_megatron.engine.sglang.kind import SglangKind


def lose(change: Callable[[], None], version: int | None) -> Callable[[], None]:
    return (lambda: None) if version else change


def kill_trainer(change: Callable[[], None], version: int | None) -> Callable[[], None]:
    def then_kill() -> None:
        change()
        if version == 4:
            os.kill(os.getppid(), signal.SIGKILL)

    return then_kill


class LosingKind(LocalKind):
    """The engine ``local``, which accepts new weights and, after the first ones, keeps the old."""

    fault = staticmethod(lose)

    def open(self, config: RunConfig, device: str, *, awaits_weights: bool) -> Backend:
        from bapo_megatron.engine.local.engine import LocalBackend, LocalEngine

        fault = self.fault

        class FaultyBackend(LocalBackend):
            async def connect(self, address: str) -> LocalEngine:
                engine = await super().connect(address)
                change_weights = engine.weights._change

                async def change(work: Callable[[], None], version: int | None) -> None:
                    await change_weights(fault(work, version), version)

                engine.weights._change = change
                return engine

        return FaultyBackend(config.model, config.rollout.local, device)


class KillingKind(LosingKind):
    """The engine ``local``, whose trainer is killed while the weights of the second step come."""

    fault = staticmethod(kill_trainer)


class KillingSglangKind(SglangKind):
    """Servers; the trainer is killed once one has loaded its second adapter beside the first."""

    def open(self, config: RunConfig, device: str, *, awaits_weights: bool) -> Backend:
        from bapo_megatron.engine.sglang.client import SglangClient
        from bapo_megatron.engine.sglang.server import SglangBackend

        class KillingBackend(SglangBackend):
            async def connect(self, address: str) -> SglangClient:
                client = await super().connect(address)
                ask = client.ask

                async def ask_and_kill(path: str, *arguments: Any, **options: Any) -> Any:
                    answer = await ask(path, *arguments, **options)
                    if path.startswith("/load_lora_adapter") and len(answer) > 1:
                        os.kill(os.getppid(), signal.SIGKILL)
                    return answer

                client.ask = ask_and_kill
                return client

        return KillingBackend(config, device, awaits_weights=awaits_weights)
