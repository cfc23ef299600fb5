"""How buckets of weights get from rank 0 to the servers."""

from __future__ import annotations

import functools
from concurrent.futures import wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from bapo_megatron.errors import RolloutError
from bapo_megatron.trainer.weight_group import WeightGroup, choose_backend, rank_zero_address
from bapo_megatron.trainer.weight_memory import shared_memory_payload, start_manager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    import torch

    from bapo_megatron.config.rollout import WeightSyncConfig
    from bapo_megatron.rollout.base import RolloutSource
    from bapo_megatron.trainer.weight_buckets import Bucket

_LAST_WAIT_S = 180.0
"""More than any operation of a group that was given up may take until its time limit."""


class AttemptFailedError(Exception):
    """A server failed; the rest gets the weights in another attempt."""


class Carrier(Protocol):
    """How buckets get from rank 0 to the servers."""

    def prepare(self, opened: dict[str, Any], source: RolloutSource) -> None:
        """Get ready for the servers that ``WeightService.begin`` has named."""
        ...

    def send(self, bucket: Bucket, source: RolloutSource) -> Callable[[], None]:
        """Start to send a bucket; what is returned waits until all servers have loaded it."""
        ...

    def give_up(self) -> None:
        """Leave what a failed attempt holds open."""
        ...

    def close(self) -> None:
        """End it on this side; the collector ends it on the servers'."""
        ...


def check(answer: dict[str, Any]) -> None:
    """Raise what a call of ``WeightService`` reports.

    Raises:
        AttemptFailedError: A server failed.
    """
    if answer["failed"] is not None:
        raise AttemptFailedError(answer["failed"])


@contextmanager
def handed_over() -> Iterator[None]:
    """Tell what fails on rank 0's own side from defects: all ranks must hear of it.

    Raises:
        RolloutError: A port, shared memory, a file or the group cannot be used.
    """
    try:
        yield
    except RolloutError:
        raise
    except (OSError, RuntimeError) as error:
        raise RolloutError(
            f"rank 0 cannot hand over the weights ({error}); free shared memory (/dev/shm), ports "
            "or disk, lower rollout.weight_sync.bucket_mb, or change rollout.weight_sync.method; "
            "then continue with resume=true"
        ) from error


class BroadcastCarrier:
    """Through a collective group; it stays as long as its members do."""

    def __init__(self, config: WeightSyncConfig, device: torch.device) -> None:
        """Nothing is opened before the first sync.

        Args:
            config: The section.
            device: Where the buckets are.
        """
        self._config = config
        self._backend = choose_backend(config.backend, device)
        self._group: WeightGroup | None = None
        self._stuck: list[Future[None]] = []

    def prepare(self, opened: dict[str, Any], source: RolloutSource) -> None:
        """Form a group, unless the servers still share the last one."""
        if opened["share_group"] and self._group is not None:
            return
        self.give_up()
        address = rank_zero_address(opened["addresses"], self._config.master_address)
        self._group = group = WeightGroup(address, self._backend, self._config.timeout_s)
        joined = source.call_weights(
            "join",
            group_name=group.name,
            master_address=group.address,
            master_port=group.port,
            backend=self._backend,
        )
        formed = group.form(1 + sum(opened["num_ranks"]))
        _await_both(joined, formed, "form a group", self._config.timeout_s)

    def send(self, bucket: Bucket, source: RolloutSource) -> Callable[[], None]:
        """Have the servers receive what the group broadcasts."""
        assert self._group is not None, "prepare comes first"
        received = source.call_weights(
            "receive",
            names=list(bucket.shapes),
            dtypes=[bucket.dtype_name] * len(bucket.shapes),
            shapes=[list(shape) for shape in bucket.shapes.values()],
            is_last=bucket.is_last,
        )
        sent = self._group.broadcast(bucket.flat)
        return functools.partial(
            _await_both, received, sent, "send the weights", self._config.timeout_s
        )

    def give_up(self) -> None:
        """Close the group; an operation that is stuck in it ends later."""
        group, self._group = self._group, None
        if group is not None and (stuck := group.close()) is not None:
            self._stuck.append(stuck)

    def close(self) -> None:
        """Close the group, and wait for operations that are stuck."""
        self.give_up()
        # A thread inside a collective at the end of the interpreter would abort the process.
        wait(self._stuck, _LAST_WAIT_S)


class MemoryCarrier:
    """Through memory that servers on the same node map."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for buckets on ``device``."""
        self._num_ranks: list[int] = []
        if device.type == "cpu":
            start_manager()

    def prepare(self, opened: dict[str, Any], source: RolloutSource) -> None:
        """Remember how many processes open each bucket."""
        self._num_ranks = opened["num_ranks"]

    def send(self, bucket: Bucket, source: RolloutSource) -> Callable[[], None]:
        """Describe the bucket to every rank of every server."""
        payloads = [
            [shared_memory_payload(bucket.tensors()) for _ in range(num_ranks)]
            for num_ranks in self._num_ranks
        ]
        taken = source.call_weights("take", payloads=payloads, is_last=bucket.is_last)
        return functools.partial(_await_taken, taken, bucket)

    def give_up(self) -> None:
        """Nothing is open."""

    def close(self) -> None:
        """Nothing is open."""


def _await_taken(taken: Callable[[], Any], bucket: Bucket) -> None:
    """Wait until a bucket is loaded; until then its memory must stay, so it is held here."""
    check(taken())
    del bucket


def _await_both(servers: Callable[[], Any], own: Future[None], what: str, limit_s: float) -> None:
    """Wait for an operation of servers and of rank 0.

    Raises:
        AttemptFailedError: A server failed; if rank 0 did too, the message has its reason: who was
            first is not known.
        RolloutError: Rank 0 alone failed.
    """
    try:
        check(servers())
    except AttemptFailedError as failure:
        error = own.exception() if own.done() else None
        if error is None:
            raise
        raise AttemptFailedError(f"{failure} (rank 0 could not {what}: {error})") from error
    try:
        own.result(limit_s)
    except (RuntimeError, TimeoutError) as error:
        raise RolloutError(
            f"the servers did their part but rank 0 could not {what} ({error}); check "
            "rollout.weight_sync.backend, or set rollout.weight_sync.method: disk"
        ) from error
