"""Which engines of a run may be used.

An engine is used only while it answers and holds the pool's weights version. One that dies, hangs
or answers nonsense is lost. When it answers again it needs weights first, whatever version it
reports: it may be another process.

    starting ──answers──▶ usable ◀──weights── stale ◀──answers── lost
        └──answers, other weights──────────────▲                  ▲
                                 usable, stale ────fails──────────┘

All engines of a run as one: spreads requests, continues those of lost engines elsewhere.

``engine_states`` says which engines may be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from bapo_megatron.engine.base import GenerateRequest, Needs
from bapo_megatron.errors import (
    BrokenConnectionError,
    RolloutError,
    ServerError,
    ServerGoneError,
    describe_cause,
)
from bapo_megatron.rollout.pooled_engine import Balancer, EngineState, Job, Monitor, PooledEngine
from bapo_megatron.rollout.timeline import NullTimeline
from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.engine.base import (
        Completion,
        Engine,
        PauseMode,
        SamplingSettings,
    )
    from bapo_megatron.rollout.pooled_engine import PooledEngine
    from bapo_megatron.rollout.timeline import Timeline


_LOG = logging.getLogger(__name__)


class EngineStates:
    """The engines and their states; what is done with them is the ``EnginePool``'s."""

    def __init__(
        self, engines: Sequence[Engine], config: RolloutConfig, version: int | None
    ) -> None:
        """Take the engines; nothing is sent.

        Args:
            engines: At least one.
            config: What is needed of them, and time limits.
            version: Weights version that an engine must hold to be used; none while there is none.
        """
        self.engines = tuple(PooledEngine(engine) for engine in engines)
        self._version = version
        self._config = config
        self._monitor = Monitor(config, self)
        self.memory_is_away = False
        """Whether the engines have given their memory to the trainer (``colocated``)."""
        self._needs = Needs(config.temperature, config.weight_sync.in_flight)
        self._refusal: RolloutError | None = None
        self._news = asyncio.Event()

    async def close(self) -> None:
        """End the monitor, and close every connection."""
        await self._monitor.close()
        for pooled in self.engines:
            await pooled.engine.close()

    @property
    def version(self) -> int | None:
        """Weights version that an engine must hold to be used; setting it leaves others stale."""
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        self._version = version
        for pooled in self.engines:
            if pooled.is_usable and pooled.version != str(version):
                self._move(pooled, EngineState.STALE, f"it has weights version {pooled.version}")

    @property
    def needs_weights(self) -> bool:
        """Whether no engine is usable, but one would be with the pool's weights."""
        states = {pooled.state for pooled in self.engines}
        return EngineState.USABLE not in states and EngineState.STALE in states

    def start_monitor(self) -> None:
        """Watch the engines; the other methods do it by themselves."""
        self._monitor.start(self.engines)

    async def wait_for_engines(self, probe_prompts: Sequence[Sequence[int]] = ()) -> None:
        """Wait until every engine has answered, for ``rollout.health.patience_s`` at most.

        Args:
            probe_prompts: See ``Needs``.

        Raises:
            RolloutError: One never did, or cannot be used as it is.
        """
        self._needs = replace(self._needs, probe_prompts=probe_prompts)
        self.start_monitor()
        async with self._patience("no answer", [EngineState.STARTING]):
            while any(pooled.state is EngineState.STARTING for pooled in self.engines):
                self._raise_refusal()
                await self._news.wait()
        self._raise_refusal()

    async def wait_usable(self, is_over: Callable[[], bool]) -> list[PooledEngine]:
        """Wait until an engine is usable; returns all that are.

        Args:
            is_over: Whether nobody wants one any more, so that none is returned; it is asked again
                after ``wake``.

        Raises:
            RolloutError: One cannot be used as it is, or none answers for
                ``rollout.health.patience_s``.
        """
        while not is_over():
            self._raise_refusal()
            if usable := [pooled for pooled in self.engines if pooled.is_usable]:
                return usable
            if self.needs_weights:
                # They come when the trainer has made its step, however long that takes.
                await self._news.wait()
                continue
            async with self._patience("no usable server", tuple(EngineState)):
                while not (is_over() or any(pooled.is_answering for pooled in self.engines)):
                    self._raise_refusal()
                    await self._news.wait()
        return []

    def wake(self) -> None:
        """Have everything that waits for a change look again."""
        self._news.set()
        self._news = asyncio.Event()

    def mark_updated(self, pooled: PooledEngine, version: int) -> None:
        """An engine got ``version`` and reports it; nothing changes if it was lost meanwhile."""
        if pooled.is_lost:
            return
        pooled.version = str(version)
        is_current = version == self._version
        state = EngineState.USABLE if is_current else EngineState.STALE
        self._move(pooled, state, "" if is_current else f"it has weights version {version}")

    def mark_lost(self, pooled: PooledEngine, reason: str) -> None:
        """Take an engine out; its requests go on elsewhere."""
        if pooled.is_lost:
            return
        _LOG.warning("%s is taken out: %s", pooled.address, reason)
        pooled.version = None
        pooled.is_paused = False
        pooled.num_broken = 0
        self._move(pooled, EngineState.LOST, reason)
        pooled.engine.give_up(reason)

    async def admit(self, pooled: PooledEngine) -> None:
        """See ``health.HealthListener``."""
        capabilities = await pooled.engine.capabilities()
        pooled.num_ranks = capabilities.num_ranks
        method = self._config.weight_sync.method
        if method not in capabilities.methods:
            raise RolloutError(
                f"rollout.weight_sync.method: must be {' or '.join(sorted(capabilities.methods))} "
                f"for {pooled.address}, got {method}; set it"
                + (f", or {capabilities.remedy}" if capabilities.remedy else "")
            )
        if not self.memory_is_away:  # else it would crash; it was checked when it was started first
            await pooled.engine.check(self._needs)

    def on_answer(self, pooled: PooledEngine, reported: str) -> None:
        """See ``health.HealthListener``."""
        state, needed = pooled.state, str(self._version)
        was_new = state is EngineState.STARTING
        if state is EngineState.STALE or (not was_new and reported == pooled.version):
            return
        pooled.version = reported
        if was_new and reported == needed:
            self._move(pooled, EngineState.USABLE, "")
        elif state is EngineState.LOST:
            _LOG.warning("%s answers again and needs weights", pooled.address)
            self._move(pooled, EngineState.STALE, f"it needs weights again: {pooled.reason}")
        else:
            self._move(pooled, EngineState.STALE, f"it has weights version {reported}")

    def on_refusal(self, pooled: PooledEngine, error: RolloutError) -> None:
        """See ``health.HealthListener``."""
        if pooled.state is EngineState.STARTING:
            self._refusal = error
            self.wake()
        else:
            self.mark_lost(pooled, str(error))
            pooled.reason = str(error)

    def on_silence(self, pooled: PooledEngine, reason: str) -> None:
        """See ``health.HealthListener``."""
        self.mark_lost(pooled, reason)

    def _move(self, pooled: PooledEngine, state: EngineState, reason: str) -> None:
        pooled.state, pooled.reason = state, reason
        self.wake()

    def _raise_refusal(self) -> None:
        self._monitor.raise_failure()
        if self._refusal is not None:
            raise self._refusal

    @contextlib.asynccontextmanager
    async def _patience(self, what: str, blamed: Sequence[EngineState]) -> AsyncIterator[None]:
        """Bound what is done inside by ``rollout.health.patience_s``."""
        patience_s = self._config.health.patience_s
        try:
            async with asyncio.timeout(patience_s):
                yield
        except TimeoutError:
            raise RolloutError(
                f"{what} for {patience_s:g} s (rollout.health.patience_s): "
                f"{self.describe(blamed)}; start them again and continue with resume=true"
            ) from None

    def describe(self, states: Sequence[EngineState] = tuple(EngineState)) -> str:
        """The engines in these states, and why, for people."""
        return "; ".join(
            f"{pooled.address} ({pooled.state}): {pooled.reason}"
            for pooled in self.engines
            if pooled.state in states
        )


