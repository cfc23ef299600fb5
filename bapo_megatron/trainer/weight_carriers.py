"""How buckets of weights get from rank 0 to the servers."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, Protocol

from bapo_megatron.rollout.base import RolloutError
from bapo_megatron.trainer.weight_group import WeightGroup, choose_backend, rank_zero_address
from bapo_megatron.trainer.weight_memory import shared_memory_payload, start_manager

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import torch

    from bapo_megatron.config.rollout import WeightSyncConfig
    from bapo_megatron.rollout.base import RolloutSource
    from bapo_megatron.trainer.weight_buckets import Bucket

_LOG = logging.getLogger(__name__)
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

    def close(self, source: RolloutSource) -> None:
        """End it, on the servers too."""
        ...


def check(answer: dict[str, Any]) -> None:
    """Raise what a call of ``WeightService`` reports.

    Raises:
        AttemptFailedError: A server failed.
    """
    if answer["failed"] is not None:
        raise AttemptFailedError(answer["failed"])


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
        check(joined())
        _result(formed, self._config.timeout_s)

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

        def await_loaded() -> None:
            check(received())
            _result(sent, self._config.timeout_s)

        return await_loaded

    def give_up(self) -> None:
        """Close the group; an operation that is stuck in it ends later."""
        group, self._group = self._group, None
        if group is not None and (stuck := group.close()) is not None:
            self._stuck.append(stuck)

    def close(self, source: RolloutSource) -> None:
        """End the group on both sides."""
        if self._group is not None:
            try:
                source.call_weights("leave")()
            except RolloutError as error:
                _LOG.info("the servers keep the group for weights: %s", error)
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

    def close(self, source: RolloutSource) -> None:
        """Nothing is open."""


def _await_taken(taken: Callable[[], Any], bucket: Bucket) -> None:
    """Wait until a bucket is loaded; until then its memory must stay, so it is held here."""
    check(taken())
    del bucket


def _result(operation: Future[None], limit_s: float) -> None:
    """Wait for an operation whose other side has succeeded.

    Raises:
        RolloutError: It failed here all the same.
    """
    try:
        operation.result(limit_s)
    except (RuntimeError, TimeoutError) as error:
        raise RolloutError(
            f"the servers have the weights but rank 0 could not send them ({error}); check "
            "rollout.weight_sync.backend, or set rollout.weight_sync.method: disk"
        ) from error
