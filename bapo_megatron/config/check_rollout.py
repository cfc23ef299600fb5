"""Rules about how engines get weights; see ``check``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from bapo_megatron.config.load import ConfigError

if TYPE_CHECKING:
    from bapo_megatron.config.megatron import ParallelConfig
    from bapo_megatron.config.rollout import RolloutConfig


def check_weight_sync(rollout: RolloutConfig, parallel: ParallelConfig) -> None:
    """The trainer can push weights, and its ranks wait long enough for it."""
    sync, patience_s = rollout.weight_sync, rollout.health.patience_s
    if sync.method == "broadcast" and sync.backend == "nccl":
        import torch  # takes seconds

        if not torch.cuda.is_available():
            raise ConfigError(
                "rollout.weight_sync.backend: must be auto or gloo where rank 0 has no GPU, got "
                "nccl; set rollout.weight_sync.backend=auto"
            )
    if patience_s >= parallel.timeout_s:
        raise ConfigError(
            "rollout.health.patience_s: must be below parallel.timeout_s = "
            f"{parallel.timeout_s:g}, got {patience_s:g}: the other ranks wait no longer while "
            "rank 0 looks for a server that takes weights; lower it, or raise parallel.timeout_s"
        )


def refuse_twice(key: str, names: tuple[str, ...] | list[str]) -> None:
    """No name occurs twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(f"{key}: must differ, got '{name}' {count} times; keep or rename one")
