"""The collector's side of a weight sync: which servers take part, and how failures are handled.

Rank 0 (``send``) makes these calls, in this order:

    BEGIN → [JOIN] → RECEIVE, bucket by bucket → PROBE → RESUME, or SCORE after a mismatch

JOIN and RECEIVE return None, or the reason as soon as one server has failed, because a server
inside a broadcast returns only once rank 0 has left. Rank 0 then starts over with the remaining
servers. A server that failed is lost; once it answers again, it gets all weights in the next weight
sync. Weights on disk need one call: LOAD → PROBE → RESUME.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.base import BucketLayout, GroupPlace
from bapo_megatron.engine.pooled import EngineStates, PooledEngine
from bapo_megatron.errors import RolloutError, ServerGoneError, describe_cause
from bapo_megatron.runtime.calls import Answers, Call
from bapo_megatron.weight_sync.verify import Verifier

_POLL_S = 0.2


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
SCORE = Call("weights.score", None, tuple[float, ...])


class Pausable(Protocol):
    """Generation, which a weight sync pauses."""

    async def pause(self) -> bool:
        """Pause for new weights; return whether anything was generated."""

    async def resume(self) -> None:
        """Continue."""


@dataclass(eq=False)
class SyncGroup:
    """Which servers take part in a weight sync, and which a failure is blamed on.

    It neither calls nor waits. An attempt chooses ``members``, which join a collective group unless
    they still share one; after a failure, ``blame`` says who is lost, and another attempt begins.
    """

    members: tuple[PooledEngine, ...] = ()
    """The servers that take part, in the order of their ranks."""
    name: str | None = None
    """Of the collective group that servers have joined."""
    is_shared: bool = False
    """Whether this attempt uses the group of the previous weight sync."""
    is_broken: bool = False
    """Whether a call failed since the group was joined."""
    joined: tuple[PooledEngine, ...] = ()
    """Members of the collective group."""
    left_out: set[PooledEngine] = field(default_factory=set)
    """Servers that failed in this weight sync; used again only if no other answers."""

    def eligible(self, engines: Iterable[PooledEngine]) -> list[PooledEngine]:
        """Return the servers that may take part in the next attempt."""
        answering = [entry for entry in engines if entry.is_answering]
        return [entry for entry in answering if entry not in self.left_out] or answering

    @property
    def is_intact(self) -> bool:
        """Whether nobody has left the collective group."""
        # A server that was lost meanwhile has left it, or is another process.
        return not self.is_broken and all(entry.is_usable for entry in self.joined)

    def opened(self) -> Opened:
        """Describe the members to rank 0."""
        return Opened(
            addresses=tuple(entry.address for entry in self.members),
            num_ranks=tuple(entry.properties.num_ranks for entry in self.members),
            gpus=tuple(entry.properties.gpus for entry in self.members),
            share_group=self.is_shared,
        )

    def join(self, place: GroupPlace) -> dict[PooledEngine, GroupPlace]:
        """Make the members a collective group; return their places after rank 0's."""
        self.name, self.joined, self.is_broken = place.name, self.members, False
        places, first_rank = dict[PooledEngine, GroupPlace](), 1
        for entry in self.members:
            places[entry] = replace(place, first_rank=first_rank)
            first_rank += entry.properties.num_ranks
        return places

    def leave(self) -> tuple[str, list[PooledEngine]]:
        """Dissolve the collective group; return its name, and those who must leave it."""
        name, joined, self.name, self.joined = self.name or "", self.joined, None, ()
        return name, [e for e in self.members if e in joined and not e.is_lost]

    def blame(
        self, errors: Mapping[PooledEngine, BaseException | None], early: Iterable[PooledEngine]
    ) -> dict[PooledEngine, str]:
        """Return the members that a failed call costs, with the reasons.

        A member may have refused because another one is gone, or because it does not know a group
        that was joined earlier: it is blamed only if nothing else explains the failure, and if it
        refused before rank 0 left the group (``early``).

        Raises:
            RolloutError: All members refused.
        """
        self.is_broken = True
        refused = {  # they are intact, but do not do what the call asks for
            entry: str(error)
            for entry, error in errors.items()
            if isinstance(error, RolloutError) and not isinstance(error, ServerGoneError)
        }
        # After a malformed answer, too, the state of a server is unknown.
        lost = {
            entry: _describe(entry, error)
            for entry, error in errors.items()
            if error is not None and entry not in refused
        }
        if not (self.is_shared or lost or any(entry.is_lost for entry in errors)):
            lost = {entry: refused[entry] for entry in early if entry in refused}
            if len(lost) == len(errors):
                raise RolloutError(next(iter(lost.values())))
        self.left_out |= {entry for entry in errors if entry.is_lost or entry in lost}
        return lost


