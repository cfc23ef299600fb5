"""The border between a run and whatever samples for it.

An ``Engine`` holds one copy of the model: a server, or the model in this process. A ``Backend`` is
one kind of them: it starts the servers that are the run's own, and connects to those that are not.
Everything outside ``engine.<kind>`` knows this file alone; docs/extending.md has what another kind
must provide, tests/engine/test_contract.py tests it.

R = tokens of one completion, or of one piece of it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from bapo_megatron.data.staleness import join_spans
from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bapo_megatron.types import VersionSpans

START_VERSION = 0
"""Weights version that an engine reports at first: the weights of ``model.path``."""

_NUM_JOINED = 64


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How one request samples; an engine's own defaults never act."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    seed: int | None = None
    """One for the response, over all requests that it takes; an engine that cannot repeat a
    response ignores it."""


def sample_seed(*identity: str | int) -> int:
    """A seed of its own for every response.

    Args:
        identity: The run's seed, and what tells the response from all others of the run.
    """
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
    """An engine that is driven admits requests that came between two bursts in this order, so that
    it does not matter whose environment answered first."""
    version: int | None = None
    """Weights version that the engine holds; if none, there may be one piece only, at the end."""
    return_logprobs: bool = True
    sampled_tokens: int = 0
    """How many of ``input_ids`` the response has already, what an environment wrote included: where
    its random numbers go on."""
    stream_tokens: int = 64
    """Length of a piece, about."""


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
    """ABORT for a piece that is not the last one."""


def join(parts: Sequence[Completion], finish_reason: FinishReason) -> Completion:
    """The pieces as one completion."""
    if len(parts) == 1:
        return replace(parts[0], finish_reason=finish_reason)
    empty = Completion(
        np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32), (), finish_reason
    )
    return Completion(
        np.concatenate([empty.token_ids, *(part.token_ids for part in parts)]),
        np.concatenate([empty.logprobs, *(part.logprobs for part in parts)]),
        join_spans(part.versions for part in parts),
        finish_reason,
    )


class CompletionSink:
    """Takes what a request yields, and keeps it."""

    def __init__(self) -> None:
        self._parts: list[Completion] = []
        self._num_small = 0

    def is_known(self, version: int) -> bool:
        """Whether this weights version may have sampled."""
        return True

    def first_tokens(self, cached_tokens: int) -> None:
        """The first tokens came; the engine had so many tokens of the input in its cache."""

    def take(self, part: Completion) -> None:
        """A piece; the last one has the reason why the request ended, and may have no token."""
        self._parts.append(part)
        self._num_small += 1
        if self._num_small == _NUM_JOINED:
            # A piece of few tokens takes 100 times their memory.
            self._parts[-_NUM_JOINED:] = [join(self._parts[-_NUM_JOINED:], part.finish_reason)]
            self._num_small = 0

    @property
    def finish_reason(self) -> FinishReason:
        """The last piece's; ABORT if there is none."""
        return self._parts[-1].finish_reason if self._parts else FinishReason.ABORT

    def completion(self) -> Completion:
        """What was taken so far."""
        return join(self._parts, self.finish_reason)


PauseMode = Literal["retract", "in_place"]
"""See ``rollout.weight_sync.in_flight``."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine is and can do; does not change while it runs."""

    num_ranks: int
    """Processes that work on its requests; its load counts per rank."""
    in_flight: frozenset[str]
    """What of ``rollout.weight_sync.in_flight`` it can do."""
    methods: frozenset[str]
    """What of ``rollout.weight_sync.method`` it can do."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run needs of every engine."""

    temperature: float
    """T of the run."""
    in_flight: str
    """``rollout.weight_sync.in_flight``."""
    probe_prompts: Sequence[Sequence[int]] = ()
    """Contexts that log-probs may be asked of; none where nothing is trained."""


class MemoryPart(Enum):
    """What an engine on the trainer's GPU gives away and takes back."""

    WEIGHTS = "weights"
    CACHE = "kv_cache"


