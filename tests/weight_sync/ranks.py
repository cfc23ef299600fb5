"""Trainer ranks that sync weights with servers, with the collector's part in a thread of rank 0."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from bapo_megatron.config.megatron import LoraConfig, MegatronConfig, ModelConfig
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.config.schema import OpsConfig, TrainConfig
from bapo_megatron.engine.local.cache import ATTENTION, register_attention
from bapo_megatron.engine.local.engine import LocalEngine
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.errors import RolloutError
from bapo_megatron.policy.hf_weights import local_weights
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.runtime.calls import Answers, Request, encode
from bapo_megatron.trainer.recompute import score_probes
from bapo_megatron.trainer.split import split_shape
from bapo_megatron.weight_sync import send
from bapo_megatron.weight_sync.receive import WeightReceiver
from bapo_megatron.weight_sync.send import SyncReport, WeightSync
from tests.distributed_launch import joined
from tests.engine.sglang.servers import KEYS
from tests.policy.build import build_state, layout_of
from tests.weight_sync.setting import StubGeneration, StubPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bapo_megatron.runtime.calls import Call, ResponseT
    from bapo_megatron.runtime.distributed import ProcessGroups

PROBE = ((3, 20, 77, 4, 9, 31), (5, 6, 7, 8), (42, 13))


@dataclass(frozen=True)
class Fault:
    """A signal to a process group right after a call was started."""

    call: str
    number: int
    """Which of these calls, counted from 0."""
    pid: int
    signal: int


class ThreadSource:
    """A ``Caller`` of a ``WeightReceiver`` in a thread; use it as a context manager."""

    def __init__(
        self,
        addresses: Sequence[str],
        config: RolloutConfig,
        fault: Fault | None = None,
        engines: Sequence[LocalEngine] = (),
    ) -> None:
        self._fault = fault
        self.calls: list[str] = []
        self.generation = StubGeneration()
        self._clients: list[Any] = [*engines] or [
            SglangClient(address, KEYS, request_timeout_s=config.request_timeout_s)
            for address in addresses
        ]
        self.pool = StubPool(self._clients)
        self.receiver = WeightReceiver(self.pool, config, self.generation, PROBE)
        self._answers = Answers()
        self.receiver.bind_to(self._answers)

    def __enter__(self) -> ThreadSource:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def start(self, call: Call[Any, ResponseT], request: Any, /) -> Callable[[], ResponseT]:
        sent = json.loads(encode(Request(0, call.name, request)))  # as over the socket
        name = call.name.removeprefix("weights.")
        future = asyncio.run_coroutine_threadsafe(
            self._answers.answer(Request(0, call.name, sent["arguments"])), self._loop
        )
        fault = self._fault
        if fault is not None and (name, self.calls.count(name)) == (fault.call, fault.number):
            os.killpg(fault.pid, fault.signal)
        self.calls.append(name)
        return future.result

    async def _close(self) -> None:
        await self.receiver.close()
        for client in self._clients:
            await client.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)


@dataclass(frozen=True)
class Synced:
    """What became of one weight sync on rank 0."""

    report: SyncReport | None
    error: str
    calls: tuple[str, ...]
    lost: dict[str, str]
    """Why servers were lost, by address."""
    generation: tuple[str, ...]


def sync_changed(
    model_dir: Path,
    addresses: Sequence[str],
    rollout: dict[str, Any],
    directory: Path,
    *,
    factors: tuple[float, ...] = (1.5,),
    layout: dict[str, int] | None = None,
    fault: Fault | None = None,
) -> list[Synced]:
    """Sync the model's weights once for each factor, by which some of them are multiplied before.

    The weights of sync n are exported to ``<directory>/<n>``; versions are 100 + n. The model has
    131 kB, hence "megabytes" of another size.
    """
    send._BYTES_PER_MB = 20_000
    config = RolloutConfig.model_validate(rollout)
    outcomes = []
    with joined(**(layout or {})) as groups:
        state = build_policy(model_dir, groups)
        score = partial(score_probes, state.model, OpsConfig(), shape_of(state, groups))
        sync = WeightSync(config.weight_sync, directory / "run", score, state.model.groups.device)
        with contextlib.ExitStack() as stack:
            source: ThreadSource | None = None
            if groups.rank == 0:
                source = stack.enter_context(ThreadSource(addresses, config, fault))
                stack.callback(sync.close)
            for number, factor in enumerate(factors):
                _multiply(state, factor)
                state.num_updates = 100 + number
                outcomes.append(_sync(sync, state, source))
                state.model.export_hf(directory / str(number))
    return outcomes


def _sync(sync: WeightSync, state: TrainState, source: ThreadSource | None) -> Synced:
    report, error = None, ""
    try:
        report = sync.sync(state, source)
    except RolloutError as caught:
        error = str(caught)
    if source is None:
        return Synced(report, error, (), {}, ())
    return Synced(
        report,
        error,
        tuple(source.calls),
        dict(source.pool.reasons),
        tuple(source.generation.calls),
    )


@dataclass(frozen=True)
class Broken:
    """What a local engine does wrong, by parts of Hugging Face's names."""

    keeps: str = "nothing"
    """Weights that stay as they were, whatever it gets."""
    scales: str = "nothing"
    """Modules whose output is half as large again."""


