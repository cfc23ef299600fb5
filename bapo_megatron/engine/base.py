"""The interface between a run and its engines, which sample.

An ``Engine`` holds one copy of the model: a server, or the model in this process. A ``Backend`` has
the run's own servers and makes an ``Engine`` for each. docs/extending.md lists what another kind
must provide; tests/engine/test_contract.py tests it.

R = tokens of a completion, or of a piece of one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from bapo_megatron.data.record import Completion
from bapo_megatron.errors import RolloutError
from bapo_megatron.runtime.processes import nccl_settings

START_VERSION = 0
"""Weights version that an engine reports at the start: the weights of ``model.path``."""
NO_WEIGHTS = "none"
"""Weights version that a server reports before it has received weights."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling settings of one request; an engine's defaults never apply."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    seed: int = field(kw_only=True)
    """Seed of the response, in all of its requests; ignored by engines that cannot use one."""


def sample_seed(*identity: str | int) -> int:
    """Derive the seed of a response from the run's seed and the response's identity."""
    return int.from_bytes(hashlib.sha256(json.dumps(identity).encode()).digest()[:4])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request to one engine."""

    input_ids: Sequence[int]
    """Prompt and response so far."""
    sampling: SamplingSettings
    label: str
    """Names the request in errors."""
    order: tuple[int, int] = (0, 0)
    """Order in which an engine with a stepper admits requests that arrive between two bursts."""
    version: int = START_VERSION
    """Expected weights version; if the engine holds another, all tokens may come in one piece."""
    return_logprobs: bool = True
    top_logprobs: int = 0
    """K: number of likeliest tokens to return at each position, with log-probs."""
    sampled_tokens: int = 0
    """Response tokens among ``input_ids``: the response's random numbers continue there."""
    stream_tokens: int = 64
    """Approximate length of a piece."""
    routes_from: int | None = None
    """First of the input tokens whose experts are wanted; None: none are."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs of tokens that an engine did not sample, log_softmax(logits) at T = 1.

    R = scored tokens, K = ``top_k``.
    """

    logprobs: np.ndarray
    """[R] float32; NaN where the engine reports none."""
    top_ids: np.ndarray
    """[R, K] int32: the likeliest tokens at each position, the likeliest first."""
    top_logprobs: np.ndarray
    """[R, K] float32: their log-probs."""


class CompletionSink:
    """Receives the output of a request."""

    def is_known(self, version: int) -> bool:
        """Whether this weights version may have sampled."""
        return True

    def retracted(self, num_times: int) -> None:
        """Note that a full KV cache preempted the request, so that it was recomputed."""

    def take(self, part: Completion) -> None:
        """Take a piece; the last one has the finish reason, and may be empty.

        An error that it raises ends the request, and ``Engine.stream`` raises it.
        """


PauseMode = Literal["retract", "in_place"]
"""See ``rollout.weight_sync.in_flight``."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of an engine, which do not change while it runs."""

    num_ranks: int
    """Processes that share its requests; with ``broadcast`` and ``tensor`` each gets weights."""
    methods: frozenset[str]
    """Supported values of ``rollout.weight_sync.method``."""
    cache_tokens: int | None = None
    """Capacity of its KV cache over all ranks; None: requests are admitted by number."""
    max_requests: int | None = None
    """Requests that run at a time over all ranks, where each holds more than tokens of the cache,
    such as a recurrent state; None: no limit."""
    gpus: tuple[int, ...] = ()
    """The GPU of each rank, as the trainer numbers them; empty if unknown."""
    nccl_settings: Mapping[str, str] = field(default_factory=dict)
    """Its ``processes.nccl_settings``; empty if unreported."""

    def check_weight_sync(self, method: str, address: str) -> None:
        """Check that weights can be synced by ``rollout.weight_sync.method``.

        Raises:
            RolloutError: They cannot, or this process's ``nccl_settings`` differ for ``broadcast``.
        """
        if method not in self.methods:
            raise RolloutError(
                f"rollout.weight_sync.method: must be {' or '.join(sorted(self.methods))} for "
                f"{address} as it was started, got {method}; set it"
            )
        if method != "broadcast":
            return
        for name, here in nccl_settings().items():
            if (there := self.nccl_settings.get(name, here)) != here:
                raise RolloutError(
                    f"{name}: must be the same for trainer and servers, or their NCCL group would "
                    f"fail or hang, got {here} here and {there} at {address}; export "
                    f"{name}={here} where that server is started, or leave it out on both sides"
                )


