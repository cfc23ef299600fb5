"""The border between a run and whatever samples for it.

An ``Engine`` holds one copy of the model: a server, or the model in this process. A ``Backend`` has
the run's own servers and makes an ``Engine`` for each. docs/extending.md says what another kind
must provide, tests/engine/test_contract.py tests it.

R = tokens of one completion, or of one piece of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from bapo_megatron.data.staleness import join_spans
from bapo_megatron.errors import RolloutError
from bapo_megatron.runtime.processes import nccl_settings
from bapo_megatron.types import FinishReason, VersionSpans

START_VERSION = 0
"""Weights version that an engine reports at first: the weights of ``model.path``."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How one request samples; no default of an engine applies."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    seed: int | None = None
    """The response's, in all of its requests; an engine that cannot repeat one ignores it."""


def sample_seed(*identity: str | int) -> int:
    """Derive the seed of one response from the run's seed and what identifies the response."""
    return int.from_bytes(hashlib.sha256(json.dumps(identity).encode()).digest()[:4])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request to one engine."""

    input_ids: Sequence[int]
    """Prompt, and what was sampled before."""
    sampling: SamplingSettings
    label: str
    """Names the request in errors."""
    order: tuple[int, int] = (0, 0)
    """A stepped engine admits what came between two bursts in this order, not as it came."""
    version: int = START_VERSION
    """Weights version that the engine is thought to hold; if it has another, all may come last."""
    return_logprobs: bool = True
    sampled_tokens: int = 0
    """How many of ``input_ids`` belong to the response: its random numbers continue there."""
    stream_tokens: int = 64
    """Approximate length of a piece."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request sampled, or a piece of it."""

    token_ids: np.ndarray
    """[R] int32; an end-of-sequence token is the last one."""
    logprobs: np.ndarray
    """[R] float32, finite: log_softmax(logits / T); empty if not asked for."""
    versions: VersionSpans
    """Which weights version sampled which tokens."""
    finish_reason: FinishReason
    """ABORT for every piece but the last."""


def join(parts: Sequence[Completion], finish_reason: FinishReason) -> Completion:
    """Join pieces into one completion."""
    if len(parts) == 1:
        return replace(parts[0], finish_reason=finish_reason)
    return Completion(
        np.concatenate([np.empty(0, np.int32), *(part.token_ids for part in parts)]),
        np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)]),
        join_spans(part.versions for part in parts),
        finish_reason,
    )


class CompletionSink:
    """Takes what a request yields."""

    def is_known(self, version: int) -> bool:
        """Whether this weights version may have sampled."""
        return True

    def retracted(self, num_times: int) -> None:
        """Note that the cache was too full for the request, so that it was computed again."""

    def take(self, part: Completion) -> None:
        """Take a piece; the last one says why the request ended, and may have no token."""


PauseMode = Literal["retract", "in_place"]
"""See ``rollout.weight_sync.in_flight``."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine is and can do; does not change while it runs."""

    num_ranks: int
    """Processes that share its requests; their number is counted per rank."""
    methods: frozenset[str]
    """Values of ``rollout.weight_sync.method`` that it supports."""
    cache_tokens: int | None = None
    """Capacity of its KV cache, all ranks together; None: requests are admitted by number."""
    gpus: tuple[int, ...] = ()
    """The GPU of each rank, in the trainer's numbering; empty where that is not known."""
    nccl_settings: Mapping[str, str] = field(default_factory=dict)
    """Its ``processes.nccl_settings``; empty if it does not report them."""

    def check_nccl(self, address: str) -> None:
        """Raise a ``RolloutError`` if this process has other ``nccl_settings``."""
        for name, here in nccl_settings().items():
            if (there := self.nccl_settings.get(name, here)) != here:
                raise RolloutError(
                    f"{name}: must be the same for trainer and servers, whose NCCL group would "
                    f"fail or hang otherwise, got {here} here and {there} at {address}; export "
                    f"{name}={here} where that server is started, or leave it out on both sides"
                )


class MemoryPart(Enum):
    """Memory that an engine on the trainer's GPU releases and takes back."""

    WEIGHTS = "weights"
    CACHE = "cache"
    """KV cache, and what else sampling needs besides the weights."""


class Engine(Protocol):
    """One copy of the model; belongs to the event loop that uses it.

    Every coroutine raises a ``ServerGoneError`` if no answer comes in time (a
    ``BrokenConnectionError`` if the connection broke), another ``ServerError`` if the answer is
    unusable, and another ``RolloutError`` if the engine refuses, as every other engine would. Time
    limits concern the answers of another process.
    """

    @property
    def address(self) -> str:
        """``http://host:port``; a plain word in this process, whose weights come over loopback."""

    @property
    def stepper(self) -> Stepper | None:
        """Makes the engine sample; None if it samples by itself."""

    @property
    def num_in_flight(self) -> int:
        """Number of requests that have not ended."""

    @property
    def silence_s(self) -> float:
        """How long no request has received anything; 0 while paused or without requests."""

    async def stream(self, request: GenerateRequest, sink: CompletionSink) -> None:
        """Sample once, in pieces; return when ``sink`` has the last one.

        It has no time limit; the caller watches the engine and calls ``give_up``. When it is
        cancelled, nothing of the request stays behind.
        """

    async def score(self, token_ids: Sequence[int], timeout_s: float) -> list[float]:
        """Return the log-prob of every token but the first, given those before it, at T = 1."""

    async def abort(self, timeout_s: float) -> None:
        """End every request with what there is; what has not ended after ``timeout_s`` is lost.

        Repeat it until ``num_in_flight`` is 0: it may miss a request that is still on its way, and
        those that are paused in place may end only after ``resume``.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Sample nothing until ``resume``; requests stay, and may be silent."""

    async def resume(self) -> None:
        """Continue after ``pause``; do nothing if not paused."""

    def give_up(self, reason: str) -> None:
        """End every request at once with a ``ServerGoneError`` that has the reason."""

    async def version(self, timeout_s: float | None = None) -> str:
        """Return the weights version that it reports: the cheapest health check."""

    async def capabilities(self, timeout_s: float | None = None) -> Capabilities:
        """Return what it can do; the process that samples must answer, which detects hangs."""

    async def check(self) -> None:
        """Raise a ``RolloutError`` if the run must not use it as it was started."""

    async def weights(self, timeout_s: float, *, flush_cache: bool = True) -> WeightControl:
        """Return its calls for new weights; ``flush_cache``: the last drops the old KV cache."""

    async def release_memory(self, timeout_s: float) -> None:
        """Release weights and cache; raise a ``RolloutError``, releasing nothing, if it is busy."""

    async def take_memory(self, part: MemoryPart, timeout_s: float) -> None:
        """Take memory back: first for the weights, then for the cache."""

    async def close(self) -> None:
        """End what is in flight, and close every connection."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an engine says of its queue and its cache at one moment."""

    running: int
    """Requests that it samples for."""
    waiting: int
    """Requests that it has not begun, or took out of a full cache."""
    cache_used_share: float
    """Use of its fullest rank's cache."""


