"""The collector's side of a weight sync: which servers take part, what becomes of those that fail.

Rank 0 of the trainer drives it (``trainer.weight_sync``); each public method is a call:

    begin → [join] → receive | take, bucket by bucket → finish → [verify] → resume

An attempt that fails is answered with the reason, ``{"failed": "…"}``, as soon as one server has
failed: only when the trainer has left the collective do the others come out of it. The next
``begin`` then takes the failed ones out and starts again with the rest. ``load`` is the whole sync
for weights on the disk.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bapo_megatron.errors import RolloutError, ServerError
from bapo_megatron.rollout.engine import Engine, EngineState
from bapo_megatron.rollout.sglang_control import (
    GroupPlace,
    TensorNames,
    WeightControl,
    mean_difference,
)
from bapo_megatron.rollout.weight_calls import Member, MemberCalls

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.rollout.engine_pool import EnginePool

_LOG = logging.getLogger(__name__)
_POLL_S = 0.2
_LONGEST_PROBE = 256
"""Tokens of a prompt that are compared."""

_ANSWERING = (EngineState.USABLE, EngineState.STALE)


class Pausable(Protocol):
    """What generates with the old weights: ``BatchCollector``, or nothing."""

    async def pause(self) -> bool:
        """Make way for new weights; returns whether anything was generated."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...


@dataclass(frozen=True, slots=True)
class _Group:
    """The collective group that servers have joined."""

    name: str
    engines: tuple[Engine, ...]


