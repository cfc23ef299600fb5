"""The interfaces that a weight sync needs: the pool of engines, and the generation with them.

``rollout.pool.EngineStates`` is the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.engine.base import Engine


class PoolEntry(Protocol):
    """The pool's entry for one engine."""

    @property
    def engine(self) -> Engine:
        """The engine itself."""

    @property
    def address(self) -> str:
        """Address of the engine."""

    @property
    def is_usable(self) -> bool:
        """Whether it answers and holds the pool's weights version."""

    @property
    def is_answering(self) -> bool:
        """Whether it is usable, or would be with the pool's weights."""

    @property
    def is_lost(self) -> bool:
        """Whether it was taken out."""


EntryT = TypeVar("EntryT", bound=PoolEntry)


class ServerPool(Protocol[EntryT]):
    """All engines of the run."""

    version: int | None
    """Weights version that an engine must hold to be used."""

    @property
    def engines(self) -> Sequence[EntryT]:
        """The engines, in any state."""

    def mark_lost(self, pooled: EntryT, reason: str) -> None:
        """Take an engine out."""

    def mark_updated(self, pooled: EntryT, version: int) -> None:
        """Note that an engine got ``version`` and reports it."""


class Pausable(Protocol):
    """The generation with the old weights: ``BatchCollector``, or nothing."""

    async def pause(self) -> bool:
        """Make way for new weights; return whether anything was generated."""

    async def resume(self) -> None:
        """Continue."""
