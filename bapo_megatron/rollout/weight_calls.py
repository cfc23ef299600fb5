"""One call to all servers that take part in a weight sync, and whom its failure is blamed on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bapo_megatron.errors import RolloutError, ServerGoneError
from bapo_megatron.rollout.engine import Engine, EngineState
from bapo_megatron.rollout.sglang_control import WeightControl

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

_WATCH_S = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A server that takes part."""

    engine: Engine
    control: WeightControl


@dataclass(frozen=True, slots=True)
class Failures:
    """What became of the calls of a failed attempt."""

    gone: dict[Member, str]
    """Did not answer, or hang."""
    refused: dict[Member, str]
    """Answered with an error, which may come from the failure of another member."""
    is_explained: bool
    """Some member is gone or was lost meanwhile."""
    is_unanimous: bool
    """All members refused."""


class MemberCalls:
    """The calls of the newest step; after a failure they stay open until ``settle``."""

    def __init__(self) -> None:
        """Nothing is called yet."""
        self._calls: dict[asyncio.Task[None], Member] = {}

    @property
    def have_failed(self) -> bool:
        """Whether the newest step failed."""
        return bool(self._calls)

    async def run(
        self, members: Sequence[Member], call: Callable[[Member], Awaitable[None]]
    ) -> str | None:
        """Call every member; returns when all have answered, or why the first has failed.

        The others may wait for the trainer then, in a collective that the first has left.
        """

        async def run(member: Member) -> None:
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
                if (engine := self._calls[task].engine).state is EngineState.LOST:
                    return f"{engine.address}: it was lost meanwhile"
        self._calls = {}
        return None

    async def settle(self, grace_s: float) -> Failures:
        """Say what became of the calls of the newest step, if it failed, and forget them.

        Args:
            grace_s: How long those that are open may take; then they are ended.
        """
        calls, self._calls = self._calls, {}
        gone: dict[Member, str] = {}
        refused: dict[Member, str] = {}
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
        was_lost = any(member.engine.state is EngineState.LOST for member in calls.values())
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


def _describe(member: Member, error: BaseException) -> str:
    if isinstance(error, RolloutError):
        return str(error)
    kind = type(error).__name__
    return f"{member.engine.address}: a call failed ({f'{kind}: {error}' if str(error) else kind})"
