"""New weights to the servers, through the disk."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from bapo_megatron.distributed import barrier

if TYPE_CHECKING:
    from pathlib import Path

    from bapo_megatron.policy.megatron_policy import MegatronPolicy
    from bapo_megatron.rollout.base import RolloutSource


class DiskWeightSync:
    """Exports the policy as a Hugging Face directory and has every server load it.

    Only the newest version stays on disk.
    """

    def __init__(self, run_dir: Path) -> None:
        """Keep the exported versions under ``<run_dir>/weights``."""
        self._root = run_dir / "weights"
        self._current: Path | None = None

    def push(self, policy: MegatronPolicy, source: RolloutSource | None) -> None:
        """Publish the policy's weights as version ``policy.num_updates``.

        A collective over all ranks; ``source`` is given on rank 0 only.
        """
        version = policy.num_updates
        target = self._root / f"version_{version:08d}"
        if target == self._current:
            return
        policy.export_hf(target)
        if source is not None:
            source.sync_weights(target, version)
            for earlier in self._root.iterdir():
                if earlier != target:
                    shutil.rmtree(earlier)
        self._current = target
        barrier(policy.groups)

    def close(self) -> None:
        """Remove what is left on disk; rank 0 only."""
        shutil.rmtree(self._root, ignore_errors=True)
