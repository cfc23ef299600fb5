"""The collector's side of a weight sync: which servers take part, and how failures are handled.

Rank 0 (``send``) makes these calls, in this order:

    BEGIN → [JOIN] → RECEIVE, bucket by bucket → PROBE → RESUME

JOIN and RECEIVE return None, or the reason as soon as one server has failed, because a server
inside a broadcast returns only once rank 0 has left. Rank 0 then starts over with the remaining
servers. A server that failed is lost; once it answers again, it gets all weights in the next weight
sync. Weights on disk need one call: LOAD → PROBE → RESUME.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.base import BucketLayout, GroupPlace, WeightControl
from bapo_megatron.engine.pooled import EngineStates, PooledEngine
from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError, describe_cause
from bapo_megatron.runtime.calls import Answers, Call

_POLL_S = 0.2
_MAX_PROBE_TOKENS = 256
"""Tokens of a prompt whose log-probs are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The servers that take part in an attempt."""

    addresses: tuple[str, ...]
    num_ranks: tuple[int, ...]
    """Tensor-parallel ranks of each."""
    gpus: tuple[tuple[int, ...], ...]
    """The GPU of each of these ranks, as rank 0 numbers them; () if unknown."""
    share_group: bool
    """Whether all of them are still in one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """A bucket, which rank 0 broadcasts or shares."""

    bucket: BucketLayout | tuple[tuple[str, ...], ...]
    """In shared memory: for each server, in the order of ``Opened``, a payload per rank."""
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A Hugging Face directory."""

    model_dir: Path
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The outcome of a weight sync."""

    pause_s: float
    """Time for which generation was paused; 0 if nothing was generated."""
    difference: float | None
    """Largest mean absolute difference, in nats, of a remaining server's log-probs from the
    trainer's; None if none was compared, or none answered."""


# Each is documented at the method of WeightReceiver that answers it.
BEGIN = Call("weights.begin", int, Opened)
JOIN = Call("weights.join", GroupPlace, str | None)
RECEIVE = Call("weights.receive", Receive, str | None)
LOAD = Call("weights.load", Load, None)
PROBE = Call("weights.probe", None, tuple[tuple[int, ...], ...])
RESUME = Call("weights.resume", tuple[tuple[float, ...], ...], Resumed)


class Pausable(Protocol):
    """Generation, which a weight sync pauses."""

    async def pause(self) -> bool:
        """Pause for new weights; return whether anything was generated."""

    async def resume(self) -> None:
        """Continue."""


_ROUNDING = 1e-5
"""Change of a log-prob that float32 can make without a change of the weights."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Log-probs of the probe's P tokens."""

    server: np.ndarray
    """[P]"""
    trainer: np.ndarray
    """[P]"""

    def shows_no_change_of(self, later: Self) -> bool:
        """Whether the server's log-probs stayed while the trainer's moved.

        They stayed if they moved by less than a tenth as much, root mean square. New weights move
        them by as much, in bfloat16 by other rounding at least. Kernels that do not repeat their
        results may hide that weights did not arrive.
        """
        moved = _rms(later.trainer - self.trainer)
        return moved > _ROUNDING and _rms(later.server - self.server) < moved / 10


def _rms(values: np.ndarray) -> float:
    return math.sqrt(float(values @ values) / len(values))


