"""The engines of a run, and which of them may be used.

An engine is used only while it answers and holds the pool's weights version. One that dies, hangs
or gives unusable answers is lost. Once it answers again it needs weights first, whatever version it
reports, because it may be another process.

    starting ──answers──▶ usable ◀──weights── stale ◀──answers── lost
        └──answers, other weights──────────────▲                  ▲
                                 usable, stale ────fails──────────┘

One task per engine polls ``Engine.version``, which is answered even while the engine is paused or
gets new weights. A stuck engine shows by missing tokens, or earlier to its supervisor.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.config.scorers import TEACHER_KEY
from bapo_megatron.config.teacher import naming_teacher, teacher_text
from bapo_megatron.engine.base import NO_WEIGHTS, Capabilities, Engine, LoadReport, LoadReporter
from bapo_megatron.errors import RolloutError, ServerError, describe_cause
from bapo_megatron.telemetry.console import reporting

_LOG = logging.getLogger(__name__)
_NOT_ASKED = "it has not answered yet"


class EngineState(StrEnum):
    """What an engine may be used for."""

    STARTING = "starting"
    """It has never answered."""
    USABLE = "usable"
    """It answers and holds the pool's weights version."""
    STALE = "stale"
    """It answers but needs weights first."""
    LOST = "lost"
    """It failed, and is polled until it answers again."""
    LEAVING = "leaving"
    """It is being removed: its requests move to others first."""


@dataclass(slots=True, eq=False)
class PooledEngine:
    """One engine, as the pool sees it."""

    engine: Engine
    state: EngineState = EngineState.STARTING
    reason: str = _NOT_ASKED
    """Why it is not usable."""
    version: str | None = None
    """The weights version that it last reported or got; None: unknown."""
    properties: Capabilities = field(default_factory=lambda: Capabilities(1, frozenset()))
    """As it reported when it first answered, or answered again."""
    is_paused: bool = False
    watcher: asyncio.Task[None] | None = None
    """Polls it."""
    is_unproven: bool = True
    """Whether its log-probs have not been compared since it started or came back."""

    @property
    def address(self) -> str:
        """The engine's."""
        return self.engine.address

    @property
    def is_usable(self) -> bool:
        """Whether it answers and holds the pool's weights version."""
        return self.state is EngineState.USABLE

    @property
    def is_answering(self) -> bool:
        """Whether it is usable, or would be with the pool's weights."""
        return self.state in (EngineState.USABLE, EngineState.STALE)

    @property
    def is_lost(self) -> bool:
        """Whether it failed."""
        return self.state is EngineState.LOST


