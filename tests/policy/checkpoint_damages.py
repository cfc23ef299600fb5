"""What may have happened to a checkpoint: damage, and what an attacker would craft."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import FileSystemReader

from bapo_megatron.policy.checkpoint_files import encode_state, read_state
from bapo_megatron.policy.checkpoint_shards import torch_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _truncate(directory: Path) -> None:
    part = directory / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])


def _scramble(part: Path) -> None:
    part.write_bytes(bytes(part.stat().st_size))


def _replace(path: Path, old: str, new: str) -> None:
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))


def flip(directory: Path, *, verified: bool = True, whole_record: bool = False) -> None:
    """Change one bit of one weight, far from the ends of its record, or the whole record."""
    metadata = FileSystemReader(directory).read_metadata()
    place = next(
        place
        for index, place in metadata.storage_data.items()
        if index.fqn == "decoder.layers.mlp.linear_fc2.weight"
    )
    part = directory / place.relative_path
    content = bytearray(part.read_bytes())
    middle = place.offset + place.length // 2
    start, end = (
        (place.offset, place.offset + place.length) if whole_record else (middle, middle + 1)
    )
    content[start:end] = bytes(byte ^ 1 for byte in content[start:end])
    part.write_bytes(content)
    if not verified:
        _forget_checksums(directory)


def _forget_checksums(directory: Path) -> None:
    """As another tool or an attacker leaves it."""
    (directory / "checksums.json").unlink()
    state = read_state(directory)
    names = state.file_bytes.keys() - {"checksums.json"}
    sizes = {name: (directory / name).stat().st_size for name in names}
    (directory / "state.json").write_text(encode_state(replace(state, file_bytes=sizes)))


class Crafted:
    """Makes a directory where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def _craft_metadata(directory: Path) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Crafted(directory / "executed")
    path.write_bytes(pickle.dumps(metadata))
    _forget_checksums(directory)


def _craft_object(directory: Path) -> None:
    """In place of the first object, whose place is described anew."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    crafted = torch_bytes([Crafted(directory / "executed")]).getvalue()
    for index, place in metadata.storage_data.items():
        if "_extra_state" in index.fqn:
            part = directory / place.relative_path
            place.offset, place.length = part.stat().st_size, len(crafted)
            part.write_bytes(part.read_bytes() + crafted)
    path.write_bytes(pickle.dumps(metadata))
    _forget_checksums(directory)


def _craft_file(path: Path) -> None:
    torch.save({"x": Crafted(path.parent / "executed")}, path)
    _forget_checksums(path.parent)


def _leave(directory: Path) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../step_1/{place.relative_path}"
    path.write_bytes(pickle.dumps(metadata))
    _forget_checksums(directory)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": _truncate,
    "flipped bit": flip,
    "unreadable checksums": lambda path: (path / "checksums.json").write_bytes(
        b"[" * (path / "checksums.json").stat().st_size
    ),
    "shards without checksums": lambda path: _replace(path / "checksums.json", "__1_0.", "__1_9."),
    "crafted metadata": _craft_metadata,
    "crafted object": _craft_object,
    "crafted common part": lambda path: _craft_file(path / "common.pt"),
    "crafted rank file": lambda path: _craft_file(path / "rng_0.pt"),
    "shards outside": _leave,
    "scrambled shards": lambda path: _scramble(path / "__1_0.distcp"),
    "scrambled description": lambda path: _scramble(path / "metadata.json"),
    "scrambled metadata": lambda path: _scramble(path / ".metadata"),
    "scrambled rank file": lambda path: _scramble(path / "rng_1.pt"),
    "missing shards": lambda path: (path / "__1_0.distcp").unlink(),
    "missing rank file": lambda path: (path / "rng_1.pt").unlink(),
    "missing metadata": lambda path: (path / ".metadata").unlink(),
    "no state": lambda path: (path / "state.json").unlink(),
    "unreadable state": lambda path: (path / "state.json").write_bytes(b"\xff\x00{"),
    "state of nothing": lambda path: (path / "state.json").write_text("[]"),
    "state without a field": lambda path: _replace(
        path / "state.json", '"num_updates"', '"updates"'
    ),
    "another number": lambda path: _replace(
        path / "state.json", '"num_updates": ', '"num_updates": 1'
    ),
    "earlier format": lambda path: _replace(path / "state.json", '"format": 6', '"format": 5'),
}
