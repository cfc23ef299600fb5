"""What a checkpoint holds of the rollout, as the bytes of its file."""

import tempfile
from dataclasses import replace
from pathlib import Path

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.stream import MixturePosition
from bapo_megatron.rollout.saved import (
    RolloutState,
    SavedRollout,
    read_saved,
    settings_of,
    write_saved,
)
from bapo_megatron.types import RolloutStats

AT_START = RolloutState(
    prompts=MixturePosition(()),
    generation_s=0.0,
    counted=RolloutStats(environment_errors={}),
    sampled_version=None,
    settings=settings_of(RolloutConfig()),
)
"""The state of a collector that has drawn nothing, for buffers without one."""


_MEMORY = "/dev/shm"
"""Where a flush to the disk takes no time."""


def without_clock(saved: SavedRollout) -> bytes:
    """All of the file that repeats."""
    return file_of(replace(saved, about=replace(saved.about, generation_s=0.0)))


def file_of(saved: SavedRollout) -> bytes:
    with tempfile.TemporaryDirectory(dir=_MEMORY) as directory:
        path = Path(directory) / "rollout.parquet"
        write_saved(path, saved)
        return path.read_bytes()


def read_file(content: bytes) -> SavedRollout:
    with tempfile.TemporaryDirectory(dir=_MEMORY) as directory:
        path = Path(directory) / "rollout.parquet"
        path.write_bytes(content)
        return read_saved(path)
