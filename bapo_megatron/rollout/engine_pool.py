"""All servers of a run as one engine: spreads requests, continues those of lost servers elsewhere.

``engine_states`` says which servers may be used.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from bapo_megatron.errors import BrokenConnectionError, RolloutError, ServerError, ServerGoneError
from bapo_megatron.engine.base import GenerateRequest
from bapo_megatron.rollout.engine import Balancer, Engine, EngineState, Job
from bapo_megatron.rollout.engine_states import EngineStates
from bapo_megatron.engine.sglang.http import describe_cause
from bapo_megatron.rollout.timeline import NullTimeline
from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.engine.base import Completion, SamplingSettings
    from bapo_megatron.engine.sglang.client import ApiKeys
    from bapo_megatron.rollout.timeline import Timeline

_ABORT_INTERVAL_S = 0.1
_RETRY_WAIT_S = 0.25
_MOST_UNUSABLE_ANSWERS = 3
"""In a row, without a usable token from any server: weights or settings are broken, not servers."""
_MOST_BROKEN = 3
"""In a row for one server, without a token in between: it answers, but samples nothing."""
_MOST_FAILURES = 10
"""In a row for one response, without a token in between: it breaks its servers."""


class EnginePool(EngineStates):
    """Servers that hold the same weights version."""

    def __init__(
        self,
        addresses: Sequence[str],
        keys: ApiKeys,
        config: RolloutConfig,
        version: int | None,
        timeline: Timeline | None = None,
    ) -> None:
        """Prepare the clients; nothing is sent.

        Args:
            addresses: At least one ``http://host:port``.
            keys: Keys of all servers.
            config: Connections, time limits, and the length of streamed pieces.
            version: Weights version that a server must hold to be used; none while there is none.
            timeline: Records every request.
        """
        super().__init__(addresses, keys, config, version)
        self.num_lost_requests = 0
        """How often a request was continued because its server was lost."""
        self._timeline = timeline or NullTimeline()
        self._slots = asyncio.Semaphore(config.max_connections)
        self._balancer = Balancer()
        self._num_unusable = 0
        self._is_draining = False
        self._is_paused = False

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        label: str,
        affinity: int | None = None,
        sampled_tokens: int = 0,
        return_logprobs: bool = True,
        on_part: Callable[[Completion], None] | None = None,
    ) -> Completion | None:
        """Sample one completion, on one server after the other if they are lost.

        Args:
            input_ids: Prompt, and what was sampled before.
            sampling: How to sample.
            label: Names the request in errors.
            affinity: Requests with the same number go to the same server as long as one of them is
                on its way, because it has their common prompt in its cache.
            sampled_tokens: How many of ``input_ids`` were sampled before, for the timeline.
            return_logprobs: Whether log-probs are wanted.
            on_part: Takes each piece as soon as tokens, log-probs and versions are certain; the
                finish reason is ABORT until the last one.

        Returns:
            All of it, ABORT where ``drain`` came first; none where nothing was sent before that.

        Raises:
            RolloutError: The request is refused, there was no usable server for
                ``rollout.health.patience_s``, or attempts at this request failed again and again.
        """
        self.start_monitor()
        trace = self._timeline.request(label, sampled_tokens)
        job = Job(input_ids, sampling, self._watched(on_part), self._is_known, trace)
        try:
            with self._balancer.call(affinity):
                async with self._slots:
                    while (engine := await self._next_engine(affinity)) is not None:
                        engine.num_requests += 1
                        try:
                            if await self._try(job, engine, label, return_logprobs):
                                return job.completion()
                        finally:
                            engine.num_requests -= 1
        except BaseException as error:
            trace.ended("cancelled" if isinstance(error, asyncio.CancelledError) else "failed", 0)
            raise
        trace.ended("abort", 0)
        return job.completion() if job.was_sent else None

    async def drain(self) -> None:
        """Abort everything; returns when every ``generate`` has returned what there was.

        Raises:
            RolloutError: A server refuses the call.
        """
        self._is_draining = True
        self._announce()
        await self.resume()
        await asyncio.gather(*(self._abort_until_quiet(engine) for engine in self.engines))

    def reopen(self) -> None:
        """Take requests again after ``drain``."""
        self._is_draining = False

    async def pause(self, mode: str) -> None:
        """Have every server sample nothing until ``resume``; requests stay where they are.

        Args:
            mode: ``retract`` or ``in_place``, see ``rollout.weight_sync.in_flight``.
        """
        self._is_paused = True
        answering = [e for e in self.engines if e.state in (EngineState.USABLE, EngineState.STALE)]
        for engine in answering:
            engine.is_paused = True
        await asyncio.gather(*(self._control(e, e.client.pause(mode)) for e in answering))

    async def resume(self) -> None:
        """Go on after ``pause``; does nothing where there is no pause."""
        paused = [engine for engine in self.engines if engine.is_paused]
        for engine in paused:
            engine.is_paused = False
        await asyncio.gather(*(self._control(e, e.client.resume()) for e in paused))
        self._is_paused = False

    async def _try(self, job: Job, engine: Engine, label: str, return_logprobs: bool) -> bool:
        """Let one server go on with a job; returns whether the job has ended."""
        assert self._version is not None, "a usable server has the pool's version"
        if job.num_remaining == 0:
            job.end_at_limit()
            return True
        request = GenerateRequest(
            input_ids=job.start(engine, self._version),
            sampling=replace(job.sampling, max_new_tokens=job.num_remaining),
            label=label,
            version=self._version,
            return_logprobs=return_logprobs,
            stream_tokens=self._config.stream_tokens,
        )
        num_broken = engine.num_broken
        try:
            await engine.client.stream(request, job)
        except ServerError as error:
            job.trace.ended("lost", job.num_received)
            # Connections that break together count once.
            if isinstance(error, BrokenConnectionError) and engine.num_broken == num_broken:
                engine.num_broken += 1
            await self._after_failure(job, engine, error)
            return False
        reason = job.completion().finish_reason
        if reason is FinishReason.ABORT and not self._is_draining:
            job.trace.ended("lost", job.num_received)
            text = (
                f"{engine.address}: gave up after {job.num_received} tokens ({label}); somebody "
                "else aborts its requests, or its log says why"
            )
            await self._after_failure(job, engine, ServerError(text))
            return False
        job.trace.ended(reason.value, job.num_received)
        return True

    async def _after_failure(self, job: Job, engine: Engine, error: ServerError) -> None:
        """Take the server out, unless only the connection broke, and not time and again.

        Raises:
            RolloutError: The job has failed too often.
        """
        job.num_failures += 1
        if engine.state is not EngineState.LOST:
            is_broken = isinstance(error, BrokenConnectionError)
            if is_broken and engine.num_broken < _MOST_BROKEN and await self._still_serves(engine):
                await asyncio.sleep(_RETRY_WAIT_S)
            else:
                self._num_unusable += not isinstance(error, ServerGoneError)
                times = f" ({engine.num_broken} in a row)" if engine.num_broken > 1 else ""
                self.mark_lost(engine, f"{error}{times}")
        self.num_lost_requests += engine.state is EngineState.LOST
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
        """``on_part``, and a note that servers answer sensibly."""

        def take(part: Completion) -> None:
            if len(part.token_ids):
                self._num_unusable = 0
            if on_part is not None:
                on_part(part)

        return take

    async def _still_serves(self, engine: Engine) -> bool:
        """Whether a server answers as the one that it was."""
        try:
            version = await engine.client.version(self._config.health.timeout_s)
        except RolloutError:
            return False
        return version == engine.version

    async def _next_engine(self, affinity: int | None) -> Engine | None:
        """A server for the next request, as soon as there is one; none while draining."""
        while not self._is_draining:
            self._raise_refusal()
            usable = [e for e in self.engines if e.state is EngineState.USABLE]
            if usable:
                return self._balancer.choose(usable, affinity)
            if self.needs_weights:
                # They come when the trainer has made its step, however long that takes.
                await self._news.wait()
                continue
            async with self._patience("no usable server", tuple(EngineState)):
                while self._all_lost and not self._is_draining:
                    self._raise_refusal()
                    await self._news.wait()
        return None

    @property
    def _all_lost(self) -> bool:
        """Whether no server answers."""
        answering = (EngineState.USABLE, EngineState.STALE)
        return all(engine.state not in answering for engine in self.engines)

    def _is_known(self, oldest: int, version: int) -> bool:
        """Whether ``version`` may have sampled for a request that was sent at ``oldest``.

        Servers may have a newer one than the pool during a pause, while it is given to them.
        """
        newest = None if self._is_paused else self._version
        return oldest <= version and (newest is None or version <= newest)

    async def _abort_until_quiet(self, engine: Engine) -> None:
        """Abort a server's requests until no call of ``generate`` is left."""
        # Repeated, because a server forgets the abort of a request that is still on its way.
        while self._balancer.num_calls:
            if engine.client.num_in_flight and engine.state is not EngineState.LOST:
                # If it does not answer, its requests are given up in time.
                with contextlib.suppress(ServerError):
                    await engine.client.abort(self._config.health.timeout_s)
            await asyncio.sleep(_ABORT_INTERVAL_S)

    async def _control(self, engine: Engine, call: Awaitable[None]) -> None:
        """Await a control call; a server that fails it is lost."""
        try:
            async with asyncio.timeout(self._config.health.timeout_s):
                await call
        except (TimeoutError, RolloutError) as error:
            self.mark_lost(engine, describe_cause(error))
