"""All engines of a run as one: admits requests, and moves those of lost engines to others."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.record import Completion, EnoughTokensError
from bapo_megatron.engine.base import CompletionSink, Engine, GenerateRequest, PauseMode
from bapo_megatron.engine.pooled import EngineState, EngineStates, PooledEngine
from bapo_megatron.errors import BrokenConnectionError, RolloutError, ServerError, describe_cause
from bapo_megatron.rollout.admission import Admission, Claim
from bapo_megatron.types import FinishReason

_ABORT_INTERVAL_S = 0.1
_RETRY_WAIT_S = 0.25
_MAX_BROKEN = 3
"""Broken connections in a row, for one response, after which the server is lost."""
_MAX_FAILURES = 10
"""Failed attempts in a row at one response, without a token, after which the run ends."""


class EnginePool:
    """Engines that hold the same weights version."""

    def __init__(
        self, engines: Sequence[Engine], config: RolloutConfig, version: int | None
    ) -> None:
        """Take the engines, a single one if it has a ``stepper``; nothing is sent."""
        self.states = EngineStates(engines, config, version)
        self.stepper = engines[0].stepper
        """Drives the engine, if it does not sample by itself."""
        assert len(engines) == 1 or all(engine.stepper is None for engine in engines)
        self.num_lost_requests = 0
        """Requests of batches that moved on because their engine was lost."""
        self.num_retractions = 0
        """Preemptions by a full KV cache, on all engines that were ever in the pool."""
        self.num_ended = 0
        """Requests that ended by themselves."""
        self._config = config
        self._admission = Admission(config.max_connections)
        self._turn = asyncio.Lock()
        """Held by the request that is admitted next; others follow in call order."""
        self._num_calls: Counter[int] = Counter()
        """Calls of ``generate`` that have not returned, by affinity."""
        self._is_draining = False
        self.num_drains = 0
        self._is_drained = asyncio.Event()
        """Set while no drain is in progress."""
        self._is_drained.set()

    @property
    def num_in_flight(self) -> int:
        """Number of requests inside the engines."""
        return sum(pooled.engine.num_in_flight for pooled in self.states.engines)

    async def generate(
        self,
        plan: Callable[[], GenerateRequest | None],
        on_part: Callable[[Completion], None],
        affinity: int,
    ) -> bool:
        """Sample one completion, moving to another engine whenever one is lost.

        ``plan`` returns a request for the tokens that are left, at first and before each
        continuation, or None if there are none. ``on_part`` gets each piece as soon as its version
        is certain; all but the last have the finish reason ABORT, the last one too after ``drain``.
        If it raises ``EnoughTokensError`` there is no further one.
        Requests with one ``affinity`` share a prompt and, if possible, an engine. A negative one
        belongs to an evaluation, whose requests continue after ``drain`` and are not counted when
        they are lost.

        Returns whether the request was sent to any engine.

        Raises:
            RolloutError: The request is refused, no engine was usable for
                ``rollout.health.patience_s``, or too many attempts at it failed in a row.
        """
        self.states.watch()
        request = plan()
        assert request is not None, "something is left"
        job = _Job(self, request, on_part, affinity)
        self._num_calls[affinity] += 1
        try:
            while pooled := await self._admit(job):
                try:
                    if await self._try(job, pooled):
                        self.num_ended += job.finish_reason is not FinishReason.ABORT
                        return True
                finally:
                    has_ended = job.finish_reason is FinishReason.STOP
                    self._admission.release(pooled, job.claim, has_ended=has_ended)
                    self.states.news.wake()
                if (request := plan()) is None:  # its engine was lost after the last token
                    return True
                job.request = request
        finally:
            self._num_calls[affinity] -= 1
            if not self._num_calls[affinity]:
                del self._num_calls[affinity]
                self._admission.forget(affinity)
        return job.was_sent

    async def drain(self) -> None:
        """Abort every request; return when each ``generate`` of a batch has returned.

        Raises:
            RolloutError: An engine refuses the call.
        """

        def has_calls() -> bool:
            return any(affinity >= 0 for affinity in self._num_calls)

        self._is_draining = True
        self.num_drains += 1
        self._is_drained.clear()
        self.states.news.wake()
        try:
            await self.resume()
            engines = self.states.engines
            await asyncio.gather(*(self._abort_while(has_calls, pooled) for pooled in engines))
        finally:
            self._is_drained.set()

    async def drain_engine(self, pooled: PooledEngine) -> None:
        """Move an engine's requests, with their tokens, to others; return when it has none."""
        self.states.dismiss(pooled)
        try:
            await self._abort_while(lambda: self._admission.has_requests(pooled), pooled)
        except RolloutError as error:
            pooled.engine.give_up(str(error))
            while self._admission.has_requests(pooled):
                await asyncio.sleep(_ABORT_INTERVAL_S)
        self._admission.remove(pooled)

    def reopen(self) -> None:
        """Take requests again after ``drain``."""
        self._is_draining = False

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling on every engine until ``resume``; requests stay where they are."""
        answering = [pooled for pooled in self.states.engines if pooled.is_answering]
        for pooled in answering:
            pooled.is_paused = True
        await asyncio.gather(*(self._control(p, p.engine.pause(mode)) for p in answering))

    async def resume(self) -> None:
        """Continue after ``pause``; do nothing if not paused."""
        paused = [pooled for pooled in self.states.engines if pooled.is_paused]
        for pooled in paused:
            pooled.is_paused = False
        await asyncio.gather(*(self._control(p, p.engine.resume()) for p in paused))

    async def _admit(self, job: "_Job") -> PooledEngine | None:
        """Wait until an engine admits a job, and return the engine; None while draining.

        Jobs of an evaluation wait until the drain ends instead.
        """
        # A job that lost its engine continues at once; a stepper needs all requests in its engine.
        is_due, is_batch = job.was_sent or self.stepper is not None, job.affinity >= 0

        def is_over() -> bool:
            return self._is_draining if is_batch else not self._is_drained.is_set()

        while True:
            async with contextlib.nullcontext() if is_due else self._turn:
                while usable := await self.states.wait_usable(is_over):
                    if pooled := self._admission.choose(usable, job.claim, is_due=is_due):
                        return pooled
                    await self.states.news.wait()
            if is_batch:
                return None
            await self._is_drained.wait()

    async def _try(self, job: "_Job", pooled: PooledEngine) -> bool:
        """Continue a job on one engine; return whether the job has ended."""
        version = self.states.version
        assert version is not None, "a usable engine has the pool's version"
        try:
            await pooled.engine.stream(job.start(pooled, version), job)
            reason = job.finish_reason
            if reason is FinishReason.ABORT and job.num_drains == self.num_drains:
                if pooled.state is EngineState.LEAVING:
                    return False
                raise ServerError(
                    f"{pooled.address}: ended {job.request.label} after {job.num_received} tokens "
                    "without a reason; another client aborts its requests, or its log says why"
                )
        except EnoughTokensError:
            job.finish_reason = FinishReason.STOP
            return True
        except ServerError as error:
            await self._after_failure(job, pooled, error)
            return False
        return reason is not FinishReason.ABORT or job.affinity >= 0

    async def _after_failure(self, job: "_Job", pooled: PooledEngine, error: ServerError) -> None:
        """Mark the engine lost unless only the connection broke; raise after too many failures."""
        job.num_failures += 1
        if pooled.is_answering:
            job.num_broken = 1 + (job.num_broken if job.broken_by is pooled else 0)
            job.broken_by = pooled
            may_retry = isinstance(error, BrokenConnectionError) and job.num_broken < _MAX_BROKEN
            if may_retry and await self._still_serves(pooled):
                await asyncio.sleep(_RETRY_WAIT_S)
            else:
                self.states.mark_lost(pooled, str(error))
        self.num_lost_requests += not pooled.is_answering and job.affinity >= 0
        if job.num_failures >= _MAX_FAILURES:
            raise RolloutError(
                f"{error}; {job.num_failures} attempts at this request failed in a row without a "
                "token; see the servers' logs"
            ) from error

    async def _still_serves(self, pooled: PooledEngine) -> bool:
        try:
            return await pooled.engine.version(self._config.health.timeout_s) == pooled.version
        except RolloutError:
            return False

    async def _abort_while(self, is_used: Callable[[], bool], pooled: PooledEngine) -> None:
        # Repeated, because an abort misses requests that are still on their way.
        while is_used():
            if pooled.engine.num_in_flight and not pooled.is_lost:
                # If it does not answer, its health check ends its requests.
                with contextlib.suppress(ServerError):
                    await pooled.engine.abort(self._config.health.timeout_s)
            await asyncio.sleep(0)  # suffices for an engine in this process
            if is_used():
                await asyncio.sleep(_ABORT_INTERVAL_S)

    async def _control(self, pooled: PooledEngine, call: Awaitable[None]) -> None:
        """Await a control call; an engine that fails it is lost."""
        try:
            async with asyncio.timeout(self._config.health.timeout_s):
                await call
        except (TimeoutError, RolloutError) as error:
            self.states.mark_lost(pooled, describe_cause(error))


@dataclass(eq=False)
class _Job(CompletionSink):
    """One response: its next request, and how its engines have served it."""

    pool: EnginePool
    request: GenerateRequest
    """The newest one that ``generate`` planned."""
    on_part: Callable[[Completion], None]
    affinity: int
    claim: Claim = field(init=False)
    finish_reason: FinishReason = FinishReason.ABORT
    """Of its latest piece."""
    num_received: int = 0
    """Tokens of the latest attempt."""
    was_sent: bool = False
    """Whether any engine got a request for it."""
    num_drains: int = 0
    """The pool's at the start of the latest attempt."""
    num_failures: int = 0
    """Failed attempts in a row, without a token."""
    broken_by: PooledEngine | None = None
    """The last engine that failed it."""
    num_broken: int = 0
    """Failures of ``broken_by`` in a row, without a token."""
    _oldest_version: int = 0
    _pooled: PooledEngine = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        position = request.sampled_tokens
        self.claim = Claim(
            self.affinity,
            prompt_tokens=len(request.input_ids) - position,
            position=position,
            limit=position + request.sampling.max_new_tokens,
        )

    def start(self, pooled: PooledEngine, version: int) -> GenerateRequest:
        """Begin an attempt on an engine with ``version``; return the request for it."""
        self._pooled, self._oldest_version, self.num_received = pooled, version, 0
        self.was_sent, self.num_drains = True, self.pool.num_drains
        piece_tokens = self.pool._config.piece_tokens
        return replace(self.request, version=version, stream_tokens=piece_tokens)

    def is_known(self, version: int) -> bool:
        """Whether this weights version may have sampled.

        During a pause, while they get new weights, engines may have a newer one than the pool.
        """
        newest = None if self._pooled.is_paused else self.pool.states.version
        return self._oldest_version <= version and (newest is None or version <= newest)

    def retracted(self, num_times: int) -> None:
        """Count preemptions by a full KV cache."""
        self.pool.num_retractions += num_times

    def take(self, part: Completion) -> None:
        """Pass a piece on; a token resets the counts of failures."""
        if len(part.token_ids):
            self.num_failures = self.num_broken = 0
        self.num_received += len(part.token_ids)
        self.finish_reason = part.finish_reason
        self.pool._admission.advance(self._pooled, self.claim, len(part.token_ids))
        self.on_part(part)
