"""All engines of a run as one: admits requests, and continues those of lost engines elsewhere."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.base import (
    Completion,
    CompletionSink,
    Engine,
    GenerateRequest,
    PauseMode,
)
from bapo_megatron.engine.pooled import EngineState, EngineStates, PooledEngine
from bapo_megatron.errors import (
    BrokenConnectionError,
    RolloutError,
    ServerError,
    ServerGoneError,
    describe_cause,
)
from bapo_megatron.rollout.admission import Admission, Claim
from bapo_megatron.types import FinishReason

_ABORT_INTERVAL_S = 0.1
_RETRY_WAIT_S = 0.25
_MAX_UNUSABLE_ANSWERS = 3
"""In a row, without a usable token from any server: weights or settings are broken, not servers."""
_MAX_BROKEN = 3
"""In a row for one server, without a token in between: it answers, but samples nothing."""
_MAX_FAILURES = 10
"""In a row for one response, without a token in between: it breaks its servers."""


class EnginePool:
    """Engines that hold the same weights version."""

    def __init__(
        self,
        engines: Sequence[Engine],
        config: RolloutConfig,
        version: int | None,
    ) -> None:
        """Take the engines, of which one with a ``stepper`` is alone; nothing is sent."""
        self.states = EngineStates(engines, config, version)
        """Which engines may be used."""
        self.stepper = engines[0].stepper
        """Makes the engine sample, if it does not by itself."""
        assert len(engines) == 1 or all(engine.stepper is None for engine in engines)
        self.num_lost_requests = 0
        """How often a batch's request was continued because its engine was lost."""
        self.num_unusable = 0
        """Unusable answers since the last token of any server."""
        self.num_retractions = 0
        """Requests that a full cache took out, of all engines that have ever been there."""
        self.is_paused = False
        self._config = config
        self._admission = Admission(config.max_connections)
        self._turn = asyncio.Lock()
        """Held by the request that is admitted next; others follow in the order of their calls."""
        self._num_calls: Counter[int] = Counter()
        """Calls of ``generate`` that have not returned, by affinity."""
        self._is_draining = False
        self.num_drains = 0
        self._is_drained = asyncio.Event()
        """Whether no drain is under way."""
        self._is_drained.set()

    @property
    def num_in_flight(self) -> int:
        """Requests that engines have got and that have not ended."""
        return sum(pooled.engine.num_in_flight for pooled in self.states.engines)

    def _has_calls(self) -> bool:
        """Whether calls of ``generate`` for a batch have not returned."""
        return any(affinity >= 0 for affinity in self._num_calls)

    async def generate(
        self,
        plan: Callable[[], GenerateRequest | None],
        on_part: Callable[[Completion], None],
        affinity: int,
    ) -> bool:
        """Sample one completion, on one engine after the other if they are lost.

        ``plan`` makes the request for what is left to be sampled: at first, and again where it goes
        on with what came so far; None where nothing is left. The pool sets its ``version`` and
        ``stream_tokens``. ``on_part`` takes each piece as soon as tokens, log-probs and versions
        are certain; the finish reason is ABORT until the last one, and for all of them where
        ``drain`` came first. Requests of one ``affinity`` go to the same engine as long as one of
        them is on its way, because it has their common prompt in its cache. Affinities below 0 are
        those of an evaluation: ``drain`` interrupts its requests, which then go on, and those that
        are lost are not counted.

        Returns whether any engine got it.

        Raises:
            RolloutError: The request is refused, there was no usable engine for
                ``rollout.health.patience_s``, or attempts at this request failed again and again.
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
                        return True
                finally:
                    self._admission.release(pooled, job.claim, has_ended=job.has_ended)
                    self.states.wake()
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
        """Abort everything; returns when ``generate`` has returned a batch's requests as they are.

        Raises:
            RolloutError: An engine refuses the call.
        """
        self._is_draining = True
        self.num_drains += 1
        self._is_drained.clear()
        self.states.wake()
        try:
            await self.resume()
            engines = self.states.engines
            await asyncio.gather(
                *(self._abort_until_quiet(pooled, self._has_calls) for pooled in engines)
            )
        finally:
            self._is_drained.set()

    async def take_away(self, pooled: PooledEngine) -> None:
        """Have an engine's requests go on elsewhere with what they have; it gets no others.

        Returns when it has none; ``EngineStates.remove`` then forgets it.
        """
        self.states.dismiss(pooled)
        try:
            await self._abort_until_quiet(pooled, lambda: self._admission.has_requests(pooled))
        except RolloutError as error:
            pooled.engine.give_up(str(error))
            while self._admission.has_requests(pooled):
                await asyncio.sleep(_ABORT_INTERVAL_S)
        self._admission.remove(pooled)

    def reopen(self) -> None:
        """Take requests again after ``drain``."""
        self._is_draining = False

    async def pause(self, mode: PauseMode) -> None:
        """Have every engine sample nothing until ``resume``; requests stay where they are."""
        self.is_paused = True
        answering = [pooled for pooled in self.states.engines if pooled.is_answering]
        for pooled in answering:
            pooled.is_paused = True
        await asyncio.gather(*(self._control(p, p.engine.pause(mode)) for p in answering))

    async def resume(self) -> None:
        """Go on after ``pause``; does nothing where there is no pause."""
        paused = [pooled for pooled in self.states.engines if pooled.is_paused]
        for pooled in paused:
            pooled.is_paused = False
        await asyncio.gather(*(self._control(p, p.engine.resume()) for p in paused))
        self.is_paused = False

    async def _admit(self, job: "_Job") -> PooledEngine | None:
        """Wait until an engine takes a job, and return it; none while draining.

        What has lost its engine goes on at once, and a stepper is driven only when all requests are
        inside its engine. A drain has the jobs of an evaluation wait for its end.
        """
        is_due, is_batch = job.was_sent or self.stepper is not None, job.affinity >= 0

        def is_over() -> bool:
            return self._is_draining if is_batch else not self._is_drained.is_set()

        while True:
            async with contextlib.nullcontext() if is_due else self._turn:
                while usable := await self.states.wait_usable(is_over):
                    if pooled := self._admission.choose(usable, job.claim, is_due=is_due):
                        return pooled
                    await self.states.wait_for_news()
            if is_batch:
                return None
            await self._is_drained.wait()

    async def _try(self, job: "_Job", pooled: PooledEngine) -> bool:
        """Let one engine go on with a job; returns whether the job has ended."""
        version = self.states.version
        assert version is not None, "a usable engine has the pool's version"
        num_broken = pooled.num_broken
        try:
            await pooled.engine.stream(job.start(pooled, version), job)
            reason = job.finish_reason
            if reason is FinishReason.ABORT and job.num_drains == self.num_drains:
                if pooled.state is EngineState.LEAVING:
                    return False
                raise ServerError(
                    f"{pooled.address}: gave up after {job.num_received} tokens "
                    f"({job.request.label}); somebody else aborts its requests, or its log says why"
                )
        except ServerError as error:
            # Connections that break together count once.
            if isinstance(error, BrokenConnectionError) and pooled.num_broken == num_broken:
                pooled.num_broken += 1
            await self._after_failure(job, pooled, error)
            return False
        return reason is not FinishReason.ABORT or job.affinity >= 0

    async def _after_failure(self, job: "_Job", pooled: PooledEngine, error: ServerError) -> None:
        """Take the engine out, unless only the connection broke; raise after too many failures."""
        job.num_failures += 1
        if pooled.is_answering:
            is_broken = isinstance(error, BrokenConnectionError)
            if is_broken and pooled.num_broken < _MAX_BROKEN and await self._still_serves(pooled):
                await asyncio.sleep(_RETRY_WAIT_S)
            else:
                self.num_unusable += not isinstance(error, ServerGoneError)
                times = f" ({pooled.num_broken} in a row)" if pooled.num_broken > 1 else ""
                self.states.mark_lost(pooled, f"{error}{times}")
        self.num_lost_requests += not pooled.is_answering and job.affinity >= 0
        if self.num_unusable >= _MAX_UNUSABLE_ANSWERS:
            raise RolloutError(
                f"{error}; {self.num_unusable} answers in a row are unusable, so the fault is "
                "not a single server's"
            ) from error
        if job.num_failures >= _MAX_FAILURES:
            raise RolloutError(
                f"{error}; {job.num_failures} attempts at this request in a row have failed, "
                "without a token from any server; see the servers' logs"
            ) from error

    async def _still_serves(self, pooled: PooledEngine) -> bool:
        """Whether an engine answers as the one that it was."""
        try:
            version = await pooled.engine.version(self._config.health.timeout_s)
        except RolloutError:
            return False
        return version == pooled.version

    async def _abort_until_quiet(self, pooled: PooledEngine, is_used: Callable[[], bool]) -> None:
        """Abort an engine's requests as long as there may be any."""
        # Repeated, because an engine forgets the abort of a request that is still on its way.
        while is_used():
            if pooled.engine.num_in_flight and not pooled.is_lost:
                # If it does not answer, its requests are given up in time.
                with contextlib.suppress(ServerError):
                    await pooled.engine.abort(self._config.health.timeout_s)
            await asyncio.sleep(0)  # is enough for an engine in this process
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
    """One response: what is asked for, and how it fares with whichever server."""

    pool: EnginePool
    request: GenerateRequest
    """What is left, when it was planned last."""
    on_part: Callable[[Completion], None]
    affinity: int
    claim: Claim = field(init=False)
    finish_reason: FinishReason = FinishReason.ABORT
    """Of its last piece."""
    num_received: int = 0
    """Tokens since it was sent the last time."""
    was_sent: bool = False
    """Whether any server got it."""
    num_drains: int = 0
    """Those of the pool when it was sent the last time."""
    num_failures: int = 0
    """How often a server failed it since the last token came."""
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

    @property
    def has_ended(self) -> bool:
        """Whether the policy has ended it, not a limit or an abort."""
        return self.finish_reason is FinishReason.STOP

    def start(self, pooled: PooledEngine, version: int) -> GenerateRequest:
        """Note that it goes to an engine with ``version``; return the request for that engine."""
        self._pooled, self._oldest_version, self.num_received = pooled, version, 0
        self.was_sent, self.num_drains = True, self.pool.num_drains
        piece_tokens = self.pool._config.piece_tokens
        return replace(self.request, version=version, stream_tokens=piece_tokens)

    def is_known(self, version: int) -> bool:
        """Whether this weights version may have sampled.

        Engines may have a newer one than the pool during a pause, while it is given to them.
        """
        newest = None if self.pool.is_paused else self.pool.states.version
        return self._oldest_version <= version and (newest is None or version <= newest)

    def retracted(self, num_times: int) -> None:
        """The engine's cache was too full."""
        self.pool.num_retractions += num_times

    def take(self, part: Completion) -> None:
        """Hand a piece on; tokens show that engines answer sensibly."""
        if len(part.token_ids):
            self.num_failures = self._pooled.num_broken = self.pool.num_unusable = 0
        self.num_received += len(part.token_ids)
        self.finish_reason = part.finish_reason
        self.pool._admission.advance(self._pooled, self.claim, len(part.token_ids))
        self.on_part(part)
