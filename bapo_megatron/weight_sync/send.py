"""A push of new weights, as the trainer's ranks see it.

``receive`` in the collector chooses the servers, calls them and takes out those that fail; rank 0
gathers the weights and hands them over; the other ranks help it to gather.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bapo_megatron.config.rollout import WeightSyncConfig
from bapo_megatron.errors import RolloutError
from bapo_megatron.policy.megatron_policy import MegatronPolicy
from bapo_megatron.runtime.calls import Caller
from bapo_megatron.runtime.distributed import broadcast_bytes, fail_together
from bapo_megatron.weight_sync import messages
from bapo_megatron.weight_sync.carriers import (
    AttemptFailedError,
    BroadcastCarrier,
    Carrier,
    MemoryCarrier,
    WeightBuckets,
    check,
    handed_over,
)
from bapo_megatron.weight_sync.verify import Scorer, trainer_logprobs

_LOG = logging.getLogger(__name__)
_BYTES_PER_MB = 10**6


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The cost of one sync."""

    version: int
    num_bytes: int
    """Size of the weights that each server got, once."""
    push_s: float
    """Time from the first call to the last."""
    pause_s: float
    """Part of it for which generation stood still."""
    difference: float | None = None
    """Largest mean difference of a server's log-probs to the trainer's; None: none was compared."""


def sync_metrics(reports: Sequence[SyncReport]) -> dict[str, float]:
    """Return one step's ``weight_sync/…`` metrics (docs/metrics.md); empty without a push."""
    if not reports:
        return {}
    values = {
        "weight_sync/pushes": float(len(reports)),
        "weight_sync/bytes": float(sum(report.num_bytes for report in reports)),
        "weight_sync/push_s": math.fsum(report.push_s for report in reports),
        "weight_sync/pause_s": math.fsum(report.pause_s for report in reports),
    }
    differences = [report.difference for report in reports if report.difference is not None]
    if differences:
        values["weight_sync/logprob_difference"] = max(differences)
    return values


class WeightSync:
    """Keeps the servers' weights equal to the policy's."""

    def __init__(
        self, config: WeightSyncConfig, run_dir: Path, score: Scorer, device: torch.device
    ) -> None:
        """Choose the method; nothing is started.

        ``method: disk`` keeps the newest version under ``<run_dir>/weights``. ``score`` scores what
        ``verify`` compares, and ``device`` is where the policy is.
        """
        self._config = config
        self._score = score
        self._root = run_dir / "weights"
        self._carrier: Carrier | None = None
        if config.method == "broadcast":
            self._carrier = BroadcastCarrier(config, device)
        elif config.method == "tensor":
            self._carrier = MemoryCarrier(device)
        self._version: int | None = None

    def push(
        self, policy: MegatronPolicy, collector: Caller | None, *, again: bool = False
    ) -> SyncReport | None:
        """Give all servers the policy's weights as version ``policy.num_updates``.

        A collective over all ranks; rank 0 alone has the ``collector``, which answers ``messages``.
        With ``again`` a version is pushed that was pushed before: servers have come that lack it.
        Returns what it cost; None where there was nothing to do, and on all ranks but the first.

        Raises:
            RolloutError: No server took the weights, or rank 0 could not hand them over; on all
                ranks.
            OSError: ``method: disk`` cannot write; on all ranks.
        """
        assert (collector is not None) == (policy.groups.rank == 0), "rank 0 alone calls"
        version = policy.num_updates
        if version == self._version and not again:
            return None
        started_s = time.monotonic()
        difference, pause_s = None, 0.0
        probe: bytes | None = None
        verifies = self._config.verify != "none"
        with fail_together(policy.groups, RolloutError):
            num_bytes = self._hand_over(policy, collector, version)
            if collector is not None and verifies:
                probe = json.dumps(collector.start(messages.PROBE, None)()).encode()
        if verifies:
            with fail_together(policy.groups, RolloutError):
                difference = self._verify(policy, collector, probe)
        with fail_together(policy.groups, RolloutError):
            if collector is not None:
                pause_s = collector.start(messages.RESUME, None)()
        self._version = version
        if collector is None:
            return None
        push_s = time.monotonic() - started_s
        return SyncReport(version, num_bytes, push_s, pause_s, difference)

    def close(self) -> None:
        """Leave the group, and remove what is left on disk; rank 0 only."""
        if self._carrier is not None:
            self._carrier.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def _hand_over(self, policy: MegatronPolicy, collector: Caller | None, version: int) -> int:
        """Give the weights to the servers; return their bytes on rank 0."""
        target = self._root / f"version_{version:08d}"
        if self._carrier is None:
            if version != self._version:
                policy.export_hf(target, durable=False)
            return 0 if collector is None else self._load(target, collector, version)
        policy.finish_weights()
        buckets = WeightBuckets(policy, self._config.bucket_mb * _BYTES_PER_MB)
        if collector is None:
            buckets.follow(target)
            return 0
        try:
            return self._carry(buckets, target, collector, version)
        finally:
            buckets.end()
            shutil.rmtree(self._root, ignore_errors=True)
            if self._config.method == "tensor" and policy.groups.device.type == "cuda":
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
                torch.cuda.empty_cache()  # servers on the same GPU take their cache next

    def _carry(self, buckets: WeightBuckets, target: Path, collector: Caller, version: int) -> int:
        """Send the buckets; after a failure once by disk, which needs no group, then again."""
        assert self._carrier is not None, "there are buckets"
        is_first = True
        while True:
            try:
                return _attempt(buckets, collector, version, self._carrier)
            except AttemptFailedError as failure:
                how = "by disk" if is_first else "again"
                _LOG.warning(
                    "weights version %d: %s; the others get them %s", version, failure, how
                )
                self._carrier.give_up()
            if is_first:
                is_first = False
                try:
                    buckets.export(target)
                    return self._load(target, collector, version)
                except (RolloutError, OSError) as error:
                    _LOG.warning("weights version %d by disk: %s; trying without", version, error)

    def _load(self, target: Path, collector: Caller, version: int) -> int:
        """Have the servers load a directory; only the newest version stays on disk."""
        with handed_over():
            request = messages.Load(model_dir=target.absolute(), version=version)
            collector.start(messages.LOAD, request)()
            for earlier in self._root.iterdir():
                if earlier != target:
                    shutil.rmtree(earlier)
            return sum(file.stat().st_size for file in target.glob("*.safetensors"))

    def _verify(
        self, policy: MegatronPolicy, collector: Caller | None, probe: bytes | None
    ) -> float | None:
        """Compare log-probs of the probe, known to rank 0; it gets the largest difference."""
        shared = json.loads(broadcast_bytes(probe, policy.groups))
        if not shared:  # no server is new
            return None
        expected = trainer_logprobs(shared, self._score)
        if collector is None:
            return None
        assert expected is not None, "complete on rank 0"
        return collector.start(messages.VERIFY, expected)()


def _attempt(buckets: WeightBuckets, collector: Caller, version: int, carrier: Carrier) -> int:
    """Send all buckets; gather the next while the servers load the last. Returns their bytes."""
    opened = collector.start(messages.BEGIN, version)()
    with handed_over():
        carrier.prepare(opened, collector)
    num_bytes = 0
    await_loaded: Callable[[], None] | None = None
    for number in range(len(buckets)):
        bucket = buckets.gather(number)
        if await_loaded is not None:
            await_loaded()
        with handed_over():
            await_loaded = carrier.send(bucket, collector)
        num_bytes += bucket.flat.numel()
    assert await_loaded is not None, "a model has parameters"
    await_loaded()
    check(collector.start(messages.FINISH, None)())
    return num_bytes
