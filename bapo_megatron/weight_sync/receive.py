"""The collector's side of a push: which servers take part, what becomes of those that fail.

Rank 0 drives it (``send``); each public method but ``bind_to`` and ``close`` answers a call of
``messages``, which gives their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic

from bapo_megatron.calls import Answers
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.base import GroupPlace, WeightControl
from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError
from bapo_megatron.weight_sync import messages
from bapo_megatron.weight_sync.servers import EntryT, Pausable, ServerPool
from bapo_megatron.weight_sync.verify import mean_difference

_POLL_S = 0.2
_MAX_PROBE = 256
"""Tokens of a prompt that are compared."""


class WeightReceiver(Generic[EntryT]):
    """Gives the servers of a pool new weights."""

    def __init__(
        self,
        pool: ServerPool[EntryT],
        config: RolloutConfig,
        generation: Pausable | None,
        probe_prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Put the parts together; nothing is sent.

        ``generation`` is paused during a sync; None where only evaluations are made. ``verify``
        compares log-probs of ``probe_prompts``.
        """
        self._pool = pool
        self._sync = config.weight_sync
        self._resumes_to_verify = config.weight_sync.in_flight != "abort" or config.colocated
        self._health = config.health
        self._generation = generation
        prompts = (tuple(prompt[:_MAX_PROBE]) for prompt in probe_prompts if len(prompt) > 1)
        self._probe = messages.Probe(sequences=tuple(prompts))
        self._members: list[Member[EntryT]] = []
        self._calls = MemberCalls[EntryT]()
        self._group: _Group[EntryT] | None = None
        self._group_is_new = True
        self._has_session = False
        self._is_paused = False
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

    async def begin(self, request: messages.Begin) -> messages.Opened:
        """Start an attempt to push a version: pause generation, choose and prepare servers.

        Raises:
            RolloutError: There was no server for ``rollout.health.patience_s``, or all of them
                refused the last attempt.
        """
        await self._pause()
        has_failed = self._calls.have_failed
        await self._take_out_failed(self._health.timeout_s)
        self._version = request.version
        self._has_session = True
        # A server that was lost since has forgotten the group, or is another process.
        shared = self._group.entries if self._group is not None else ()
        is_intact = not has_failed and all(entry.is_usable for entry in shared)
        self._members = await self._await_members()
        share_group = is_intact and shared == tuple(member.entry for member in self._members)
        if not share_group:
            await self._leave()
        self._group_is_new = not share_group
        return messages.Opened(
            addresses=tuple(member.entry.address for member in self._members),
            num_ranks=tuple(member.control.tensor_ranks for member in self._members),
            share_group=share_group,
        )

    async def join(self, request: messages.Join) -> messages.Outcome:
        """Have all members join the trainer's group; answer when it is complete."""
        self._group = _Group(request.place.name, tuple(member.entry for member in self._members))
        places: dict[Member[EntryT], GroupPlace] = {}
        first_rank = 1
        for member in self._members:
            places[member] = replace(request.place, first_rank=first_rank)
            first_rank += member.control.tensor_ranks
        return await self._on_all(
            lambda member, limit_s: member.control.join_group(places[member], limit_s)
        )

    async def receive(self, request: messages.Receive) -> messages.Outcome:
        """Have all members receive and load the bucket that rank 0 broadcasts meanwhile."""
        assert self._group is not None, "join comes first"
        group_name = self._group.name
        return await self._on_all(
            lambda member, limit_s: member.control.receive(
                request.bucket,
                group_name,
                version=self._version if request.is_last else None,
                timeout_s=limit_s,
            )
        )

    async def take(self, request: messages.Take) -> messages.Outcome:
        """Have each member load its own payloads."""
        own = dict(zip(self._members, request.payloads, strict=True))
        return await self._on_all(
            lambda member, limit_s: member.control.take(
                own[member],
                version=self._version if request.is_last else None,
                timeout_s=limit_s,
            )
        )

    async def finish(self, _: messages.Finish) -> messages.Outcome:
        """Check that all members report the version, and admit them; generation stays paused."""
        outcome = await self._on_all(self._complete)
        if outcome.failed is None:
            self._pool.version = self._version
            for member in self._members:
                self._pool.mark_updated(member.entry, self._version)
            self._give_up_s = None
        return outcome

    async def load(self, request: messages.Load) -> None:
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
                    request.model_dir, version=request.version, timeout_s=limit_s
                )
            )
            await self._take_out_failed(self._remaining_s())  # the others load it all the same
            self._members = [member for member in self._members if not member.entry.is_lost]
            if self._members and (await self.finish(messages.Finish())).failed is None:
                return

    async def probe(self, _: messages.GetProbe) -> messages.Probe:
        """Return the tokens that ``verify`` compares, sequence by sequence."""
        return self._probe

    async def verify(self, request: messages.Verify) -> messages.Verified:
        """Compare every member's log-probs of the probe with the trainer's.

        A server that differs is taken out, and so is one that does not answer. Where requests are
        paused, not aborted, and where servers gave their memory away, generation continues before
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
            member.entry: difference
            for member, difference in zip(self._members, found, strict=True)
            if difference is not None
        }
        return messages.Verified(difference=self._judge(differences))

    def _judge(self, differences: dict[EntryT, float]) -> float | None:
        """Take out the servers that differ too much; return the largest difference of the others.

        Raises:
            RolloutError: All of them differ too much.
        """
        tolerance = self._sync.verify_tolerance
        bad = {entry: found for entry, found in differences.items() if not found <= tolerance}
        for entry, difference in bad.items():
            self._pool.mark_lost(
                entry,
                f"its log-probs differ from the trainer's by {difference:.3g} on average, more "
                f"than rollout.weight_sync.verify_tolerance ({tolerance:g}), although it reports "
                f"weights version {self._version}",
            )
        if bad and len(bad) == len(differences):
            described = ", ".join(f"{entry.address}: {found:.3g}" for entry, found in bad.items())
            raise RolloutError(
                f"no server computes as the trainer does with weights version {self._version} "
                f"(mean differences of log-probs: {described}; allowed: {tolerance:g}); check the "
                "dtype, quantization and model of the servers, or raise "
                "rollout.weight_sync.verify_tolerance"
            )
        return max(
            (found for entry, found in differences.items() if entry not in bad), default=None
        )

    async def resume(self, _: messages.Resume) -> messages.Resumed:
        """Let generation continue; do nothing if it runs."""
        await self._go_on()
        pause_s, self._pause_s = self._pause_s, 0.0
        return messages.Resumed(pause_s=pause_s)

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

    async def _on_all(
        self, call: Callable[[Member[EntryT], float], Awaitable[None]]
    ) -> messages.Outcome:
        failed = await self._calls.run(
            self._members, lambda member: call(member, self._remaining_s())
        )
        return messages.Outcome(failed=failed)

    async def _complete(self, member: Member[EntryT], limit_s: float) -> None:
        if self._has_session:
            await member.control.close_session(limit_s)
        reported = await member.entry.engine.version(limit_s)
        if reported != str(self._version):
            raise RolloutError(
                f"{member.entry.address}: got weights version {self._version} but reports "
                f"'{reported}'; let no one else update this server"
            )
        if not self._may_flush:
            await member.control.flush_idle(limit_s)

    async def _take_out_failed(self, grace_s: float) -> None:
        """Mark the members lost that made the last attempt fail, and those still not done."""
        blamed = await self._calls.settle(grace_s, blame_refusals=self._group_is_new)
        for member, reason in blamed.items():
            self._pool.mark_lost(member.entry, reason)

    async def _await_members(self) -> list[Member[EntryT]]:
        """Wait until a server can take part; return all that can, ready for weights."""
        clock_s = asyncio.get_running_loop().time
        while True:
            self._set_deadline()
            answering = [entry for entry in self._pool.engines if entry.is_answering]
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

    async def _prepare(self, entry: EntryT) -> Member[EntryT] | None:
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
        return Member(entry, control)

    async def _leave(self) -> None:
        """Have all servers forget the group, so that the next trainer finds none."""
        group, self._group = self._group, None
        if group is None:
            return
        await asyncio.gather(
            *(
                member.control.leave_group(group.name, self._health.timeout_s)
                for member in self._members
                if member.entry in group.entries and not member.entry.is_lost
            ),
            return_exceptions=True,  # it restarted meanwhile, or ends now
        )

    async def _difference(self, member: Member[EntryT], request: messages.Verify) -> float | None:
        """Mean absolute difference of a server's log-probs; None if it does not answer."""
        try:
            return await mean_difference(
                member.entry.engine, self._probe.sequences, request.expected, self._remaining_s()
            )
        except RolloutError as error:
            self._pool.mark_lost(member.entry, f"it does not answer the probe: {error}")
            return None


