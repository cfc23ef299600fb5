"""What a weight sync needs of the servers and of what generates with them.

``rollout.engine_pool.EnginePool`` is the pool, ``rollout.sglang_control`` has a server's calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """What lies in a bucket, tensor after tensor."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Such as ``float32``."""
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where the ranks of one server stand in a collective group, and where its members meet."""

    name: str
    master_address: str
    master_port: int
    backend: str
    """``nccl`` or ``gloo``."""
    first_rank: int
    """Of the server's ranks; the trainer is rank 0."""
    world_size: int


class WeightControl(Protocol):
    """One server's calls for new weights.

    Every method may raise a ``ServerGoneError``, where the server did not answer in time, or
    another ``RolloutError``, where it refuses. No call is repeated.
    """

    @property
    def tensor_ranks(self) -> int:
        """Ranks that join a group."""
        ...

    def require_tensor_ranks_only(self) -> None:
        """Refuse a server whose other ranks would not get weights through buckets.

        Raises:
            RolloutError: It has such ranks.
        """
        ...

    async def open_session(self, timeout_s: float) -> None:
        """Make the server ready for ``receive`` or ``take``."""
        ...

    async def close_session(self, timeout_s: float) -> None:
        """Let the server finish what it does after the last weights."""
        ...

    async def join_group(self, place: GroupPlace, timeout_s: float) -> None:
        """Have the server's ranks join a collective group; answers when all members have."""
        ...

    async def leave_group(self, name: str, timeout_s: float) -> None:
        """Have the server's ranks forget a group."""
        ...

    async def receive(
        self,
        bucket: BucketLayout,
        group_name: str,
        *,
        version: int | None,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """Receive one flat tensor, broadcast by rank 0 of the group, and load what it holds.

        Args:
            bucket: What it holds.
            group_name: The group.
            version: Version of the weights, with their last part only: a server that has a part of
                them keeps its old label and is not used.
            flush_cache: Forget keys and values of the old weights.
            timeout_s: Longest time until it has answered.
        """
        ...

    async def take(
        self,
        payloads: Sequence[str],
        *,
        version: int | None,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """Load tensors that lie in memory that the server can map.

        Args:
            payloads: One for each tensor-parallel rank, see ``carriers.shared_memory_payload``.
            version: As in ``receive``.
            flush_cache: As in ``receive``.
            timeout_s: Longest time until it has answered.
        """
        ...

    async def load(
        self, model_dir: Path, *, version: int, flush_cache: bool, timeout_s: float
    ) -> None:
        """Load a Hugging Face directory."""
        ...

    async def flush_idle(self, timeout_s: float) -> None:
        """Forget keys and values of old weights, unless requests are running, paused or not."""
        ...

    async def reported_version(self, timeout_s: float) -> str:
        """Return the weights version that the server reports."""
        ...

    async def input_logprobs(self, token_ids: Sequence[int], timeout_s: float) -> list[float]:
        """Return log-probs of all tokens but the first, each after those before it, at T = 1."""
        ...


class Server(Protocol):
    """One server of the pool."""

    @property
    def address(self) -> str:
        """``http://host:port``."""
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

    async def weight_control(self, timeout_s: float) -> WeightControl:
        """Ask the server how it was started; returns its calls for new weights.

        Raises:
            ServerError: It does not answer as it should.
            RolloutError: It refuses.
        """
        ...


ServerT = TypeVar("ServerT", bound=Server)


class ServerPool(Protocol[ServerT]):
    """All servers of the run."""

    version: int | None
    """Weights version that a server must hold to be used."""

    @property
    def engines(self) -> Sequence[ServerT]:
        """The servers, in any state."""
        ...

    def mark_lost(self, engine: ServerT, reason: str) -> None:
        """Take a server out."""
        ...

    def mark_updated(self, engine: ServerT, version: int) -> None:
        """A server has got ``version`` and reports it."""
        ...


class Pausable(Protocol):
    """What generates with the old weights: ``BatchCollector``, or nothing."""

    async def pause(self) -> bool:
        """Make way for new weights; returns whether anything was generated."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...