def sync_broken(
    model_dir: Path,
    directory: Path,
    brokens: Sequence[Broken],
    method: str,
    *,
    lora_rank: int = 0,
    **layout: int,
) -> tuple[str, bool]:
    """The first weight sync to local engines; returns its error, and whether weights stayed."""
    sync_config = {"method": method, "verify_tolerance": 1e-3, "in_flight": "retract"}
    config = RolloutConfig.model_validate({"weight_sync": sync_config})
    with joined(**layout) as groups, contextlib.ExitStack() as stack:
        lora = LoraConfig(rank=lora_rank)
        state = build_state(ModelConfig(path=model_dir, dtype="float32", lora=lora), groups)
        local = local_weights(state.model.chunks, state.model.hf, groups)
        if state.model.lora is not None:
            local += state.model.lora.parameters()
            for _, parameter in state.model.lora.parameters():
                parameter.data.uniform_(-0.1, 0.1)
        for _, parameter in local:
            parameter.data *= 1.1
        before = [parameter.detach().clone() for _, parameter in local]
        score = partial(score_probes, state.model, OpsConfig(), shape_of(state, groups))
        sync = WeightSync(config.weight_sync, directory, score, groups.device)
        source: ThreadSource | None = None
        if groups.rank == 0:
            engines = [_broken_engine(model_dir, broken) for broken in brokens]
            source = stack.enter_context(ThreadSource((), config, engines=engines))
            stack.callback(sync.close)
        outcome = _sync(sync, state, source)
        after = [parameter for _, parameter in local]
        return outcome.error, all(map(torch.equal, before, after))


def _broken_engine(model_dir: Path, broken: Broken) -> LocalEngine:
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation=ATTENTION)
    model.float().eval().requires_grad_(False)
    # transformers leaves its buffers as they are in a process that has imported Megatron.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    for name, module in model.named_modules():
        if name.endswith(broken.scales):
            module.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    engine = LocalEngine(model, frozenset(), max_rows=1)
    parameters, copy = dict(model.named_parameters()), engine.weights._copy

    def copy_others(tensors: dict[str, torch.Tensor], *, is_last: bool) -> None:
        kept = {name: parameters[name].clone() for name in tensors if broken.keeps in name}
        copy(tensors | kept, is_last=is_last)

    engine.weights._copy = copy_others  # type: ignore[method-assign, assignment]
    return engine


def _multiply(state: TrainState, factor: float) -> None:
    with torch.no_grad():
        for weight, parameter in local_weights(
            state.model.chunks, state.model.hf, state.model.groups
        ):
            if weight.megatron.endswith("linear_fc2.weight"):
                parameter.mul_(factor)


def build_policy(model_dir: Path, groups: ProcessGroups) -> TrainState:
    return build_state(ModelConfig(path=model_dir, dtype="float32"), groups)


def shape_of(state: TrainState, groups: ProcessGroups) -> Any:
    return split_shape(
        state.model,
        layout_of(groups),
        MegatronConfig(),
        TrainConfig(steps=1, max_tokens_per_micro_batch=64),
    )