@dataclass(frozen=True, slots=True)
class _Group(Generic[EntryT]):
    """The collective group that servers have joined."""

    name: str
    entries: tuple[EntryT, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Member(Generic[EntryT]):
    """A server that takes part in a push."""

    entry: EntryT
    control: WeightControl


class MemberCalls(Generic[EntryT]):
    """One call to each member in every step of an attempt, and whom a failure is blamed on.

    After a failure the calls of that step stay open until ``settle``.
    """

    def __init__(self) -> None:
        self._calls: dict[asyncio.Task[None], Member[EntryT]] = {}

    @property
    def have_failed(self) -> bool:
        """Whether the newest step failed."""
        return bool(self._calls)

    async def run(
        self, members: Sequence[Member[EntryT]], call: Callable[[Member[EntryT]], Awaitable[None]]
    ) -> str | None:
        """Call every member; return when all have answered, or why the first has failed.

        The others may then be waiting for the trainer, in a collective that the first has left.
        """

        async def run(member: Member[EntryT]) -> None:
            await call(member)

        self._calls = {asyncio.create_task(run(member)): member for member in members}
        pending = set(self._calls)
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                if (error := task.exception()) is not None:
                    return _describe(self._calls[task], error)
            for task in pending:
                if (entry := self._calls[task].entry).is_lost:
                    return f"{entry.address}: it was lost meanwhile"
        self._calls = {}
        return None

    async def settle(self, grace_s: float, *, blame_refusals: bool) -> dict[Member[EntryT], str]:
        """Find the members that made the newest step fail, if it failed, and forget its calls.

        Members that refused may have done so because another one is gone, or because of a group
        that was left: they are blamed only with ``blame_refusals``, and if
        nothing else explains the failure.

        Open calls may take another ``grace_s``; then they are ended.

        Returns:
            Why each of them is blamed.

        Raises:
            RolloutError: All members refused.
        """
        calls, self._calls = self._calls, {}
        gone: dict[Member[EntryT], str] = {}
        refused: dict[Member[EntryT], str] = {}
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
            else:  # also if the answer has no known form: what the server has is not known
                gone[member] = _describe(member, error)
        await asyncio.gather(*calls, return_exceptions=True)
        is_explained = gone or any(member.entry.is_lost for member in calls.values())
        if is_explained or not blame_refusals:
            return gone
        if calls and len(refused) == len(calls):
            raise RolloutError(next(iter(refused.values())))
        return refused

    async def cancel(self) -> None:
        """End what is open."""
        calls, self._calls = self._calls, {}
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def _describe(member: Member[EntryT], error: BaseException) -> str:
    if isinstance(error, RolloutError):
        return str(error)
    kind = type(error).__name__
    return f"{member.entry.address}: a call failed ({f'{kind}: {error}' if str(error) else kind})"