class Engine(Protocol):
    """One copy of the model; belongs to the event loop that uses it.

    Every coroutine may raise a ``ServerGoneError`` where there is no answer in time (a
    ``BrokenConnectionError`` where the connection broke), another ``ServerError`` where the answer
    is unusable, and another ``RolloutError`` where the engine refuses, as any other would.
    """

    @property
    def address(self) -> str:
        """Names the engine: ``http://host:port``, or a word without a host for one in this process.

        Weights reach the latter over the loopback, by gloo.
        """
        ...

    @property
    def stepper(self) -> Stepper | None:
        """Makes the engine sample; None: it samples by itself."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Requests that were given to it and have not ended."""
        ...

    @property
    def silence_s(self) -> float:
        """For how long no request in flight has got anything; 0 without any, and while paused."""
        ...

    async def stream(self, request: GenerateRequest, sink: CompletionSink) -> None:
        """Sample once, in pieces; returns when ``sink`` has the last one.

        It has no time limit; the caller watches the engine and calls ``give_up``.
        Cancelled, it leaves nothing of the request behind.
        """
        ...

    async def score(self, token_ids: Sequence[int], timeout_s: float) -> list[float]:
        """Return log-probs of all tokens but the first, each after those before it, at T = 1."""
        ...

    async def abort(self, timeout_s: float) -> None:
        """Have every request end with what there is; their ``stream`` returns.

        Repeat it until ``num_in_flight`` is 0: one that is still on its way may be missed. Those
        that are paused in place may end only after ``resume``.

        Args:
            timeout_s: Requests that have not ended by then count as lost.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Sample nothing until ``resume``; requests stay, and may be silent."""
        ...

    async def resume(self) -> None:
        """Go on after ``pause``; does nothing where there is none."""
        ...

    def give_up(self, reason: str) -> None:
        """End every request in flight at once, by a ``ServerGoneError`` that has the reason."""
        ...

    async def version(self, timeout_s: float | None = None) -> str:
        """Return the weights version that it reports: the cheapest sign of life."""
        ...

    async def capabilities(self, timeout_s: float | None = None) -> Capabilities:
        """Return what it can do; what samples must answer, so one that hangs is found out."""
        ...

    async def check(self, needs: Needs) -> None:
        """Look at an engine that answers for the first time, or again.

        Raises:
            RolloutError: It must not be used by a run with these needs.
        """
        ...

    async def weights(self, timeout_s: float) -> WeightControl:
        """Ask how it was started; returns its calls for new weights."""
        ...

    async def release_memory(self, timeout_s: float) -> None:
        """Give weights and cache away, when nothing is in flight.

        Nothing is sampled until both are back and new weights have come.

        Raises:
            RolloutError: It is still busy, and has released nothing.
        """
        ...

    async def take_memory(self, part: MemoryPart, timeout_s: float) -> None:
        """Take memory back: first that of the weights, then that of the cache."""
        ...

    async def close(self) -> None:
        """End what is in flight, and close every connection."""
        ...


class Stepper(Protocol):
    """Makes an engine sample that does not by itself.

    Whoever waits for tokens drives it, so that what is sampled between two decisions is counted in
    decode steps, never in seconds, and two runs with one seed are equal bit for bit.
    """

    async def decode(self, max_steps: int) -> int:
        """Sample up to so many tokens of each of the engine's requests, and hand them out.

        Fewer only where no request is left. Which requests are together in a step depends on the
        order in which they came, and on nothing else.

        Returns:
            The decode steps made.
        """
        ...


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """What lies in a bucket, tensor after tensor."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Such as ``float32``."""
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where the ranks of one engine stand in a collective group, and where its members meet."""

    name: str
    master_address: str
    master_port: int
    backend: str
    """``nccl`` or ``gloo``."""
    first_rank: int
    """The engine's first rank in the group; the trainer is rank 0."""
    world_size: int