class MemoryPart(Enum):
    """Memory that an engine on the trainer's GPU releases and takes back."""

    WEIGHTS = "weights"
    CACHE = "cache"
    """KV cache, and other memory that sampling needs besides the weights."""


class Engine(Protocol):
    """One copy of the model; belongs to the event loop that uses it.

    Every coroutine raises ``ServerGoneError`` if no answer comes in time
    (``BrokenConnectionError`` if the connection broke), another ``ServerError`` if the answer is
    unusable, and another ``RolloutError`` if the engine refuses, as every other engine would. Time
    limits apply only to engines in another process.
    """

    @property
    def address(self) -> str:
        """``http://host:port``; a plain word in this process, which gets weights over loopback."""

    @property
    def stepper(self) -> Stepper | None:
        """Drives the engine; None if it samples by itself."""

    @property
    def weights(self) -> WeightControl:
        """Its calls for new weights."""

    @property
    def num_in_flight(self) -> int:
        """Number of requests that have not ended."""

    @property
    def silence_s(self) -> float:
        """Seconds since any request received output; 0 while paused or without requests."""

    async def stream(self, request: GenerateRequest, sink: CompletionSink) -> None:
        """Sample one completion in pieces; return when ``sink`` has the last one.

        No time limit: the caller watches the engine and calls ``give_up``. Cancelling it also ends
        the request in the engine.
        """

    async def score(
        self, token_ids: Sequence[int], timeout_s: float, *, start: int = 1, top_k: int = 0
    ) -> Scores:
        """Score the tokens from position ``start``, at least 1, with the engine's weights.

        Only tokens before ``start`` − 1 may come from a KV cache, so with ``start`` 1 none do. With
        ``top_k`` it also returns that many of the likeliest tokens at each position.
        """

    async def abort(self, timeout_s: float) -> None:
        """Abort every request, which keeps its tokens if it ends within ``timeout_s``.

        Repeat until ``num_in_flight`` is 0: an abort may miss requests that are still on their way,
        and requests that are paused in place may end only after ``resume``.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling until ``resume``; requests stay in the engine."""

    async def resume(self) -> None:
        """Continue after ``pause``; do nothing if not paused."""

    def give_up(self, reason: str) -> None:
        """End every request at once with a ``ServerGoneError`` that gives the reason."""

    async def version(self, timeout_s: float | None = None) -> str:
        """Return the engine's weights version; also the cheapest health check."""

    async def capabilities(self, timeout_s: float | None = None) -> Capabilities:
        """Return its properties, from the process that samples, so that hangs are detected."""

    async def check(self) -> None:
        """Raise a ``RolloutError`` if the run cannot use the engine as it was started."""

    async def release_memory(self, timeout_s: float) -> None:
        """Release weights and KV cache; if busy, release nothing and raise ``RolloutError``."""

    async def take_memory(self, part: MemoryPart, timeout_s: float) -> None:
        """Take memory back: first for the weights, then for the KV cache."""

    async def close(self) -> None:
        """End requests in flight, and close every connection."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Queue and KV cache of an engine at one time."""

    running: int
    """Requests that are being sampled."""
    waiting: int
    """Requests that are queued or preempted."""
    cache_used_share: float
    """KV cache use of the fullest rank."""
    acceptance_length: float | None = None
    """Tokens per decode step of speculation, since the KV cache was last dropped."""


@runtime_checkable
class LoadReporter(Protocol):
    """An ``Engine`` that also reports its load; optional, and for metrics only."""

    async def report_load(self, timeout_s: float) -> LoadReport:
        """Return the current load, without asking the process that samples."""