class WeightService:
    """Gives the servers of a pool new weights."""

    def __init__(
        self,
        pool: EnginePool,
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
        self._probe = [list(prompt[:_LONGEST_PROBE]) for prompt in probe_prompts if len(prompt) > 1]
        self._members: list[Member] = []
        self._calls = MemberCalls()
        self._group: _Group | None = None
        self._group_is_new = True
        self._has_session = False
        self._is_paused = False
        self._paused_at_s: float | None = None
        self._pause_s = 0.0
        self._version = -1
        self._deadline_s = 0.0
        self._give_up_s: float | None = None

    async def begin(self, version: int) -> dict[str, Any]:
        """Start an attempt to push ``version``: pause generation, choose and prepare servers.

        Returns:
            ``num_ranks`` of each server that takes part, its ``addresses``, and whether all of them
            ``share_group``: have joined one and were never lost since.

        Raises:
            RolloutError: There was no server for ``rollout.health.patience_s``, all of them refused
                the last attempt, or one has ranks that cannot take part.
        """
        await self._pause()
        has_failed = self._calls.have_failed
        await self._take_out_failed(self._health.timeout_s)
        self._version = version
        self._has_session = True
        # A server that was lost since has forgotten the group, or is another process.
        shared = self._group.engines if self._group is not None else ()
        is_intact = not has_failed and all(e.state is EngineState.USABLE for e in shared)
        self._members = await self._await_members()
        share_group = is_intact and shared == tuple(member.engine for member in self._members)
        if not share_group:
            await self._leave()
        self._group_is_new = not share_group
        return {
            "addresses": [member.engine.address for member in self._members],
            "num_ranks": [member.control.facts.tensor_ranks for member in self._members],
            "share_group": share_group,
        }

    async def join(
        self, group_name: str, master_address: str, master_port: int, backend: str
    ) -> dict[str, Any]:
        """Have all servers that take part join the trainer's group; answers when it is complete."""
        self._group = _Group(group_name, tuple(member.engine for member in self._members))
        world_size = 1 + sum(member.control.facts.tensor_ranks for member in self._members)
        places: dict[Member, GroupPlace] = {}
        first_rank = 1
        for member in self._members:
            places[member] = GroupPlace(
                group_name, master_address, master_port, backend, first_rank, world_size
            )
            first_rank += member.control.facts.tensor_ranks
        return await self._on_all(
            lambda member, limit_s: member.control.join_group(places[member], limit_s)
        )

    async def receive(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], is_last: bool
    ) -> dict[str, Any]:
        """Have all servers receive and load the bucket that rank 0 broadcasts meanwhile."""
        assert self._group is not None, "join comes first"
        group_name = self._group.name
        bucket = TensorNames(tuple(names), tuple(dtypes), tuple(tuple(shape) for shape in shapes))
        return await self._on_all(
            lambda member, limit_s: member.control.receive(
                bucket,
                group_name,
                version=self._version if is_last else None,
                flush_cache=is_last and self._may_flush,
                timeout_s=limit_s,
            )
        )

    async def take(self, payloads: list[list[str]], is_last: bool) -> dict[str, Any]:
        """Have each server load its own of ``payloads``, in the order of ``begin``."""
        own = dict(zip(self._members, payloads, strict=True))
        return await self._on_all(
            lambda member, limit_s: member.control.take(
                own[member],
                version=self._version if is_last else None,
                flush_cache=is_last and self._may_flush,
                timeout_s=limit_s,
            )
        )

    async def finish(self) -> dict[str, Any]:
        """Check that all servers report the version, and admit them; generation stays paused."""
        result = await self._on_all(self._complete)
        if result["failed"] is None:
            self._pool.version = self._version
            for member in self._members:
                self._pool.mark_updated(member.engine, self._version)
            self._give_up_s = None
        return result

    async def load(self, model_dir: str, version: int) -> None:
        """Have all servers load a Hugging Face directory as ``version``; generation stays paused.

        Raises:
            RolloutError: As ``begin``.
        """
        await self._pause()
        self._version = version
        self._has_session = False
        while True:
            await self._take_out_failed(self._health.timeout_s)
            self._members = await self._await_members()
            await self._on_all(
                lambda member, limit_s: member.control.load(
                    Path(model_dir),
                    version=version,
                    flush_cache=self._may_flush,
                    timeout_s=limit_s,
                )
            )
            await self._take_out_failed(self._remaining_s())  # the others load it all the same
            self._members = [m for m in self._members if m.engine.state is not EngineState.LOST]
            if self._members and (await self.finish())["failed"] is None:
                return

    async def probe(self) -> list[list[int]]:
        """The tokens that ``verify`` compares, sequence by sequence."""
        return self._probe

    async def verify(self, expected: list[list[float]]) -> dict[str, float | None]:
        """Compare every server's log-probs of the probe with the trainer's.

        A server that differs is taken out, and so is one that does not answer. Where requests are
        paused, not aborted, and where servers gave their memory away, generation goes on before
        this: a paused server answers no probe. What it sampled until then is kept.

        Args:
            expected: For each sequence of ``probe`` the log-probs of all its tokens but the first,
                at temperature 1.

        Returns:
            ``difference``: the largest mean absolute difference, in nats, of the servers that stay;
            none where none stays because none answered: they may come back, and need the weights.

        Raises:
            RolloutError: Servers answered, and all of them differ.
        """
        if self._resumes_to_verify:
            await self._go_on()
        self._set_deadline()
        found = await asyncio.gather(
            *(self._difference(member, expected) for member in self._members)
        )
        tolerance = self._sync.verify_tolerance
        answers = {m: d for m, d in zip(self._members, found, strict=True) if d is not None}
        bad = {m: d for m, d in answers.items() if not d <= tolerance}
        for member, difference in bad.items():
            self._pool.mark_lost(
                member.engine,
                f"its log-probs differ from the trainer's by {difference:.3g} on average, more "
                f"than rollout.weight_sync.verify_tolerance ({tolerance:g}), although it "
                f"reports weights version {self._version}",
            )
        if bad and len(bad) == len(answers):
            differences = ", ".join(f"{m.engine.address}: {d:.3g}" for m, d in bad.items())
            raise RolloutError(
                f"no server computes as the trainer does with weights version {self._version} "
                f"(mean differences of log-probs: {differences}; allowed: {tolerance:g}); check "
                "the dtype, quantization and model of the servers, or raise "
                "rollout.weight_sync.verify_tolerance"
            )
        good = [difference for member, difference in answers.items() if member not in bad]
        return {"difference": max(good, default=None)}

    async def resume(self) -> dict[str, float]:
        """Let generation go on; does nothing where it does.

        Returns:
            ``pause_s``: for how long it stood still since the last call; 0 where nothing was
            generated.
        """
        await self._go_on()
        pause_s, self._pause_s = self._pause_s, 0.0
        return {"pause_s": pause_s}

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
        self, call: Callable[[Member, float], Awaitable[None]]
    ) -> dict[str, str | None]:
        return {
            "failed": await self._calls.run(
                self._members, lambda member: call(member, self._remaining_s())
            )
        }

    async def _complete(self, member: Member, limit_s: float) -> None:
        control = member.control
        if self._has_session:
            await control.close_session(limit_s)
        reported = await control.reported_version(limit_s)
        if reported != str(self._version):
            raise RolloutError(
                f"{member.engine.address}: got weights version {self._version} but reports "
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
            self._pool.mark_lost(member.engine, reason)

    async def _await_members(self) -> list[Member]:
        """The servers that take part, ready for weights; waits until there is one."""
        clock_s = asyncio.get_running_loop().time
        while True:
            self._set_deadline()
            answering = [e for e in self._pool.engines if e.state in _ANSWERING]
            prepared = await asyncio.gather(*(self._prepare(engine) for engine in answering))
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

    async def _prepare(self, engine: Engine) -> Member | None:
        """Ask a server what it is and open a session; one that fails is taken out."""
        try:
            facts = await engine.client.ask_info(self._health.timeout_s)
            control = WeightControl(engine.client, facts)
            if self._has_session:
                facts.require_tensor_ranks_only(engine.address)
                await control.open_session(self._health.timeout_s)
        except ServerError as error:
            self._pool.mark_lost(engine, str(error))
            return None
        return Member(engine, control)

    async def _leave(self) -> None:
        """Have all servers forget the group, so that the next trainer finds none."""
        group, self._group = self._group, None
        if group is None:
            return
        await asyncio.gather(
            *(
                member.control.leave_group(group.name, self._health.timeout_s)
                for member in self._members
                if member.engine in group.engines and member.engine.state is not EngineState.LOST
            ),
            return_exceptions=True,  # it restarted meanwhile, or ends now
        )

    async def _difference(self, member: Member, expected: list[list[float]]) -> float | None:
        """Mean absolute difference of a server's log-probs; none where it does not answer."""
        try:
            return await mean_difference(member.control, self._probe, expected, self._remaining_s())
        except RolloutError as error:
            self._pool.mark_lost(member.engine, f"it does not answer the probe: {error}")
            return None