class News:
    """Background tasks, and the wake-up of whoever waits for a change that they make."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run ``work`` until ``close``; its error is raised in whoever waits."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self.wake())
        self._tasks.add(task)
        return task

    def cancel(self, task: asyncio.Task[None]) -> None:
        """Cancel a task and drop its error."""
        self._tasks.discard(task)
        task.cancel()

    def wake(self) -> None:
        """Wake everything that waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Wait for ``wake``, or for the end of a task."""
        self.raise_errors()
        await self._changed.wait()

    def raise_errors(self) -> None:
        """Raise the error of a task that failed: an engine cannot be used at all, or a bug."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class EngineStates:
    """The engines and their states, for ``EnginePool``."""

    _kind = "server"

    def __init__(
        self, engines: Sequence[Engine], config: RolloutConfig, version: int | None
    ) -> None:
        self.engines = tuple(PooledEngine(engine) for engine in engines)
        self.memory_is_released = False
        """Whether the trainer has the engines' memory (``colocated``)."""
        self._version = version
        # External servers may hold anything, whatever they report.
        self._trusts_reports = version is not None
        self._config = config
        self._health = config.health
        self._has_begun = False
        self.news = News()
        """Wakes whoever waits for a change of an engine's state."""
        self._loads: list[LoadReport] = []

    async def close(self) -> None:
        """Stop watching, and close every connection."""
        await self.news.close()
        await asyncio.gather(*(pooled.engine.close() for pooled in self.engines))

    @property
    def version(self) -> int | None:
        """Weights version that an engine must hold to be used; setting it makes others stale."""
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        self._version = version
        for pooled in self.engines:
            if pooled.is_usable:
                self._judge(pooled)

    @property
    def needs_weights(self) -> bool:
        """Whether no engine is usable, but one would be with the pool's weights."""
        states = {pooled.state for pooled in self.engines}
        return EngineState.USABLE not in states and EngineState.STALE in states

    def describe(self) -> str:
        """Name the engines that do not answer, or else those that are unusable, with reasons."""
        unusable = [pooled for pooled in self.engines if not pooled.is_usable]
        silent = [pooled for pooled in unusable if not pooled.is_answering]
        return "; ".join(
            f"{p.address} ({p.state}): {p.reason.removeprefix(f'{p.address}: ')}"
            for p in silent or unusable
        )

    def watch(self) -> None:
        """Start polling the engines that are not polled yet."""
        for pooled in self.engines:
            if pooled.watcher is None:
                pooled.watcher = self.news.run(self._watch(pooled))

    def add(self, engine: Engine) -> None:
        """Add an engine and start polling it; it must be admitted, and may need weights."""
        self.engines = (*self.engines, PooledEngine(engine))
        self.watch()

    def dismiss(self, pooled: PooledEngine) -> None:
        """Send an engine no more requests or weights; ``remove`` it once it has no requests."""
        if pooled.watcher is not None:
            self.news.cancel(pooled.watcher)
        self._move(pooled, EngineState.LEAVING, "it is being removed")

    async def remove(self, pooled: PooledEngine) -> None:
        """Remove an engine that was dismissed, and close its connections."""
        self.engines = tuple(other for other in self.engines if other is not pooled)
        self.news.wake()
        await pooled.engine.close()

    async def wait_for_engines(self, report: Callable[[str], None] = lambda line: None) -> None:
        """Wait until ``rollout.min_servers`` or all answer, at most ``rollout.health.patience_s``.

        ``report`` gets progress lines.

        Raises:
            RolloutError: Too few answer, or one cannot be used as it is.
        """
        self.watch()
        began_s, quorum = time.monotonic(), self._config.min_servers

        def missing() -> list[PooledEngine]:
            silent = [pooled for pooled in self.engines if not pooled.is_answering]
            num_engines = len(self.engines)  # may change meanwhile (``rollout.servers_file``)
            return silent if num_engines - len(silent) < (quorum or num_engines) else []

        def report_missing() -> None:
            if silent := missing():
                report(
                    f"waiting for {len(silent)} of {len(self.engines)} servers, first "
                    f"{silent[0].address}: {time.monotonic() - began_s:.0f} s of at most "
                    f"{self._health.patience_s:g} s (rollout.health.patience_s)"
                )

        with reporting(report_missing):
            await self._wait_until(
                lambda: not missing(),
                f"rollout.min_servers: fewer than {quorum} answer" if quorum else "no answer",
                "start them, correct rollout.servers, or lower rollout.min_servers",
            )
        self._has_begun = True

    async def wait_usable(self, is_over: Callable[[], bool] = lambda: False) -> list[PooledEngine]:
        """Wait until an engine is usable; return the usable ones, none once ``is_over``.

        Raises:
            RolloutError: One cannot be used as it is, or none answers for
                ``rollout.health.patience_s``.
        """
        while not is_over():
            self.news.raise_errors()
            if usable := [pooled for pooled in self.engines if pooled.is_usable]:
                return usable
            if self.needs_weights:
                # They come after the trainer's step, however long that takes.
                await self.news.wait()
                continue
            await self._wait_until(
                lambda: is_over() or any(pooled.is_answering for pooled in self.engines),
                f"no usable {self._kind}",
                "start them again and continue with resume=true",
            )
        return []

    async def _wait_until(self, is_met: Callable[[], bool], problem: str, remedy: str) -> None:
        """Wait for a condition for at most ``rollout.health.patience_s``."""
        patience_s = self._health.patience_s
        try:
            async with asyncio.timeout(self._patience_left_s()):
                while not is_met():
                    await self.news.wait()
        except TimeoutError:
            raise RolloutError(
                f"{problem} for {patience_s:g} s (rollout.health.patience_s): "
                f"{self.describe()}; {remedy}"
            ) from None
        self.news.raise_errors()

    def _patience_left_s(self) -> float:
        return self._health.patience_s

    def mark_updated(self, pooled: PooledEngine, version: int) -> None:
        """Record that an engine holds ``version``, unless it was lost or dismissed."""
        if pooled.is_answering:
            pooled.version = str(version)
            self._judge(pooled)

    def mark_lost(self, pooled: PooledEngine, reason: str) -> None:
        """Stop using an engine; its requests move to others."""
        if not pooled.is_lost:
            self.leave_out(pooled, reason)
            pooled.engine.give_up(reason)

    def leave_out(self, pooled: PooledEngine, reason: str) -> None:
        """Stop using an engine; its requests in flight may still finish."""
        if not pooled.is_lost:
            self._warn(pooled, f"is lost: {reason}")
            pooled.version, pooled.is_unproven, pooled.is_paused = None, True, False
            self._move(pooled, EngineState.LOST, reason)

    def _judge(self, pooled: PooledEngine) -> None:
        if pooled.version == str(self._version):
            self._move(pooled, EngineState.USABLE, "")
        else:
            self._move(pooled, EngineState.STALE, f"it has weights version {pooled.version}")

    def _move(self, pooled: PooledEngine, state: EngineState, reason: str) -> None:
        pooled.state, pooled.reason = state, reason
        self.news.wake()

    def _warn(self, pooled: PooledEngine, event: str) -> None:
        _LOG.warning("%s %s", pooled.address, event)

    def take_load(self) -> dict[str, float]:
        """Return means and maxima since the last call, and how many engines there are now."""
        loads, self._loads = self._loads, []
        usable = sum(pooled.is_usable for pooled in self.engines)
        return {"usable": usable, "known": len(self.engines)} | _summarise(loads)

    async def _watch(self, pooled: PooledEngine) -> None:
        answered_s, timeout_s = time.monotonic(), self._health.timeout_s
        while True:
            try:
                version = pooled.version
                # Positive, so that no server is blamed if this process itself was stopped.
                limit_s = answered_s + timeout_s - time.monotonic()
                reported = await pooled.engine.version(max(limit_s, self._health.interval_s))
                answered_s = time.monotonic()
                if not pooled.is_answering:
                    async with asyncio.timeout(self._health.stuck_timeout_s):
                        await self._admit(pooled)
                # Ignore an answer from before a weight sync.
                if pooled.version == version:
                    self._take_answer(pooled, reported)
                await self._look_at_progress(pooled)
            except (ServerError, TimeoutError) as error:
                cause, limit_s = describe_cause(error), timeout_s
                reason = f"no answer for {timeout_s:g} s ({cause}; rollout.health.timeout_s)"
                if pooled.state is EngineState.STARTING:
                    reason = f"it never answered ({cause})"
                    self._move(pooled, EngineState.STARTING, reason)
                    limit_s = self._health.patience_s if self._has_begun else math.inf
                if time.monotonic() - answered_s >= limit_s:
                    self.mark_lost(pooled, reason)
            except RolloutError as error:  # it answers, but cannot be used as it is
                if pooled.state is EngineState.STARTING and not self._has_begun:
                    raise
                self.mark_lost(pooled, str(error))
                pooled.reason = str(error)
            await asyncio.sleep(self._health.interval_s)

    async def _look_at_progress(self, pooled: PooledEngine) -> None:
        """Mark an engine lost if its requests get no tokens; record its load."""
        engine, max_silence_s = pooled.engine, self._config.request_timeout_s
        if engine.silence_s >= max_silence_s:
            self.mark_lost(
                pooled,
                f"no token of any request within {max_silence_s:g} s; raise "
                "rollout.request_timeout_s, or look for a stuck server in its log",
            )
        elif isinstance(engine, LoadReporter) and engine.num_in_flight:
            with contextlib.suppress(RolloutError):  # for metrics only
                self._loads.append(await engine.report_load(self._health.interval_s))

    async def _admit(self, pooled: PooledEngine) -> None:
        """Check an engine that answers for the first time, or again; raise if it is unusable."""
        pooled.properties = capabilities = await pooled.engine.capabilities()
        capabilities.check_weight_sync(self._config.weight_sync.method, pooled.address)
        if not self.memory_is_released:  # its check would crash it, and passed at its first start
            await pooled.engine.check()

    def _take_answer(self, pooled: PooledEngine, reported: str) -> None:
        """Process the weights version that an admitted engine reports."""
        if pooled.state is EngineState.STALE or reported == pooled.version:
            return
        was_starting = pooled.state is EngineState.STARTING
        pooled.version, pooled.is_unproven = reported, True
        if pooled.is_lost:
            self._warn(pooled, "answers again and needs weights")
            self._move(pooled, EngineState.STALE, f"it needs weights again: {pooled.reason}")
        elif was_starting and not self._trusts_reports:
            self._move(pooled, EngineState.STALE, "it needs weights")
        else:
            self._judge(pooled)
        if was_starting and self._has_begun:
            self._warn(pooled, f"joins the run ({pooled.state})")


