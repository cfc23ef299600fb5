"""What may happen to a checkpoint: a full disk, damage, and what an attacker would craft."""

import os
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bapo_megatron.policy.checkpoint_files import encode_state, read_state
from bapo_megatron.policy.checkpoint_shards import torch_bytes


@contextmanager
def limited(limit_bytes: int) -> Iterator[None]:
    """As on a full disk: no file of this process may grow beyond a limit."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


class Crafted:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def _mark(directory: Path) -> Crafted:
    """Makes a directory where it is unpickled."""
    return Crafted(os.mkdir, str(directory / "executed"))


def flip_bit(path: Path, position: int | None = None, num_bytes: int = 1) -> None:
    """Change a bit of each of some bytes: from a position on, or the one in the middle."""
    content = bytearray(path.read_bytes())
    start = len(content) // 2 if position is None else position
    for place in range(start, start + num_bytes):
        content[place] ^= 1
    path.write_bytes(content)


def flip_weight(directory: Path, *, whole_record: bool = False) -> None:
    """Change one bit of one weight, far from the ends of its record, or all of the record."""
    places = pickle.loads((directory / ".metadata").read_bytes()).storage_data
    key = "decoder.layers.mlp.linear_fc2.weight"
    place = next(place for index, place in places.items() if index.fqn == key)
    middle = place.offset + place.length // 2
    start, num_bytes = (place.offset, place.length) if whole_record else (middle, 1)
    flip_bit(directory / place.relative_path, start, num_bytes)


def forget_checksums(directory: Path) -> None:
    """As another tool or an attacker leaves it."""
    (directory / "checksums.json").unlink()
    if (directory / "state.json").exists():
        state = read_state(directory)
        names = state.file_bytes.keys() - {"checksums.json"}
        sizes = {name: (directory / name).stat().st_size for name in names}
        (directory / "state.json").write_text(encode_state(replace(state, file_bytes=sizes)))


def edit_metadata(directory: Path, edit: Callable[[Any], Any]) -> None:
    """Change the description of the shards, without checksums."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))
    forget_checksums(directory)


def craft_metadata(directory: Path) -> None:
    """Run code when the description is unpickled."""
    crafted = _mark(directory)
    edit_metadata(directory, lambda metadata: setattr(metadata, "planner_data", crafted))


def _craft_object(directory: Path) -> None:
    """In place of the objects, whose place is described anew."""
    crafted = torch_bytes([_mark(directory)])

    def replace_objects(metadata: Any) -> None:
        for index, place in metadata.storage_data.items():
            if "_extra_state" in index.fqn:
                part = directory / place.relative_path
                place.offset, place.length = part.stat().st_size, len(crafted)
                part.write_bytes(part.read_bytes() + crafted)

    edit_metadata(directory, replace_objects)


def _craft_file(directory: Path, name: str) -> None:
    torch.save({"x": _mark(directory)}, directory / name)
    forget_checksums(directory)


def _leave_directory(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = f"../step_1/{place.relative_path}"


def _zeros(content: bytes) -> bytes:
    return bytes(len(content))


def _with(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new)


FILES: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "truncated": ("__1_0.distcp", lambda content: content[:-1], "has"),
    "scrambled shards": ("__1_0.distcp", _zeros, "has changed"),
    "missing shards": ("__1_0.distcp", None, "is missing"),
    "scrambled rank file": ("rng_1.pt", _zeros, "has changed"),
    "missing rank file": ("rng_1.pt", None, "is missing"),
    "scrambled metadata": (".metadata", _zeros, "has changed"),
    "missing metadata": (".metadata", None, "is missing"),
    "scrambled description": ("metadata.json", _zeros, "has changed"),
    "unreadable checksums": ("checksums.json", lambda c: b"[" * len(c), "cannot be read"),
    "shards without checksums": ("checksums.json", _with(b"__1_0.", b"__1_9."), "has no checksum"),
    "no state": ("state.json", None, "is missing"),
    "unreadable state": ("state.json", lambda _: b"\xff", "cannot be read"),
    "state of nothing": ("state.json", lambda _: b"[]", "cannot be read"),
    "state without a field": (
        "state.json",
        _with(b'"num_', b'"'),
        r"cannot be read \('num_updates'",
    ),
    "another number": ("state.json", _with(b'_updates": ', b'_updates": 1'), "has changed"),
    "earlier format": ("state.json", _with(b'"format": 7', b'"format": 6'), "format 6"),
}
"""By name: a file, its new content (None: it is gone), and what the error says of it."""

DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped bit": (flip_weight, "_0.distcp has changed"),
    "crafted metadata": (craft_metadata, ".metadata names posix.mkdir"),
    "crafted object": (_craft_object, "might run code"),
    "crafted common part": (lambda d: _craft_file(d, "common.pt"), "common.pt: not part"),
    "crafted rank file": (lambda d: _craft_file(d, "rng_0.pt"), "rng_0.pt cannot be read"),
    "shards outside": (lambda d: edit_metadata(d, _leave_directory), r"names '\.\./step_1/__"),
}
"""By name: what is done to a directory of two ranks, and what the error names."""


def damage(name: str, directory: Path) -> None:
    """Do what DAMAGES or FILES say."""
    if name in DAMAGES:
        DAMAGES[name][0](directory)
        return
    file, change, _ = FILES[name]
    content = (directory / file).read_bytes()
    (directory / file).unlink()
    if change is not None:
        assert change(content) != content, name
        (directory / file).write_bytes(change(content))


WORDS = {name: words for name, (_, words) in DAMAGES.items()} | {
    name: f"{file}.*{words}" for name, (file, _, words) in FILES.items()
}
"""By name of a damage: what an error must match."""