class WeightReceiver:
    """Syncs new weights to the servers of a pool: calls the members of a ``SyncGroup``."""

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
        bits = config.local.sampling_bits
        self._verifier = Verifier(pool, config.weight_sync, probe_prompts, bits)
        self._group = SyncGroup()
        self._calls: dict[asyncio.Task[None], PooledEngine] = {}
        """Open calls of the newest step; if it failed, kept until ``_remove_failed``."""
        self._failed_first: list[PooledEngine] = []
        """Members whose calls had ended when rank 0 learned that the step failed."""
        self._has_session = False
        self._is_paused = False
        self._leaving = asyncio.Lock()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._paused_at_s: float | None = None
        self._version = -1
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
        answers.bind(SCORE, self.score)

    async def begin(self, version: int) -> Opened:
        """Start an attempt to sync a version: pause generation, choose and prepare servers.

        Raises:
            RolloutError: There was no server for ``rollout.health.patience_s``, or all servers
                refused the previous attempt.
        """
        await self._pause()
        await self._remove_failed(self._health.timeout_s)
        group, is_intact = self._group, self._group.is_intact
        await self._await_members(version, has_session=True)
        group.is_shared = is_intact and group.joined == group.members
        if not group.is_shared:
            await self._leave()
        return group.opened()

    async def join(self, place: GroupPlace) -> str | None:
        """Have all members join the group of rank 0; return once it is complete.

        ``place`` is rank 0's; the members' ranks follow in the order of ``Opened``.
        """
        places = self._group.join(place)
        return await self._call_members(
            lambda entry, limit_s: entry.engine.weights.join_group(places[entry], limit_s)
        )

    async def receive(self, request: Receive) -> str | None:
        """Have all members load the bucket that rank 0 is broadcasting, or their own payloads."""
        bucket, version = request.bucket, self._version if request.is_last else None
        if isinstance(bucket, BucketLayout):
            group_name = self._group.name
            assert group_name is not None, "join comes first"
            failure = await self._call_members(
                lambda entry, limit_s: entry.engine.weights.receive(
                    bucket, group_name, version=version, timeout_s=limit_s
                )
            )
        else:
            payloads = dict(zip(self._group.members, bucket, strict=True))
            failure = await self._call_members(
                lambda entry, limit_s: entry.engine.weights.take(
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
                lambda entry, limit_s: entry.engine.weights.load(
                    request.model_dir, version=request.version, timeout_s=limit_s
                )
            )
            if failure is None and await self._mark_updated() is None:
                return
            await self._remove_failed(self._remaining_s())  # slow servers are not blamed

    async def probe(self, _: None) -> tuple[tuple[int, ...], ...]:
        """Return the sequences for the comparison of log-probs; empty if no server needs it."""
        return self._verifier.probe if self._verifier.due(self._group.members) else ()

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
        difference = None
        if expected:
            difference = await self._verifier.compare(self._group.members, expected, self._version)
        pause_s += await self._resume_generation()
        self._is_idle.set()
        self._group.left_out.clear()
        self._verifier.num_syncs += 1
        return Resumed(pause_s=pause_s, difference=difference)

    async def score(self, _: None) -> tuple[float, ...]:
        """Return a server's log-probs of the probe, to locate a mismatch; raise ``ServerError``."""
        if self._resumes_to_check:
            await self._resume_generation()
        return tuple((await self._verifier.score(self._group.members[0])).tolist())

    async def wait_idle(self) -> None:
        """Wait until no weight sync is in progress."""
        while not self._is_idle.is_set():
            await self._is_idle.wait()

    async def forget(self, entry: PooledEngine) -> None:
        """Dissolve the group if it includes a server that leaves the run."""
        if entry in self._group.joined:
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
            eligible = self._group.eligible(self._pool.engines)
            await asyncio.gather(*map(self._prepare, eligible))
            self._group.members = tuple(entry for entry in eligible if not entry.is_lost)
            if self._give_up_s is None:
                self._give_up_s = time.monotonic() + self._health.patience_s
            if time.monotonic() >= self._give_up_s:
                raise RolloutError(
                    f"no server took weights version {version} within rollout.health.patience_s "
                    f"({self._health.patience_s:g} s): {self._pool.describe()}; start them again "
                    "and continue with resume=true"
                )
            if self._group.members:
                return
            await asyncio.sleep(_POLL_S)

    async def _prepare(self, entry: PooledEngine) -> None:
        """Open a session on a server; if that fails, the server is lost."""
        limit_s = self._health.timeout_s
        try:
            entry.properties = await entry.engine.capabilities(limit_s)
            if self._has_session:
                await entry.engine.weights.open_session(limit_s)
        except RolloutError as error:
            self._pool.mark_lost(entry, str(error))

    async def _mark_updated(self) -> str | None:
        """Mark all members updated if they report the version; else return the first failure."""
        failure = await self._call_members(self._complete)
        if failure is None:
            self._pool.version = self._version
            for entry in self._group.members:
                self._pool.mark_updated(entry, self._version)
            self._give_up_s = None
        return failure

    async def _complete(self, entry: PooledEngine, limit_s: float) -> None:
        if self._has_session:
            await entry.engine.weights.close_session(limit_s)
        reported = await entry.engine.version(limit_s)
        if reported != str(self._version):
            raise RolloutError(
                f"{entry.address}: got weights version {self._version} but reports "
                f"'{reported}'; let no one else update this server"
            )
        if not self._may_flush:
            await entry.engine.weights.flush_idle(limit_s)

    def _remaining_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), 1.0)

    async def _call_members(
        self, call: Callable[[PooledEngine, float], Coroutine[Any, Any, None]]
    ) -> str | None:
        """Call every member; return None once all have answered, or the first failure.

        After a failure the other calls stay open until ``_remove_failed``.
        """
        limit_s = self._remaining_s()
        self._calls = {
            asyncio.create_task(call(entry, limit_s)): entry for entry in self._group.members
        }
        pending, failure = set(self._calls), None
        while pending and failure is None:
            done, pending = await asyncio.wait(
                pending, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION
            )
            errors = [(self._calls[task], task.exception()) for task in done]
            failures = [_describe(entry, error) for entry, error in errors if error is not None]
            lost = [self._calls[task] for task in pending if self._calls[task].is_lost]
            failures += [f"{entry.address}: lost during the call" for entry in lost]
            failure = next(iter(failures), None)
        if failure is None:
            self._calls = {}
        elif pending:
            await asyncio.wait(pending, timeout=_POLL_S)  # others may fail for the same reason
        self._failed_first = [entry for task, entry in self._calls.items() if task.done()]
        return failure

    async def _remove_failed(self, grace_s: float) -> None:
        """Mark the members lost that made the newest step fail, if it failed.

        Open calls get another ``grace_s``, unless their server is lost; then they are cancelled.

        Raises:
            RolloutError: All members refused.
        """
        calls, self._calls = self._calls, {}
        if not calls:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while open_calls := [t for t, e in calls.items() if not (t.done() or e.is_lost)]:
                    await asyncio.wait(open_calls, timeout=_POLL_S)
        hangs = ServerGoneError("it hangs in a weight sync that the others have left")
        errors = {e: task.exception() if task.done() else hangs for task, e in calls.items()}
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for entry, reason in self._group.blame(errors, self._failed_first).items():
            self._pool.mark_lost(entry, reason)

    async def _leave(self) -> None:
        """Have all servers leave the group, so that none is left for the next trainer."""
        async with self._leaving:  # so that nobody joins another group meanwhile
            name, left = self._group.leave()
            limit_s = self._health.timeout_s
            await asyncio.gather(
                *(entry.engine.weights.leave_group(name, limit_s) for entry in left),
                return_exceptions=True,  # a server may have restarted or be exiting
            )


def _describe(entry: PooledEngine, error: BaseException) -> str:
    if isinstance(error, RolloutError):
        return str(error)
    return f"{entry.address}: a call failed ({describe_cause(error)})"