class WeightReceiver:
    """Syncs new weights to the servers of a pool."""

    def __init__(
        self,
        pool: EngineStates,
        config: RolloutConfig,
        generation: Pausable | None,
        probe_prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Take the generation to pause, if any, and prompts for ``weight_sync.verify``."""
        self._pool = pool
        self._sync, self._health = config.weight_sync, config.health
        self._resumes_to_check = self._sync.in_flight != "abort" or config.colocated
        # Requests paused in place still need their KV cache.
        self._may_flush = self._sync.in_flight != "in_place"
        self._generation = generation
        cut = (tuple(prompt[:_MAX_PROBE_TOKENS]) for prompt in probe_prompts if len(prompt) > 1)
        self._probe = tuple(cut)
        self._members: dict[PooledEngine, WeightControl] = {}
        """The servers that take part, in the order of their ranks."""
        self._calls: dict[asyncio.Task[None], PooledEngine] = {}
        """Open calls of the newest step; if it failed, kept until ``_remove_failed``."""
        self._failed_first: set[PooledEngine] = set()
        """Members whose calls had ended when rank 0 learned that the step failed."""
        self._left_out: set[PooledEngine] = set()
        """Servers that failed in this weight sync; used again only if no other answers."""
        self._group: tuple[str, tuple[PooledEngine, ...]] | None = None
        """Name and members of the collective group that servers have joined."""
        self._shares_group = False
        """Whether this attempt uses the group of the previous weight sync."""
        self._group_is_broken = False
        """Whether a step failed since the group was joined."""
        self._has_session = False
        self._is_paused = False
        self._leaving = asyncio.Lock()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._paused_at_s: float | None = None
        self._version = -1
        self._num_syncs = 0
        self._compared: dict[PooledEngine, _Comparison] = {}
        """The last one of each server, since it was (re)started."""
        self._deadline_s = 0.0
        self._give_up_s: float | None = None

    def bind_to(self, answers: Answers) -> None:
        """Answer the calls of a weight sync."""
        answers.bind(BEGIN, self.begin)
        answers.bind(JOIN, self.join)
        answers.bind(RECEIVE, self.receive)
        answers.bind(LOAD, self.load)
        answers.bind(PROBE, self.probe)
        answers.bind(RESUME, self.resume)

    async def begin(self, version: int) -> Opened:
        """Start an attempt to sync a version: pause generation, choose and prepare servers.

        Raises:
            RolloutError: There was no server for ``rollout.health.patience_s``, or all servers
                refused the previous attempt.
        """
        await self._pause()
        await self._remove_failed(self._health.timeout_s)
        # A server that was lost meanwhile has left the group, or is another process.
        joined: tuple[PooledEngine, ...] = () if self._group is None else self._group[1]
        is_intact = not self._group_is_broken and all(entry.is_usable for entry in joined)
        await self._await_members(version, has_session=True)
        self._shares_group = is_intact and joined == tuple(self._members)
        if not self._shares_group:
            await self._leave()
        return Opened(
            addresses=tuple(entry.address for entry in self._members),
            num_ranks=tuple(control.tensor_ranks for control in self._members.values()),
            gpus=tuple(entry.properties.gpus for entry in self._members),
            share_group=self._shares_group,
        )

    async def join(self, place: GroupPlace) -> str | None:
        """Have all members join the group of rank 0; return once it is complete.

        ``place`` is rank 0's; the members' ranks follow in the order of ``Opened``.
        """
        self._group, self._group_is_broken = (place.name, tuple(self._members)), False
        places = {}
        first_rank = 1
        for entry, control in self._members.items():
            places[entry] = replace(place, first_rank=first_rank)
            first_rank += control.tensor_ranks
        return await self._call_members(
            lambda entry, control, limit_s: control.join_group(places[entry], limit_s)
        )

    async def receive(self, request: Receive) -> str | None:
        """Have all members load the bucket that rank 0 is broadcasting, or their own payloads."""
        bucket, version = request.bucket, self._version if request.is_last else None
        if isinstance(bucket, BucketLayout):
            assert self._group is not None, "join comes first"
            group_name, _ = self._group
            failure = await self._call_members(
                lambda _, control, limit_s: control.receive(
                    bucket, group_name, version=version, timeout_s=limit_s
                )
            )
        else:
            payloads = dict(zip(self._members, bucket, strict=True))
            failure = await self._call_members(
                lambda entry, control, limit_s: control.take(
                    payloads[entry], version=version, timeout_s=limit_s
                )
            )
        return await self._mark_updated() if request.is_last and failure is None else failure

    async def load(self, request: Load) -> None:
        """Have all servers load a directory, with retries; raise as ``begin``."""
        await self._pause()
        while True:
            await self._await_members(request.version, has_session=False)
            failure = await self._call_members(
                lambda _, control, limit_s: control.load(
                    request.model_dir, version=request.version, timeout_s=limit_s
                )
            )
            if failure is None and await self._mark_updated() is None:
                return
            await self._remove_failed(self._remaining_s())  # slow servers are not blamed

    async def probe(self, _: None) -> tuple[tuple[int, ...], ...]:
        """Return the sequences for the comparison of log-probs; empty if no server needs it."""
        return self._probe if self._sync.verify != "none" and self._unproven() else ()

    async def resume(self, expected: tuple[tuple[float, ...], ...]) -> Resumed:
        """Compare the servers' log-probs with the trainer's, and resume generation.

        ``expected`` are the trainer's log-probs on the probe: of all tokens of each sequence but
        the first, at temperature 1. If empty, nothing is compared. A server that differs too much
        is lost. Unless requests were aborted, generation resumes first, because a paused server
        answers no probe; tokens sampled until the comparison are kept.

        Raises:
            RolloutError: A server differs too much, and no other is left.
        """
        pause_s = await self._resume_generation() if self._resumes_to_check else 0.0
        difference = await self._compare_all(expected) if expected else None
        pause_s += await self._resume_generation()
        self._is_idle.set()
        self._left_out.clear()
        self._num_syncs += 1
        return Resumed(pause_s=pause_s, difference=difference)

    def _unproven(self) -> list[PooledEngine]:
        """Return the members whose log-probs must be compared."""
        verify = self._sync.verify
        every = {"every": 1, "first": 0}.get(verify, 0) if isinstance(verify, str) else verify
        is_due = every > 0 and self._num_syncs % every == 0
        return [e for e in self._members if not e.is_lost and (is_due or e.is_unproven)]

    async def _compare_all(self, expected: Sequence[Sequence[float]]) -> float | None:
        entries = self._unproven()
        outcomes = await asyncio.gather(
            *(self._compare(entry, expected) for entry in entries), return_exceptions=True
        )
        differences: list[float] = []
        refusals: list[RolloutError] = []
        for entry, outcome in zip(entries, outcomes, strict=True):
            if isinstance(outcome, RolloutError):
                self._pool.mark_lost(entry, str(outcome))
                if not isinstance(outcome, ServerError):
                    refusals.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                differences.append(outcome)
        if refusals and all(entry.is_lost for entry in self._members):
            raise refusals[0]
        return max(differences, default=None)

    async def _compare(self, entry: PooledEngine, expected: Sequence[Sequence[float]]) -> float:
        """Return the mean |log-prob of the server − expected|; raise if it is too large."""
        try:
            rows = [
                (await entry.engine.score(token_ids, self._sync.timeout_s)).logprobs
                for token_ids in self._probe
            ]
        except RolloutError as error:
            raise ServerError(f"it does not answer the probe: {error}") from error
        current = _Comparison(np.concatenate(rows), np.concatenate(expected))
        difference = float(np.abs(current.server - current.trainer).mean())
        tolerance = self._sync.verify_tolerance
        if not difference <= tolerance:  # NaN too
            raise RolloutError(
                f"{entry.address}: its log-probs differ from the trainer's by {difference:.3g} on "
                f"average, more than rollout.weight_sync.verify_tolerance ({tolerance:g}), but it "
                f"reports weights version {self._version}; check its dtype, quantization and "
                "model, or raise the tolerance"
            )
        before = None if entry.is_unproven else self._compared.get(entry)
        if before is not None and before.shows_no_change_of(current):
            raise RolloutError(
                f"{entry.address}: its log-probs did not follow the trainer's since the last "
                f"comparison, though it reports weights version {self._version}: new weights did "
                "not reach its model; check rollout.weight_sync.method and its adapters, and "
                "restart it"
            )
        self._compared[entry] = current
        entry.is_unproven = entry.is_lost
        return difference

    async def wait_idle(self) -> None:
        """Wait until no weight sync is in progress."""
        while not self._is_idle.is_set():
            await self._is_idle.wait()

    async def forget(self, entry: PooledEngine) -> None:
        """Dissolve the group if it includes a server that leaves the run."""
        if self._group is not None and entry in self._group[1]:
            await self._leave()

    async def close(self) -> None:
        """Cancel open calls and leave the group; servers need not answer."""
        calls, self._calls = self._calls, {}
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._leave()

    async def _pause(self) -> None:
        self._is_idle.clear()
        if not self._is_paused and self._generation is not None:
            started_s = time.monotonic()
            if await self._generation.pause():
                self._paused_at_s = started_s
        self._is_paused = True

    async def _resume_generation(self) -> float:
        """Resume generation, if it is paused; return for how long it was paused."""
        if self._is_paused and self._generation is not None:
            await self._generation.resume()
        paused_at_s, self._paused_at_s = self._paused_at_s, None
        self._is_paused = False
        return 0.0 if paused_at_s is None else time.monotonic() - paused_at_s

    async def _await_members(self, version: int, *, has_session: bool) -> None:
        """Wait until servers can take part; prepare them and make them members."""
        self._version, self._has_session = version, has_session
        while True:
            self._deadline_s = time.monotonic() + self._sync.timeout_s
            answering = [entry for entry in self._pool.engines if entry.is_answering]
            eligible = [entry for entry in answering if entry not in self._left_out] or answering
            controls = await asyncio.gather(*map(self._prepare, eligible))
            self._members = {e: c for e, c in zip(eligible, controls, strict=True) if c is not None}
            if self._give_up_s is None:
                self._give_up_s = time.monotonic() + self._health.patience_s
            if time.monotonic() >= self._give_up_s:
                raise RolloutError(
                    f"no server took weights version {version} within rollout.health.patience_s "
                    f"({self._health.patience_s:g} s): {self._pool.describe()}; start them again "
                    "and continue with resume=true"
                )
            if self._members:
                return
            await asyncio.sleep(_POLL_S)

    async def _prepare(self, entry: PooledEngine) -> WeightControl | None:
        """Open a session on a server; if that fails, the server is lost."""
        limit_s = self._health.timeout_s
        try:
            control = await entry.engine.weights(limit_s, flush_cache=self._may_flush)
            if self._has_session:
                await control.open_session(limit_s)
        except RolloutError as error:
            self._pool.mark_lost(entry, str(error))
            return None
        return control

    async def _mark_updated(self) -> str | None:
        """Mark all members updated if they report the version; else return the first failure."""
        failure = await self._call_members(self._complete)
        if failure is None:
            self._pool.version = self._version
            for entry in self._members:
                self._pool.mark_updated(entry, self._version)
            self._give_up_s = None
        return failure

    async def _complete(self, entry: PooledEngine, control: WeightControl, limit_s: float) -> None:
        if self._has_session:
            await control.close_session(limit_s)
        reported = await entry.engine.version(limit_s)
        if reported != str(self._version):
            raise RolloutError(
                f"{entry.address}: got weights version {self._version} but reports "
                f"'{reported}'; let no one else update this server"
            )
        if not self._may_flush:
            await control.flush_idle(limit_s)

    def _remaining_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), 1.0)

    async def _call_members(
        self, call: Callable[[PooledEngine, WeightControl, float], Coroutine[Any, Any, None]]
    ) -> str | None:
        """Call every member; return None once all have answered, or the first failure.

        After a failure the other calls stay open until ``_remove_failed``.
        """
        limit_s = self._remaining_s()
        self._calls = {
            asyncio.create_task(call(entry, control, limit_s)): entry
            for entry, control in self._members.items()
        }
        pending, failure = set(self._calls), None
        while pending and failure is None:
            done, pending = await asyncio.wait(
                pending, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                if (error := task.exception()) is not None:
                    failure = failure or _describe(self._calls[task], error)
            for entry in (self._calls[task] for task in pending):
                if entry.is_lost:
                    failure = failure or f"{entry.address}: lost during the call"
        if failure is None:
            self._calls = {}
        elif pending:
            await asyncio.wait(pending, timeout=_POLL_S)  # others may fail for the same reason
        self._failed_first = {entry for task, entry in self._calls.items() if task.done()}
        return failure

    async def _remove_failed(self, grace_s: float) -> None:
        """Mark the members lost that made the newest step fail, if it failed.

        A member may have refused because another one is gone, or because it does not know a group
        that was joined earlier: it is blamed only if nothing else explains the failure, and if it
        refused before rank 0 left the group. Open calls get another ``grace_s``, unless their
        server is lost; then they are cancelled.

        Raises:
            RolloutError: All members refused.
        """
        calls, self._calls = self._calls, {}
        if not calls:
            return
        self._group_is_broken = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while open_calls := [t for t, e in calls.items() if not (t.done() or e.is_lost)]:
                    await asyncio.wait(open_calls, timeout=_POLL_S)
        refused: dict[PooledEngine, str] = {}
        for task, entry in calls.items():
            if not task.done():
                task.cancel()
                self._pool.mark_lost(entry, "it hangs in a weight sync that the others have left")
            elif (error := task.exception()) is None:
                continue
            elif isinstance(error, RolloutError) and not isinstance(error, ServerGoneError):
                refused[entry] = str(error)
            else:  # also for a malformed answer: the state of the server is unknown
                self._pool.mark_lost(entry, _describe(entry, error))
        await asyncio.gather(*calls, return_exceptions=True)
        if not self._shares_group and not any(entry.is_lost for entry in calls.values()):
            blamed = {e: reason for e, reason in refused.items() if e in self._failed_first}
            if len(blamed) == len(calls):
                raise RolloutError(next(iter(blamed.values())))
            for entry, reason in blamed.items():
                self._pool.mark_lost(entry, reason)
        self._left_out |= {entry for entry in calls.values() if entry.is_lost}

    async def _leave(self) -> None:
        """Have all servers leave the group, so that none is left for the next trainer."""
        async with self._leaving:  # so that nobody joins another group meanwhile
            group, self._group = self._group, None
            name, entries = group or ("", ())
            await asyncio.gather(
                *(
                    control.leave_group(name, self._health.timeout_s)
                    for entry, control in self._members.items()
                    if entry in entries and not entry.is_lost
                ),
                return_exceptions=True,  # a server may have restarted or be exiting
            )


def _describe(entry: PooledEngine, error: BaseException) -> str:
    if isinstance(error, RolloutError):
        return str(error)
    return f"{entry.address}: a call failed ({describe_cause(error)})"
