"""New weights to the servers: which way they go, and what every rank does meanwhile.

``rollout.weight_service`` in the collector chooses the servers, calls them and takes out those that
fail; rank 0 gathers the weights and hands them over; the other ranks help it to gather.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bapo_megatron.distributed import broadcast_bytes, fail_together
from bapo_megatron.errors import RolloutError
from bapo_megatron.trainer.weight_buckets import WeightBuckets
from bapo_megatron.trainer.weight_carriers import (
    AttemptFailedError,
    BroadcastCarrier,
    MemoryCarrier,
    check,
    handed_over,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from bapo_megatron.config.rollout import WeightSyncConfig
    from bapo_megatron.policy.megatron_policy import MegatronPolicy
    from bapo_megatron.rollout.base import RolloutSource
    from bapo_megatron.trainer.weight_carriers import Carrier
    from bapo_megatron.trainer.weight_probe import WeightProbe

_LOG = logging.getLogger(__name__)
_BYTES_PER_MB = 10**6


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one sync cost."""

    version: int
    num_bytes: int
    """Of the weights that each server got, once."""
    push_s: float
    """Time from the first call to the last."""
    pause_s: float
    """Time in it for which generation stood still."""
    difference: float | None = None
    """Largest mean difference of a server's log-probs to the trainer's; None: none was compared."""


def sync_metrics(reports: Sequence[SyncReport]) -> dict[str, float]:
    """The ``weight_sync/…`` of one step, by the names of docs/algorithm.md; none without a push."""
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
    """Keeps the servers' weights those of the policy."""

    def __init__(
        self, config: WeightSyncConfig, run_dir: Path, probe: WeightProbe, device: torch.device
    ) -> None:
        """Choose the method; nothing is started.

        Args:
            config: The section.
            run_dir: ``method: disk`` keeps the newest version under ``<run_dir>/weights``.
            probe: Computes what ``verify`` compares.
            device: Where the policy is.
        """
        self._config = config
        self._probe = probe
        self._root = run_dir / "weights"
        self._carrier: Carrier | None = None
        if config.method == "broadcast":
            self._carrier = BroadcastCarrier(config, device)
        elif config.method == "tensor":
            self._carrier = MemoryCarrier(device)
        self._version: int | None = None

    def push(
        self, policy: MegatronPolicy, source: RolloutSource | None, *, again: bool = False
    ) -> SyncReport | None:
        """Give all servers the policy's weights as version ``policy.num_updates``.

        A collective over all ranks; ``source`` is given on rank 0 only.

        Args:
            policy: The weights.
            source: Reaches the servers.
            again: Also if they got this version before: servers have come that lack it.

        Returns:
            What it cost; None where there was nothing to do, and on all ranks but the first.

        Raises:
            RolloutError: No server took the weights, or rank 0 could not hand them over; on all
                ranks.
            OSError: ``method: disk`` cannot write; on all ranks.
        """
        version = policy.num_updates
        if version == self._version and not again:
            return None
        started_s = time.monotonic()
        num_bytes, difference, pause_s = 0, None, 0.0
        sequences: list[list[int]] | None = None
        with fail_together(policy.groups, RolloutError):
            num_bytes = self._hand_over(policy, source, version)
            if source is not None and self._config.verify == "logprobs":
                sequences = source.call_weights("probe")()
        if self._config.verify == "logprobs":
            with fail_together(policy.groups, RolloutError):
                difference = self._verify(policy, source, sequences)
        with fail_together(policy.groups, RolloutError):
            if source is not None:
                pause_s = source.call_weights("resume")()["pause_s"]
        self._version = version
        if source is None:
            return None
        push_s = time.monotonic() - started_s
        return SyncReport(version, num_bytes, push_s, pause_s, difference)

    def close(self) -> None:
        """Leave the group, and remove what is left on disk; rank 0 only."""
        if self._carrier is not None:
            self._carrier.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def _hand_over(self, policy: MegatronPolicy, source: RolloutSource | None, version: int) -> int:
        """Give the weights to the servers; returns their bytes on rank 0."""
        if self._carrier is None:
            return self._push_files(policy, source, version)
        policy.finish_weights()
        buckets = WeightBuckets(policy, self._config.bucket_mb * _BYTES_PER_MB)
        if source is None:
            buckets.follow()
            return 0
        try:
            return _push_buckets(buckets, source, version, self._carrier)
        finally:
            buckets.end()

    def _push_files(
        self, policy: MegatronPolicy, source: RolloutSource | None, version: int
    ) -> int:
        """Only the newest version stays on disk."""
        target = self._root / f"version_{version:08d}"
        if version != self._version:
            policy.export_hf(target)
        if source is None:
            return 0
        with handed_over():
            source.call_weights("load", model_dir=str(target.absolute()), version=version)()
            for earlier in self._root.iterdir():
                if earlier != target:
                    shutil.rmtree(earlier)
            return sum(file.stat().st_size for file in target.glob("*.safetensors"))

    def _verify(
        self,
        policy: MegatronPolicy,
        source: RolloutSource | None,
        sequences: list[list[int]] | None,
    ) -> float | None:
        """Compare log-probs of the probe, known to rank 0; it gets the largest difference."""
        known = None if sequences is None else json.dumps(sequences).encode()
        expected = self._probe.logprobs(json.loads(broadcast_bytes(known, policy.groups)))
        if source is None:
            return None
        found: dict[str, float | None] = source.call_weights("verify", expected=expected)()
        return found["difference"]


def _push_buckets(
    buckets: WeightBuckets, source: RolloutSource, version: int, carrier: Carrier
) -> int:
    while True:
        try:
            return _attempt(buckets, source, version, carrier)
        except AttemptFailedError as failure:
            _LOG.warning(
                "weights version %d: %s; trying again without what failed", version, failure
            )
            carrier.give_up()


def _attempt(buckets: WeightBuckets, source: RolloutSource, version: int, carrier: Carrier) -> int:
    """Send all buckets; the next one is gathered while the servers load the last. Returns bytes."""
    opened = source.call_weights("begin", version=version)()
    with handed_over():
        carrier.prepare(opened, source)
    num_bytes = 0
    await_loaded: Callable[[], None] | None = None
    for number in range(len(buckets)):
        bucket = buckets.gather(number)
        if await_loaded is not None:
            await_loaded()
        with handed_over():
            await_loaded = carrier.send(bucket, source)
        num_bytes += bucket.flat.numel()
    assert await_loaded is not None, "a model has parameters"
    await_loaded()
    check(source.call_weights("finish")())
    return num_bytes
