"""The collector's side of a push: which servers take part, what becomes of those that fail.

Rank 0 drives it (``send``); each public method but ``bind_to`` and ``close`` answers a call of
``messages``, where their order is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from bapo_megatron.engine.base import GroupPlace
from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError
from bapo_megatron.weight_sync.messages import (
    BEGIN,
    FINISH,
    JOIN,
    LOAD,
    PROBE,
    RECEIVE,
    RESUME,
    TAKE,
    VERIFY,
    Begin,
    Finish,
    GetProbe,
    Join,
    Load,
    Opened,
    Outcome,
    Probe,
    Receive,
    Resume,
    Resumed,
    Take,
    Verified,
    Verify,
)
from bapo_megatron.weight_sync.servers import ServerT
from bapo_megatron.weight_sync.verify import judge, mean_difference

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bapo_megatron.calls import Answers
    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.engine.base import WeightControl
    from bapo_megatron.weight_sync.servers import Pausable, ServerPool

_POLL_S = 0.2
_WATCH_S = 0.2
_LONGEST_PROBE = 256
"""Tokens of a prompt that are compared."""


class WeightReceiver(Generic[ServerT]):
    """Gives the servers of a pool new weights."""

    def __init__(
        self,
        pool: ServerPool[ServerT],
        config: RolloutConfig,
        generation: Pausable | None,
        probe_prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Put the parts together; nothing is sent.

        Args:
            pool: The servers.
            config: How they get weights, and what is waited for how long.
            generation: Is paused during a sync; none where only evaluations are made.
            probe_prompts: Tokens whose log-probs ``verify`` compares.
        """
        self._pool = pool
        self._sync = config.weight_sync
        self._resumes_to_verify = config.weight_sync.in_flight != "abort" or config.colocated
        self._health = config.health
        self._generation = generation
        self._probe = Probe(
            sequences=tuple(
                tuple(prompt[:_LONGEST_PROBE]) for prompt in probe_prompts if len(prompt) > 1
            )
        )
        self._members: list[Member[ServerT]] = []
        self._calls = MemberCalls[ServerT]()
        self._group: _Group[ServerT] | None = None
        self._group_is_new = True
        self._has_session = False
        self._is_paused = False
        self._paused_at_s: float | None = None
        self._pause_s = 0.0
        self._version = -1
        self._deadline_s = 0.0
        self._give_up_s: float | None = None

    def bind_to(self, answers: Answers) -> None:
        """Have the calls of a push answered."""
        answers.bind(BEGIN, self.begin)
        answers.bind(JOIN, self.join)
        answers.bind(RECEIVE, self.receive)
        answers.bind(TAKE, self.take)
        answers.bind(FINISH, self.finish)
        answers.bind(LOAD, self.load)
        answers.bind(PROBE, self.probe)
        answers.bind(VERIFY, self.verify)
        answers.bind(RESUME, self.resume)

    async def begin(self, request: Begin) -> Opened:
        """Start an attempt to push a version: pause generation, choose and prepare servers.

        Raises:
            RolloutError: There was no server for ``rollout.health.patience_s``, all of them refused
                the last attempt, or one has ranks that cannot take part.
        """
        await self._pause()
        has_failed = self._calls.have_failed
        await self._take_out_failed(self._health.timeout_s)
        self._version = request.version
        self._has_session = True
        # A server that was lost since has forgotten the group, or is another process.
        shared = self._group.servers if self._group is not None else ()
        is_intact = not has_failed and all(server.is_usable for server in shared)
        self._members = await self._await_members()
        share_group = is_intact and shared == tuple(member.server for member in self._members)
        if not share_group:
            await self._leave()
        self._group_is_new = not share_group
        return Opened(
            addresses=tuple(member.server.address for member in self._members),
            num_ranks=tuple(member.control.tensor_ranks for member in self._members),
            share_group=share_group,
        )

    async def join(self, request: Join) -> Outcome:
        """Have all servers that take part join the trainer's group; answers when it is complete."""
        servers = tuple(member.server for member in self._members)
        self._group = _Group(request.group_name, servers)
        world_size = 1 + sum(member.control.tensor_ranks for member in self._members)
        places: dict[Member[ServerT], GroupPlace] = {}
        first_rank = 1
        for member in self._members:
            places[member] = GroupPlace(
                name=request.group_name,
                master_address=request.master_address,
                master_port=request.master_port,
                backend=request.backend,
                first_rank=first_rank,
                world_size=world_size,
            )
            first_rank += member.control.tensor_ranks
        return await self._on_all(
            lambda member, limit_s: member.control.join_group(places[member], limit_s)
        )

    async def receive(self, request: Receive) -> Outcome:
        """Have all servers receive and load the bucket that rank 0 broadcasts meanwhile."""
        assert self._group is not None, "join comes first"
        group_name = self._group.name
        return await self._on_all(
            lambda member, limit_s: member.control.receive(
                request.bucket,
                group_name,
                version=self._version if request.is_last else None,
                flush_cache=request.is_last and self._may_flush,
                timeout_s=limit_s,
            )
        )

    async def take(self, request: Take) -> Outcome:
        """Have each server load its own payloads."""
        own = dict(zip(self._members, request.payloads, strict=True))
        return await self._on_all(
            lambda member, limit_s: member.control.take(
                own[member],
                version=self._version if request.is_last else None,
                flush_cache=request.is_last and self._may_flush,
                timeout_s=limit_s,
            )
        )

    async def finish(self, _: Finish) -> Outcome:
        """Check that all servers report the version, and admit them; generation stays paused."""
        outcome = await self._on_all(self._complete)
        if outcome.failed is None:
            self._pool.version = self._version
            for member in self._members:
                self._pool.mark_updated(member.server, self._version)
            self._give_up_s = None
        return outcome

    async def load(self, request: Load) -> None:
        """Have all servers load a Hugging Face directory; generation stays paused.

        Raises:
            RolloutError: As ``begin``.
        """
        await self._pause()
        self._version = request.version
        self._has_session = False
        while True:
            await self._take_out_failed(self._health.timeout_s)
            self._members = await self._await_members()
            await self._on_all(
                lambda member, limit_s: member.control.load(
                    request.model_dir,
                    version=request.version,
                    flush_cache=self._may_flush,
                    timeout_s=limit_s,
                )
            )
            await self._take_out_failed(self._remaining_s())  # the others load it all the same
            self._members = [m for m in self._members if not m.server.is_lost]
            if self._members and (await self.finish(Finish())).failed is None:
                return

    async def probe(self, _: GetProbe) -> Probe:
        """Return the tokens that ``verify`` compares, sequence by sequence."""
        return self._probe

    async def verify(self, request: Verify) -> Verified:
        """Compare every server's log-probs of the probe with the trainer's.

        A server that differs is taken out, and so is one that does not answer. Where requests are
        paused, not aborted, and where servers gave their memory away, generation goes on before
        this: a paused server answers no probe. What it sampled until then is kept.

        Raises:
            RolloutError: Servers answered, and all of them differ.
        """
        if self._resumes_to_verify:
            await self._go_on()
        self._set_deadline()
        found = await asyncio.gather(
            *(self._difference(member, request) for member in self._members)
        )
        differences = {
            member.server: difference
            for member, difference in zip(self._members, found, strict=True)
            if difference is not None
        }
        verdict = judge(differences, self._sync.verify_tolerance, self._version)
        for server, reason in verdict.bad.items():
            self._pool.mark_lost(server, reason)
        if verdict.error is not None:
            raise verdict.error
        return Verified(difference=verdict.difference)

    async def resume(self, _: Resume) -> Resumed:
        """Let generation go on; does nothing where it does."""
        await self._go_on()
        pause_s, self._pause_s = self._pause_s, 0.0
        return Resumed(pause_s=pause_s)

    async def close(self) -> None:
        """End what is open on the servers, also the group; none of them has to answer."""
        await self._calls.cancel()
        await self._leave()

    @property
    def _may_flush(self) -> bool:
        """Requests that are paused in place still need their keys and values."""
        return self._sync.in_flight != "in_place"

    async def _pause(self) -> None:
        if not self._is_paused and self._generation is not None:
            started_s = asyncio.get_running_loop().time()
            if await self._generation.pause():
                self._paused_at_s = started_s
        self._is_paused = True

    async def _go_on(self) -> None:
        if self._is_paused and self._generation is not None:
            await self._generation.resume()
        if self._paused_at_s is not None:
            self._pause_s += asyncio.get_running_loop().time() - self._paused_at_s
        self._is_paused, self._paused_at_s = False, None

    def _set_deadline(self) -> None:
        self._deadline_s = asyncio.get_running_loop().time() + self._sync.timeout_s

    def _remaining_s(self) -> float:
        return max(self._deadline_s - asyncio.get_running_loop().time(), 1.0)

    async def _on_all(self, call: Callable[[Member[ServerT], float], Awaitable[None]]) -> Outcome:
        return Outcome(
            failed=await self._calls.run(
                self._members, lambda member: call(member, self._remaining_s())
            )
        )

    async def _complete(self, member: Member[ServerT], limit_s: float) -> None:
        control = member.control
        if self._has_session:
            await control.close_session(limit_s)
        reported = await member.server.engine.version(limit_s)
        if reported != str(self._version):
            raise RolloutError(
                f"{member.server.address}: got weights version {self._version} but reports "
                f"'{reported}'; let no one else update this server"
            )
        if not self._may_flush:
            await control.flush_idle(limit_s)

    async def _take_out_failed(self, grace_s: float) -> None:
        """Mark the members lost that made the last attempt fail, and those still not done.

        Those that refused may have done so because of one that is gone, or of a group that was
        left: they are blamed only where nothing else explains the failure.

        Raises:
            RolloutError: All of them refused.
        """
        failures = await self._calls.settle(grace_s)
        blamed = failures.gone
        if not failures.is_explained and self._group_is_new:
            if failures.is_unanimous:
                raise RolloutError(next(iter(failures.refused.values())))
            blamed = failures.refused
        for member, reason in blamed.items():
            self._pool.mark_lost(member.server, reason)

    async def _await_members(self) -> list[Member[ServerT]]:
        """The servers that take part, ready for weights; waits until there is one."""
        clock_s = asyncio.get_running_loop().time
        while True:
            self._set_deadline()
            answering = [server for server in self._pool.engines if server.is_answering]
            prepared = await asyncio.gather(*map(self._prepare, answering))
            members = [member for member in prepared if member is not None]
            if self._give_up_s is None:
                self._give_up_s = clock_s() + self._health.patience_s
            if members and clock_s() < self._give_up_s:
                return members
            if clock_s() >= self._give_up_s:
                raise RolloutError(
                    f"no server took weights version {self._version} within "
                    f"rollout.health.patience_s ({self._health.patience_s:g} s); see the servers' "
                    "logs, start them again and continue with resume=true"
                )
            await asyncio.sleep(_POLL_S)

    async def _prepare(self, server: ServerT) -> Member[ServerT] | None:
        """Ask a server what it is and open a session; one that fails is taken out."""
        try:
            control = await server.engine.weights(self._health.timeout_s)
            if self._has_session:
                control.require_tensor_ranks_only()
                await control.open_session(self._health.timeout_s)
        except ServerError as error:
            self._pool.mark_lost(server, str(error))
            return None
        return Member(server, control)

    async def _leave(self) -> None:
        """Have all servers forget the group, so that the next trainer finds none."""
        group, self._group = self._group, None
        if group is None:
            return
        await asyncio.gather(
            *(
                member.control.leave_group(group.name, self._health.timeout_s)
                for member in self._members
                if member.server in group.servers and not member.server.is_lost
            ),
            return_exceptions=True,  # it restarted meanwhile, or ends now
        )

    async def _difference(self, member: Member[ServerT], request: Verify) -> float | None:
        """Mean absolute difference of a server's log-probs; none where it does not answer."""
        try:
            return await mean_difference(
                member.server.engine, self._probe.sequences, request.expected, self._remaining_s()
            )
        except RolloutError as error:
            self._pool.mark_lost(member.server, f"it does not answer the probe: {error}")
            return None