class Stepper(Protocol):
    """Drives an engine that does not sample by itself.

    Sampling between two decisions is counted in decode steps, not seconds, so two runs with one
    seed are equal bit for bit.
    """

    async def decode(self, max_steps: int) -> int:
        """Sample up to ``max_steps`` tokens of every request and deliver them; return the steps.

        Fewer only if no request is left, none while paused. Which requests share a step depends
        only on their order.
        """


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The tensors in a bucket, in order."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Such as ``float32``."""
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """One member's ranks in a collective group, and the rendezvous."""

    name: str
    master_address: str
    master_port: int
    backend: str
    """``nccl`` or ``gloo``."""
    first_rank: int
    """The member's first rank in the group; the trainer is rank 0."""
    world_size: int


class WeightControl(Protocol):
    """One engine's calls for new weights; they raise as those of ``Engine``, and are not retried.

    ``version`` is passed only with the last part of the weights: an engine with only some of them
    still reports its old version and is not used. That part also drops the KV cache, unless
    requests are paused in place (``rollout.weight_sync.in_flight``).
    """

    async def open_session(self, timeout_s: float) -> None:
        """Prepare the engine for ``receive`` or ``take``."""

    async def close_session(self, timeout_s: float) -> None:
        """Have the engine finish its work after the last weights."""

    async def join_group(self, place: GroupPlace, timeout_s: float) -> None:
        """Have the engine's ranks join a collective group; return once all members have joined."""

    async def leave_group(self, name: str, timeout_s: float) -> None:
        """Have the engine's ranks leave a group."""

    async def receive(
        self, bucket: BucketLayout, group_name: str, *, version: int | None, timeout_s: float
    ) -> None:
        """Receive a bucket as one flat tensor, broadcast by rank 0 of the group, and load it."""

    async def take(self, payloads: Sequence[str], *, version: int | None, timeout_s: float) -> None:
        """Load a ``weight_sync.send.shared_memory_payload`` on each tensor-parallel rank."""

    async def load(self, model_dir: Path, *, version: int, timeout_s: float) -> None:
        """Load a Hugging Face directory."""

    async def flush_idle(self, timeout_s: float) -> None:
        """Drop the KV cache of old weights unless there are requests, paused or not."""


class Readiness(Enum):
    """Whether a server takes requests."""

    SILENT = "silent"
    BUSY = "busy"
    """It is starting, or loading weights for a caller."""
    READY = "ready"


class EngineServer(Protocol):
    """The process of one of the run's own servers; ``supervisor`` watches it."""

    @property
    def address(self) -> str:
        """``http://host:port``; known after ``start``."""

    @property
    def name(self) -> str:
        """Description for people, with the address."""

    @property
    def log_path(self) -> Path:
        """Its log file."""

    @property
    def num_starts(self) -> int:
        """How often it was started."""

    @property
    def is_started(self) -> bool:
        """Whether there is a process, running or exited, that ``close`` has not ended."""

    def start(self) -> None:
        """Start the process and return at once; after ``close``, at the same address."""

    def exit_reason(self) -> str | None:
        """Describe how it exited; None while it runs."""

    async def ask(self, timeout_s: float) -> Readiness:
        """Ask the process that samples whether it takes requests, without sending one."""

    def kill(self) -> None:
        """Kill the process without waiting; do nothing if it has exited."""

    def close(self) -> None:
        """End the process group and wait for it; safe to call twice."""


class Backend(Protocol):
    """One kind of engine, as one process of the run uses it."""

    @property
    def servers(self) -> Sequence[EngineServer]:
        """The run's own servers on this host; empty if there are none or they are external."""

    def addresses(self) -> Sequence[str]:
        """Return the current addresses of the run's engines; own servers must have been started.

        Raises a ``ConfigError`` if ``rollout.servers_file`` cannot be used.
        """

    async def connect(self, address: str) -> Engine:
        """Return the engine at an address, without calling it; a local one loads ``model.path``."""
