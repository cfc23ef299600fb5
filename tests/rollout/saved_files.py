"""What a checkpoint holds of the rollout, as the bytes of its file."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_megatron.rollout.saved import read_saved, write_saved

if TYPE_CHECKING:
    from bapo_megatron.rollout.saved import SavedRollout


def without_clock(saved: SavedRollout) -> bytes:
    """All of the file that repeats."""
    return file_of(replace(saved, about=saved.about | {"generation_s": 0.0}))


def file_of(saved: SavedRollout) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rollout.parquet"
        write_saved(path, saved)
        return path.read_bytes()


def read_file(content: bytes) -> SavedRollout:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rollout.parquet"
        path.write_bytes(content)
        return read_saved(path)