class TeacherStates(EngineStates):
    """The engines of a teacher, each of which keeps the weights that it reported first."""

    _kind = "teacher"

    def __init__(self, engines: Sequence[Engine], config: RolloutConfig) -> None:
        super().__init__(engines, config, None)
        self.requests = {pooled: set[asyncio.Timeout]() for pooled in self.engines}
        """The time limits of requests in flight; a failed poll ends them."""
        self._versions: dict[PooledEngine, str] = {}
        self._lost_s = time.monotonic()
        """When the last engine was lost."""

    async def wait_for_engines(self, report: Callable[[str], None] = lambda line: None) -> None:
        """Wait until one is usable and each has been polled once; raises as ``wait_usable``."""
        self.watch()
        with reporting(lambda: report(teacher_text(f"waiting for the teacher: {self.describe()}"))):
            await self.wait_usable()
            while any(pooled.reason == _NOT_ASKED for pooled in self.engines):
                await self.news.wait()
        for pooled in self.engines:
            if not pooled.is_usable:
                self.leave_out(pooled, pooled.reason)

    def mark_lost(self, pooled: PooledEngine, reason: str) -> None:
        """See ``EngineStates``; ``Engine.give_up`` does not end calls of ``score``."""
        super().mark_lost(pooled, reason)
        self._end_requests(pooled)

    def leave_out(self, pooled: PooledEngine, reason: str) -> None:
        """See ``EngineStates``; patience counts from now on."""
        if not pooled.is_lost:
            self._lost_s = time.monotonic()
        super().leave_out(pooled, reason)

    def _patience_left_s(self) -> float:
        return self._health.patience_s - (time.monotonic() - self._lost_s)

    def _end_requests(self, pooled: PooledEngine) -> None:
        for limit in self.requests[pooled]:
            if not limit.expired():
                limit.reschedule(time.monotonic())

    def _warn(self, pooled: PooledEngine, event: str) -> None:
        _LOG.warning("the teacher at %s %s", pooled.address, teacher_text(event))

    async def _admit(self, pooled: PooledEngine) -> None:
        try:
            async with asyncio.timeout(self._health.timeout_s):
                with naming_teacher():
                    await pooled.engine.capabilities()
                    await pooled.engine.check()
        except (ServerError, TimeoutError):
            self._end_requests(pooled)
            raise

    def _take_answer(self, pooled: PooledEngine, reported: str) -> None:
        """Use an engine again if it still has its weights."""
        if reported == NO_WEIGHTS:
            raise RolloutError(
                f"{TEACHER_KEY}.servers: {pooled.address} has no weights; start it with serve "
                "--teacher"
            )
        is_known = pooled in self._versions
        if (first := self._versions.setdefault(pooled, reported)) != reported:
            raise RolloutError(
                f"{TEACHER_KEY}.servers: the weights of {pooled.address} must not change, got "
                f"version {reported} after {first}: a run syncs weights to it; give the teacher "
                "servers of its own"
            )
        if pooled.is_lost:
            self._warn(pooled, "answers again" if is_known else "joins the run")
        pooled.version = reported
        self._move(pooled, EngineState.USABLE, "")


def _summarise(loads: Sequence[LoadReport]) -> dict[str, float]:
    """Return the mean and the maximum of each field that an engine reported."""
    summary: dict[str, float] = {}
    for name in (member.name for member in fields(LoadReport)):
        values = [value for load in loads if (value := getattr(load, name)) is not None]
        if values:
            summary |= {name: math.fsum(values) / len(values), f"{name}_max": max(values)}
    return summary
