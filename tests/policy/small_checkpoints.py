"""Checkpoints of a few bytes, written as a run writes its own."""

from pathlib import Path
from typing import Any

from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.policy.checkpoint_files import (
    publish,
    remove_others,
    remove_unfinished,
    unfinished_directory,
    write_checksums,
)

FIELDS: dict[str, Any] = {
    "num_updates": 7,
    "layout": {"tensor": 1},
    "extra": {"a": [1, "ß"]},
}


def save_small(root: Path, step: int, **config: Any) -> Path:
    """Save a checkpoint whose content depends on its step; 99 checkpoints stay by default."""
    root.mkdir(parents=True, exist_ok=True)
    remove_unfinished(root)
    unfinished = unfinished_directory(root, step)
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"weights of step %d" % step)
    (unfinished / "rng_0.pt").write_bytes(b"random state of step %d" % step)
    write_checksums(unfinished, {})
    publish(root, step, FIELDS, ["__0_0.distcp", "rng_0.pt"])
    remove_others(root, step, CheckpointConfig(**{"keep_last": 99, **config}))
    return root / f"step_{step}"


def content_of(directory: Path) -> dict[str, bytes]:
    """The files of a checkpoint."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def left(root: Path) -> list[str]:
    """What lies under a directory of checkpoints."""
    return sorted(path.name for path in root.iterdir())
