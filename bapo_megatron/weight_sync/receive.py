"""The collector's side of a push: which servers take part, what becomes of those that fail.

Rank 0 drives it (``send``); each public method but ``bind_to`` and ``close`` answers a call of
``messages``, which gives their order.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.base import GroupPlace, WeightControl
from bapo_megatron.engine.pooled import EngineStates, PooledEngine
from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError
from bapo_megatron.runtime.calls import Answers
from bapo_megatron.weight_sync import messages
from bapo_megatron.weight_sync.proof import Proof

_POLL_S = 0.2


class Pausable(Protocol):
    """The generation with the old weights."""

    async def pause(self) -> bool:
        """Make way for new weights; return whether anything was generated."""

    async def resume(self) -> None:
        """Continue."""


class WeightReceiver:
    """Gives the servers of a pool new weights."""

    def __init__(
        self,
        pool: EngineStates,
        config: RolloutConfig,
        generation: Pausable | None,
        probe_prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Put the parts together; nothing is sent.

        ``generation`` is paused during a sync; None where only evaluations are made. Servers are
        compared with the trainer on ``probe_prompts``.
        """
        self._pool = pool
        self._sync, self._health = config.weight_sync, config.health
        self._resumes_to_verify = self._sync.in_flight != "abort" or config.colocated
        # Requests that are paused in place still need their keys and values.
        self._may_flush = self._sync.in_flight != "in_place"
        self._generation = generation
        self._proof = Proof(pool, config, probe_prompts)
        self._members: dict[PooledEngine, WeightControl] = {}
        """The servers that take part, in the order of their ranks."""
        self._calls: dict[asyncio.Task[None], PooledEngine] = {}
        """Open calls of the newest step; if it failed, kept until ``_take_out_failed``."""
        self._group: tuple[str, tuple[PooledEngine, ...]] | None = None
        """Name and members of the collective group that servers have joined."""
        self._group_is_new = True
        """Whether all members that refuse are to blame for it, not an earlier attempt."""
        self._group_is_broken = False
        """Whether a step failed since the group was joined."""
        self._has_session = False
        self._is_paused = False
        self._leaving = asyncio.Lock()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._paused_at_s: float | None = None
        self._pause_s = 0.0
        self._version = -1
        self._deadline_s = 0.0
        self._give_up_s: float | None = None

    def bind_to(self, answers: Answers) -> None:
        """Answer the calls of a push."""
        answers.bind(messages.BEGIN, self.begin)
        answers.bind(messages.JOIN, self.join)
        answers.bind(messages.RECEIVE, self.receive)
        answers.bind(messages.TAKE, self.take)
        answers.bind(messages.FINISH, self.finish)
        answers.bind(messages.LOAD, self.load)
        answers.bind(messages.PROBE, self.probe)
        answers.bind(messages.VERIFY, self.verify)
        answers.bind(messages.RESUME, self.resume)

    async def begin(self, version: int) -> messages.Opened:
        """Start an attempt to push a version: pause generation, choose and prepare servers.

        Raises:
            RolloutError: There was no server for ``rollout.health.patience_s``, or all of them
                refused the last attempt.
        """
        await self._pause()
        await self._take_out_failed(self._health.timeout_s)
        self._version, self._has_session = version, True
        # A server that was lost since has forgotten the group, or is another process.
        shared: tuple[PooledEngine, ...] = () if self._group is None else self._group[1]
        is_intact = not self._group_is_broken and all(entry.is_usable for entry in shared)
        self._members = await self._await_members()
        share_group = is_intact and shared == tuple(self._members)
        if not share_group:
            await self._leave()
        self._group_is_new = not share_group
        return messages.Opened(
            addresses=tuple(entry.address for entry in self._members),
            num_ranks=tuple(control.tensor_ranks for control in self._members.values()),
            gpus=tuple(entry.gpus for entry in self._members),
            share_group=share_group,
        )

    async def join(self, place: GroupPlace) -> str | None:
        """Have all members join the trainer's group; answer when it is complete."""
        self._group, self._group_is_broken = (place.name, tuple(self._members)), False
        places = {}
        first_rank = 1
        for entry, control in self._members.items():
            places[entry] = replace(place, first_rank=first_rank)
            first_rank += control.tensor_ranks
        return await self._on_all(
            lambda entry, control, limit_s: control.join_group(places[entry], limit_s)
        )

    async def receive(self, request: messages.Receive) -> str | None:
        """Have all members receive and load the bucket that rank 0 broadcasts meanwhile."""
        assert self._group is not None, "join comes first"
        group_name, _ = self._group
        return await self._on_all(
            lambda _, control, limit_s: control.receive(
                request.bucket,
                group_name,
                version=self._version if request.is_last else None,
                timeout_s=limit_s,
            )
        )

    async def take(self, request: messages.Take) -> str | None:
        """Have each member load its own payloads."""
        own = dict(zip(self._members, request.payloads, strict=True))
        return await self._on_all(
            lambda entry, control, limit_s: control.take(
                own[entry],
                version=self._version if request.is_last else None,
                timeout_s=limit_s,
            )
        )

    async def finish(self, _: None) -> str | None:
        """Check that all members report the version, and admit them; generation stays paused."""
        failure = await self._on_all(self._complete)
        if failure is None:
            self._pool.version = self._version
            for entry in self._members:
                self._pool.mark_updated(entry, self._version)
            self._give_up_s = None
        return failure

    async def load(self, request: messages.Load) -> None:
        """Have all servers load a Hugging Face directory; generation stays paused.

        After another attempt that failed, those load it that come out of that one. They leave its
        group only with the next attempt, because NCCL may hang in a broken one.

        Raises:
            RolloutError: As ``begin``.
        """
        await self._pause()
        self._group_is_new = False  # the disk may do what a group could not, for all
        while True:
            await self._take_out_failed(self._health.timeout_s)
            if self._has_session:
                left = [control for e, control in self._members.items() if not e.is_lost]
                closings = (control.close_session(self._health.timeout_s) for control in left)
                await asyncio.gather(*closings, return_exceptions=True)  # it may have none any more
            self._version, self._has_session, self._group_is_new = request.version, False, True
            self._members = await self._await_members()
            await self._on_all(
                lambda _, control, limit_s: control.load(
                    request.model_dir, version=request.version, timeout_s=limit_s
                )
            )
            await self._take_out_failed(self._remaining_s())  # the others load it all the same
            for entry in [entry for entry in self._members if entry.is_lost]:
                del self._members[entry]
            if self._members and await self.finish(None) is None:
                return

    async def probe(self, _: None) -> tuple[tuple[int, ...], ...]:
        """Return the tokens that ``verify`` compares; none where no server must be compared."""
        return self._proof.probe(self._members)

    async def verify(self, expected: tuple[tuple[float, ...], ...]) -> float | None:
        """Compare log-probs of the probe as ``Proof.compare``.

        Where requests are paused, not aborted, and where servers gave their memory away, generation
        continues before this: a paused server answers no probe. What it samples until then is kept.
        """
        if self._resumes_to_verify:
            await self._go_on()
        return await self._proof.compare(tuple(self._members), expected, self._version)

    async def resume(self, _: None) -> float:
        """Let generation continue, and check new servers; return for how long it stood still.

        Raises:
            RolloutError: No server may be used as it is.
        """
        await self._go_on()
        self._is_idle.set()
        await self._proof.check(tuple(self._members))
        pause_s, self._pause_s = self._pause_s, 0.0
        return pause_s

    async def wait_idle(self) -> None:
        """Wait until no push is in progress."""
        while not self._is_idle.is_set():
            await self._is_idle.wait()

    async def forget(self, entry: PooledEngine) -> None:
        """Have all servers leave the group that a server is in, because that one leaves the run."""
        if self._group is not None and entry in self._group[1]:
            await self._leave()

    async def close(self) -> None:
        """End what is open on the servers, also the group; none of them has to answer."""
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

    async def _go_on(self) -> None:
        if self._is_paused and self._generation is not None:
            await self._generation.resume()
        if self._paused_at_s is not None:
            self._pause_s += time.monotonic() - self._paused_at_s
        self._is_paused, self._paused_at_s = False, None

    def _remaining_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), 1.0)

    async def _on_all(
        self, call: Callable[[PooledEngine, WeightControl, float], Coroutine[Any, Any, None]]
    ) -> str | None:
        """Call every member; return when all have answered, or why the first has failed.

        The others may then be waiting for the trainer, in a collective that the first has left;
        their calls stay open until ``_take_out_failed``.
        """
        limit_s = self._remaining_s()
        self._calls = {
            asyncio.create_task(call(entry, control, limit_s)): entry
            for entry, control in self._members.items()
        }
        pending = set(self._calls)
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                if (error := task.exception()) is not None:
                    return _describe(self._calls[task], error)
            for task in pending:
                if (entry := self._calls[task]).is_lost:
                    return f"{entry.address}: it was lost meanwhile"
        self._calls = {}
        return None

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

    async def _take_out_failed(self, grace_s: float) -> None:
        """Take out the members that made the newest step fail, if it failed.

        Members that refused may have done so because another one is gone, or because of a group
        that was left: they are blamed only in a new group, and if nothing else explains the
        failure. Open calls may take another ``grace_s``; then they are ended.

        Raises:
            RolloutError: All members refused.
        """
        calls, self._calls = self._calls, {}
        if not calls:
            return
        self._group_is_broken = True
        await asyncio.wait(calls, timeout=grace_s)
        gone: dict[PooledEngine, str] = {}
        refused: dict[PooledEngine, str] = {}
        for task, entry in calls.items():
            if not task.done():
                task.cancel()
                gone[entry] = "it hangs in a weight update that others have left"
            elif (error := task.exception()) is None:
                continue
            elif isinstance(error, RolloutError) and not isinstance(error, ServerGoneError):
                refused[entry] = str(error)
            else:  # also if the answer has no known form: what the server has is not known
                gone[entry] = _describe(entry, error)
        await asyncio.gather(*calls, return_exceptions=True)
        is_explained = gone or any(entry.is_lost for entry in calls.values())
        if self._group_is_new and not is_explained:
            if len(refused) == len(calls):
                raise RolloutError(next(iter(refused.values())))
            gone = refused
        for entry, reason in gone.items():
            self._pool.mark_lost(entry, reason)

    async def _await_members(self) -> dict[PooledEngine, WeightControl]:
        """Wait until a server can take part; return all that can, ready for weights."""
        while True:
            self._deadline_s = time.monotonic() + self._sync.timeout_s
            answering = [entry for entry in self._pool.engines if entry.is_answering]
            controls = await asyncio.gather(*map(self._prepare, answering))
            if self._give_up_s is None:
                self._give_up_s = time.monotonic() + self._health.patience_s
            if time.monotonic() >= self._give_up_s:
                raise RolloutError(
                    f"no server took weights version {self._version} within "
                    f"rollout.health.patience_s ({self._health.patience_s:g} s); see the servers' "
                    "logs, start them again and continue with resume=true"
                )
            if members := {e: c for e, c in zip(answering, controls, strict=True) if c is not None}:
                return members
            await asyncio.sleep(_POLL_S)

    async def _prepare(self, entry: PooledEngine) -> WeightControl | None:
        """Ask a server how it was started and open a session; one that fails is taken out."""
        try:
            control = await entry.engine.weights(
                self._health.timeout_s, flush_cache=self._may_flush
            )
            if self._has_session:
                await control.open_session(self._health.timeout_s)
        except ServerError as error:
            self._pool.mark_lost(entry, str(error))
            return None
        return control

    async def _leave(self) -> None:
        """Have all servers forget the group, so that the next trainer finds none."""
        async with self._leaving:  # nobody joins another group meanwhile
            group, self._group = self._group, None
            name, entries = group or ("", ())
            await asyncio.gather(
                *(
                    control.leave_group(name, self._health.timeout_s)
                    for entry, control in self._members.items()
                    if entry in entries and not entry.is_lost
                ),
                return_exceptions=True,  # it restarted meanwhile, or ends now
            )


def _describe(entry: PooledEngine, error: BaseException) -> str:
    if isinstance(error, RolloutError):
        return str(error)
    kind = type(error).__name__
    return f"{entry.address}: a call failed ({f'{kind}: {error}' if str(error) else kind})"