@dataclass(frozen=True, slots=True)
class _Group(Generic[ServerT]):
    """The collective group that servers have joined."""

    name: str
    servers: tuple[ServerT, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Member(Generic[ServerT]):
    """A server that takes part."""

    server: ServerT
    control: WeightControl


@dataclass(frozen=True, slots=True)
class Failures(Generic[ServerT]):
    """What became of the calls of a failed attempt."""

    gone: dict[Member[ServerT], str]
    """Did not answer, or hang."""
    refused: dict[Member[ServerT], str]
    """Answered with an error, which may come from the failure of another member."""
    is_explained: bool
    """Some member is gone or was lost meanwhile."""
    is_unanimous: bool
    """All members refused."""


class MemberCalls(Generic[ServerT]):
    """One call to each member, and whom a failure is blamed on.

    Those of the newest part of an attempt; after a failure they stay open until ``settle``.
    """

    def __init__(self) -> None:
        """Nothing is called yet."""
        self._calls: dict[asyncio.Task[None], Member[ServerT]] = {}

    @property
    def have_failed(self) -> bool:
        """Whether the newest step failed."""
        return bool(self._calls)

    async def run(
        self,
        members: Sequence[Member[ServerT]],
        call: Callable[[Member[ServerT]], Awaitable[None]],
    ) -> str | None:
        """Call every member; returns when all have answered, or why the first has failed.

        The others may wait for the trainer then, in a collective that the first has left.
        """

        async def run(member: Member[ServerT]) -> None:
            await call(member)

        self._calls = {asyncio.create_task(run(member)): member for member in members}
        pending = set(self._calls)
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=_WATCH_S, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                if (error := task.exception()) is not None:
                    return _describe(self._calls[task], error)
            for task in pending:
                if (server := self._calls[task].server).is_lost:
                    return f"{server.address}: it was lost meanwhile"
        self._calls = {}
        return None

    async def settle(self, grace_s: float) -> Failures[ServerT]:
        """Say what became of the calls of the newest step, if it failed, and forget them.

        Args:
            grace_s: How long those that are open may take; then they are ended.
        """
        calls, self._calls = self._calls, {}
        gone: dict[Member[ServerT], str] = {}
        refused: dict[Member[ServerT], str] = {}
        if calls:
            await asyncio.wait(calls, timeout=grace_s)
        for task, member in calls.items():
            if not task.done():
                task.cancel()
                gone[member] = "it hangs in a weight update that others have left"
            elif (error := task.exception()) is None:
                continue
            elif isinstance(error, RolloutError) and not isinstance(error, ServerGoneError):
                refused[member] = str(error)
            else:  # also where the answer has no known form: what the server has is not known
                gone[member] = _describe(member, error)
        await asyncio.gather(*calls, return_exceptions=True)
        was_lost = any(member.server.is_lost for member in calls.values())
        return Failures(
            gone=gone,
            refused=refused,
            is_explained=bool(gone) or was_lost,
            is_unanimous=bool(calls) and len(refused) == len(calls),
        )

    async def cancel(self) -> None:
        """End what is open."""
        calls, self._calls = self._calls, {}
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def _describe(member: Member[ServerT], error: BaseException) -> str:
    if isinstance(error, RolloutError):
        return str(error)
    kind = type(error).__name__
    return f"{member.server.address}: a call failed ({f'{kind}: {error}' if str(error) else kind})"