class WeightControl(Protocol):
    """One engine's calls for new weights; they raise as those of ``Engine``. None is repeated."""

    @property
    def tensor_ranks(self) -> int:
        """Ranks that join a group."""
        ...

    def require_tensor_ranks_only(self) -> None:
        """Refuse an engine whose other ranks would not get weights through buckets.

        Raises:
            RolloutError: It has such ranks.
        """
        ...

    async def open_session(self, timeout_s: float) -> None:
        """Make the engine ready for ``receive`` or ``take``."""
        ...

    async def close_session(self, timeout_s: float) -> None:
        """Let the engine finish what it does after the last weights."""
        ...

    async def join_group(self, place: GroupPlace, timeout_s: float) -> None:
        """Have the engine's ranks join a collective group; returns when all members have."""
        ...

    async def leave_group(self, name: str, timeout_s: float) -> None:
        """Have the engine's ranks forget a group."""
        ...

    async def receive(
        self,
        bucket: BucketLayout,
        group_name: str,
        *,
        version: int | None,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """Receive one flat tensor, broadcast by rank 0 of the group, and load what it holds.

        Args:
            bucket: What it holds.
            group_name: The group.
            version: Version of the weights, with their last part only: an engine that has a part of
                them keeps its old label and is not used.
            flush_cache: Forget keys and values of the old weights.
            timeout_s: Longest time until it has answered.
        """
        ...

    async def take(
        self,
        payloads: Sequence[str],
        *,
        version: int | None,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """Load tensors that lie in memory that the engine can map.

        Args:
            payloads: One for each tensor-parallel rank, see
                ``weight_sync.carriers.shared_memory_payload``.
            version: As in ``receive``.
            flush_cache: As in ``receive``.
            timeout_s: Longest time until it has answered.
        """
        ...

    async def load(
        self, model_dir: Path, *, version: int, flush_cache: bool, timeout_s: float
    ) -> None:
        """Load a Hugging Face directory."""
        ...

    async def flush_idle(self, timeout_s: float) -> None:
        """Forget keys and values of old weights, unless requests are running, paused or not."""
        ...


class Readiness(Enum):
    """What a server answers when it is asked whether it takes requests."""

    SILENT = "silent"
    BUSY = "busy"
    """It lives, but starts, or is paused for new weights."""
    READY = "ready"


class EngineServer(Protocol):
    """The process of one of the run's own servers; ``supervisor`` watches it."""

    @property
    def address(self) -> str:
        """``http://host:port``; known after ``start``."""
        ...

    @property
    def name(self) -> str:
        """For people, with its address."""
        ...

    @property
    def log_path(self) -> Path:
        """Where it writes."""
        ...

    @property
    def num_starts(self) -> int:
        """How often it was started."""
        ...

    @property
    def is_started(self) -> bool:
        """Whether there is a process that ``close`` has not ended."""
        ...

    def start(self) -> None:
        """Start the process and return at once; after ``close`` once more, at the same address.

        Raises:
            RolloutError: The port is in use.
        """
        ...

    def exit_reason(self) -> str | None:
        """How it ended, for people; None while it runs."""
        ...

    async def ask(self, timeout_s: float) -> Readiness:
        """Ask whether it takes requests, without one."""
        ...

    def kill(self) -> None:
        """Have it end at once, without waiting; does nothing if it has ended."""
        ...

    def close(self) -> None:
        """End the process group and wait for it; safe to call twice."""
        ...


class Backend(Protocol):
    """One kind of engine, as one process of the run uses it."""

    @property
    def servers(self) -> Sequence[EngineServer]:
        """The run's own servers on this host; none where the engine needs none, or others run."""
        ...

    async def connect(self) -> Sequence[Engine]:
        """Make an engine for each server, or in this process; own servers were started.

        Nothing is sent; one in this process loads ``model.path``.

        Raises:
            RolloutError: The model cannot be loaded.
        """
        ...