@runtime_checkable
class LoadReporter(Protocol):
    """An ``Engine`` that also reports its load; optional, and for metrics only."""

    async def report_load(self, timeout_s: float) -> LoadReport:
        """Return the load of this moment, without asking what samples."""


class Stepper(Protocol):
    """Drives an engine that does not sample by itself.

    What is sampled between two decisions is counted in decode steps, not in seconds: two runs with
    one seed are equal bit for bit.
    """

    async def decode(self, max_steps: int) -> int:
        """Sample up to ``max_steps`` tokens of every request, hand them out, return the steps made.

        Fewer only if no request is left, none while paused. Which requests share a step depends
        only on the order in which they came.
        """


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The tensors in a bucket, one after the other."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Such as ``float32``."""
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """The ranks of one member of a collective group, and where the members meet."""

    name: str
    master_address: str
    master_port: int
    backend: str
    """``nccl`` or ``gloo``."""
    first_rank: int
    """The member's first rank in the group; the trainer is rank 0."""
    world_size: int


class WeightControl(Protocol):
    """One engine's calls for new weights; they raise as those of ``Engine``. None is repeated.

    ``version`` is the version of the weights; it comes with their last part only, because an
    engine that has a part of them keeps its old label and is not used.
    """

    @property
    def tensor_ranks(self) -> int:
        """Number of ranks that join a group."""

    async def open_session(self, timeout_s: float) -> None:
        """Make the engine ready for ``receive`` or ``take``."""

    async def close_session(self, timeout_s: float) -> None:
        """Let the engine finish what it does after the last weights."""

    async def join_group(self, place: GroupPlace, timeout_s: float) -> None:
        """Have the engine's ranks join a collective group; return when all members have."""

    async def leave_group(self, name: str, timeout_s: float) -> None:
        """Have the engine's ranks forget a group."""

    async def receive(
        self, bucket: BucketLayout, group_name: str, *, version: int | None, timeout_s: float
    ) -> None:
        """Receive one flat tensor, broadcast by rank 0 of the group, and load what it holds."""

    async def take(self, payloads: Sequence[str], *, version: int | None, timeout_s: float) -> None:
        """Load a ``weight_sync.send.shared_memory_payload`` on each tensor-parallel rank."""

    async def load(self, model_dir: Path, *, version: int, timeout_s: float) -> None:
        """Load a Hugging Face directory."""

    async def flush_idle(self, timeout_s: float) -> None:
        """Drop the KV cache of old weights, unless requests are running, paused or not."""


class Readiness(Enum):
    """What a server answers when it is asked whether it takes requests."""

    SILENT = "silent"
    BUSY = "busy"
    """It is starting, or takes weights that somebody waits for."""
    READY = "ready"


class EngineServer(Protocol):
    """The process of one of the run's own servers; ``supervisor`` watches it."""

    @property
    def address(self) -> str:
        """``http://host:port``; known after ``start``."""

    @property
    def name(self) -> str:
        """Description for people, with its address."""

    @property
    def log_path(self) -> Path:
        """File that it writes its log to."""

    @property
    def num_starts(self) -> int:
        """How often it was started."""

    @property
    def is_started(self) -> bool:
        """Whether there is a process that ``close`` has not ended."""

    def start(self) -> None:
        """Start the process and return at once; after ``close``, at the same address."""

    def exit_reason(self) -> str | None:
        """Say how it ended, for people; None while it runs."""

    async def ask(self, timeout_s: float) -> Readiness:
        """Ask what samples whether it takes requests, without one."""

    def kill(self) -> None:
        """End it at once, without waiting; do nothing if it has ended."""

    def close(self) -> None:
        """End the process group and wait for it; safe to call twice."""


class Backend(Protocol):
    """One kind of engine, as one process of the run uses it."""

    @property
    def servers(self) -> Sequence[EngineServer]:
        """The run's own servers on this host; empty if it needs none, or others run them."""

    def addresses(self) -> Sequence[str]:
        """Say where the run's engines are now; own servers were started.

        Raises a ``ConfigError`` where ``rollout.servers_file`` cannot be used.
        """

    async def connect(self, address: str) -> Engine:
        """Make the engine at an address, and send nothing; in this process, load ``model.path``."""
