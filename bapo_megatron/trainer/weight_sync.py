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

    Only the newest version stays on disk, because a server that restarts loads it again.
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
            if self._current is not None:
                shutil.rmtree(self._current)
        self._current = target
        barrier(policy.groups)

    def close(self) -> None:
        """Remove what is left on disk; rank 0 only."""
        shutil.rmtree(self._root, ignore_errors=True)
