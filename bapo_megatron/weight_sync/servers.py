"""What a weight sync needs of the pool of engines, and of what generates with them.

``rollout.engine_states.EngineStates`` is the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.engine.base import Engine


class Server(Protocol):
    """One engine of the pool."""

    @property
    def engine(self) -> Engine:
        """The engine itself."""
        ...

    @property
    def address(self) -> str:
        """Names it."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether it answers and holds the pool's weights version."""
        ...

    @property
    def is_answering(self) -> bool:
        """Whether it is usable, or would be with the pool's weights."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether it was taken out."""
        ...


ServerT = TypeVar("ServerT", bound=Server)


class ServerPool(Protocol[ServerT]):
    """All engines of the run."""

    version: int | None
    """Weights version that an engine must hold to be used."""

    @property
    def engines(self) -> Sequence[ServerT]:
        """The engines, in any state."""
        ...

    def mark_lost(self, pooled: ServerT, reason: str) -> None:
        """Take an engine out."""
        ...

    def mark_updated(self, pooled: ServerT, version: int) -> None:
        """An engine has got ``version`` and reports it."""
        ...


class Pausable(Protocol):
    """What generates with the old weights: ``BatchCollector``, or nothing."""

    async def pause(self) -> bool:
        """Make way for new weights; returns whether anything was generated."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...