_ABORT_INTERVAL_S = 0.1
_RETRY_WAIT_S = 0.25
_MOST_UNUSABLE_ANSWERS = 3
"""In a row, without a usable token from any server: weights or settings are broken, not servers."""
_MOST_BROKEN = 3
"""In a row for one server, without a token in between: it answers, but samples nothing."""
_MOST_FAILURES = 10
"""In a row for one response, without a token in between: it breaks its servers."""


class EnginePool:
    """Engines that hold the same weights version."""

    def __init__(
        self,
        engines: Sequence[Engine],
        config: RolloutConfig,
        version: int | None,
        timeline: Timeline | None = None,
    ) -> None:
        """Take the engines; nothing is sent.

        Args:
            engines: At least one; one that has a ``stepper`` is alone.
            config: Connections, time limits, and the length of streamed pieces.
            version: Weights version that an engine must hold to be used; none while there is none.
            timeline: Records every request.
        """
        self.states = EngineStates(engines, config, version)
        """Which engines may be used."""
        self.stepper = engines[0].stepper
        """Makes the engine sample, if it does not by itself."""
        assert len(engines) == 1 or all(engine.stepper is None for engine in engines)
        self.num_lost_requests = 0
        """How often a request was continued because its engine was lost."""
        self._config = config
        self._timeline = timeline or NullTimeline()
        # What drives a stepper must not wait for requests that wait for those before them.
        self._slots = (
            asyncio.Semaphore(config.max_connections)
            if self.stepper is None
            else contextlib.nullcontext()
        )
        self._balancer = Balancer()
        self._num_unusable = 0
        self._is_draining = False
        self._is_paused = False

    async def close(self) -> None:
        """End what is in flight, and close every connection."""
        await self.states.close()

    @property
    def version(self) -> int | None:
        """Weights version that an engine must hold to be used."""
        return self.states.version

    @property
    def needs_weights(self) -> bool:
        """Whether no engine is usable, but one would be with the pool's weights."""
        return self.states.needs_weights

    @property
    def num_in_flight(self) -> int:
        """Requests that engines have got and that have not ended."""
        return sum(pooled.engine.num_in_flight for pooled in self.states.engines)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        label: str,
        affinity: int | None = None,
        order: tuple[int, int] = (0, 0),
        sampled_tokens: int = 0,
        return_logprobs: bool = True,
        on_part: Callable[[Completion], None] | None = None,
    ) -> Completion | None:
        """Sample one completion, on one engine after the other if they are lost.

        Args:
            input_ids: Prompt, and what was sampled before.
            sampling: How to sample.
            label: Names the request in errors.
            affinity: Requests with the same number go to the same engine as long as one of them is
                on its way, because it has their common prompt in its cache.
            order: See ``GenerateRequest``.
            sampled_tokens: How many of ``input_ids`` the response has already.
            return_logprobs: Whether log-probs are wanted.
            on_part: Takes each piece as soon as tokens, log-probs and versions are certain; the
                finish reason is ABORT until the last one.

        Returns:
            All of it, ABORT where ``drain`` came first; none where nothing was sent before that.

        Raises:
            RolloutError: The request is refused, there was no usable engine for
                ``rollout.health.patience_s``, or attempts at this request failed again and again.
        """
        self.states.start_monitor()
        trace = self._timeline.request(label, sampled_tokens)
        request = GenerateRequest(
            input_ids=input_ids,
            sampling=sampling,
            label=label,
            order=order,
            return_logprobs=return_logprobs,
            sampled_tokens=sampled_tokens,
            stream_tokens=self._config.stream_tokens,
        )
        job = Job(request, self._watched(on_part), self._is_known, trace)
        try:
            with self._balancer.call(affinity):
                async with self._slots:
                    while usable := await self.states.wait_usable(lambda: self._is_draining):
                        pooled = self._balancer.choose(usable, affinity)
                        pooled.num_requests += 1
                        try:
                            if await self._try(job, pooled):
                                return job.completion()
                        finally:
                            pooled.num_requests -= 1
        except BaseException as error:
            trace.ended("cancelled" if isinstance(error, asyncio.CancelledError) else "failed", 0)
            raise
        trace.ended("abort", 0)
        return job.completion() if job.was_sent else None

    async def drain(self) -> None:
        """Abort everything; returns when every ``generate`` has returned what there was.

        Raises:
            RolloutError: An engine refuses the call.
        """
        self._is_draining = True
        self.states.wake()
        await self.resume()
        await asyncio.gather(*(self._abort_until_quiet(pooled) for pooled in self.states.engines))

    def reopen(self) -> None:
        """Take requests again after ``drain``."""
        self._is_draining = False

    async def pause(self, mode: PauseMode) -> None:
        """Have every engine sample nothing until ``resume``; requests stay where they are."""
        self._is_paused = True
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
        self._is_paused = False

    async def _try(self, job: Job, pooled: PooledEngine) -> bool:
        """Let one engine go on with a job; returns whether the job has ended."""
        assert self.version is not None, "a usable engine has the pool's version"
        if job.num_remaining == 0:
            job.end_at_limit()
            return True
        num_broken = pooled.num_broken
        try:
            await pooled.engine.stream(job.start(pooled, self.version), job)
        except ServerError as error:
            job.trace.ended("lost", job.num_received)
            # Connections that break together count once.
            if isinstance(error, BrokenConnectionError) and pooled.num_broken == num_broken:
                pooled.num_broken += 1
            await self._after_failure(job, pooled, error)
            return False
        reason = job.finish_reason
        if reason is FinishReason.ABORT and not self._is_draining:
            job.trace.ended("lost", job.num_received)
            text = (
                f"{pooled.address}: gave up after {job.num_received} tokens ({job.label}); "
                "somebody else aborts its requests, or its log says why"
            )
            await self._after_failure(job, pooled, ServerError(text))
            return False
        job.trace.ended(reason.value, job.num_received)
        return True

    async def _after_failure(self, job: Job, pooled: PooledEngine, error: ServerError) -> None:
        """Take the engine out, unless only the connection broke, and not time and again.

        Raises:
            RolloutError: The job has failed too often.
        """
        job.num_failures += 1
        if not pooled.is_lost:
            is_broken = isinstance(error, BrokenConnectionError)
            if is_broken and pooled.num_broken < _MOST_BROKEN and await self._still_serves(pooled):
                await asyncio.sleep(_RETRY_WAIT_S)
            else:
                self._num_unusable += not isinstance(error, ServerGoneError)
                times = f" ({pooled.num_broken} in a row)" if pooled.num_broken > 1 else ""
                self.states.mark_lost(pooled, f"{error}{times}")
        self.num_lost_requests += pooled.is_lost
        if self._num_unusable >= _MOST_UNUSABLE_ANSWERS:
            raise RolloutError(
                f"{error}; {self._num_unusable} answers in a row are unusable, so that the fault "
                "is not a single server's"
            ) from error
        if job.num_failures >= _MOST_FAILURES:
            raise RolloutError(
                f"{error}; {job.num_failures} attempts at this request in a row have failed, "
                "without a token from any server; see the servers' logs"
            ) from error

    def _watched(
        self, on_part: Callable[[Completion], None] | None
    ) -> Callable[[Completion], None]:
        """``on_part``, and a note that engines answer sensibly."""

        def take(part: Completion) -> None:
            if len(part.token_ids):
                self._num_unusable = 0
            if on_part is not None:
                on_part(part)

        return take

    async def _still_serves(self, pooled: PooledEngine) -> bool:
        """Whether an engine answers as the one that it was."""
        try:
            version = await pooled.engine.version(self._config.health.timeout_s)
        except RolloutError:
            return False
        return version == pooled.version

    def _is_known(self, oldest: int, version: int) -> bool:
        """Whether ``version`` may have sampled for a request that was sent at ``oldest``.

        Engines may have a newer one than the pool during a pause, while it is given to them.
        """
        newest = None if self._is_paused else self.version
        return oldest <= version and (newest is None or version <= newest)

    async def _abort_until_quiet(self, pooled: PooledEngine) -> None:
        """Abort an engine's requests until no call of ``generate`` is left."""
        # Repeated, because an engine forgets the abort of a request that is still on its way.
        while self._balancer.num_calls:
            if pooled.engine.num_in_flight and not pooled.is_lost:
                # If it does not answer, its requests are given up in time.
                with contextlib.suppress(ServerError):
                    await pooled.engine.abort(self._config.health.timeout_s)
            await asyncio.sleep(0)  # is enough for an engine in this process
            if self._balancer.num_calls:
                await asyncio.sleep(_ABORT_INTERVAL_S)

    async def _control(self, pooled: PooledEngine, call: Awaitable[None]) -> None:
        """Await a control call; an engine that fails it is lost."""
        try:
            async with asyncio.timeout(self._config.health.timeout_s):
                await call
        except (TimeoutError, RolloutError) as error:
            self.states.mark_lost(pooled, describe_cause(error))
