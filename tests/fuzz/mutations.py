"""Seeded damage: to the bytes of a file, to a JSON value, to what stands at one of its places."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from random import Random

DEEP = 100_000
"""Brackets of a value that no parser may recurse into."""
DIGITS = "7" * 5000
"""Digits of a number beyond what Python reads."""

OTHER_FORMATS = {
    "npy": b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }\n" * 2,
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07nothing\x94.",
    "zip": b"PK\x03\x04\x14\x00\x00\x00\x00\x00" + bytes(40),
    "parquet": b"PAR1" + bytes(20) + b"\x08\x00\x00\x00PAR1",
    "png": b"\x89PNG\r\n\x1a\n" + bytes(30),
    "gzip": b"\x1f\x8b\x08\x00" + bytes(30),
    "utf16": "name: x\n".encode("utf-16"),
}
"""What may stand under a known name instead of its own format."""

POISONS: tuple[Any, ...] = (
    *(None, True, "text", "", "ünï\x00\x07", 0, -1, 1.5, float("nan"), float("inf"), 10**30),
    *(2**31, 2**63, -(2**63) - 1, 1e300, [], {}, [[]], {"a": {"b": [1, None]}}, ["x"], [None]),
    "\ud800",
)
"""Values of every JSON type, and of sizes that few places can hold."""


def bytes_damages() -> tuple[str, ...]:
    """Return the names of what ``damage_bytes`` does."""
    small = ("empty", "cut", "flip", "flip_many", "random", "nul", "not_utf8", "deep", "digits")
    places = ("directory", "symlink_loop", "gone")
    return (*small, *places, *OTHER_FORMATS)


def damage_bytes(path: Path, how: str, rng: Random) -> bool:
    """Damage a file; return whether no reader may take it for an intact one."""
    content = path.read_bytes()
    if how in ("directory", "symlink_loop", "gone"):
        path.unlink()
        if how == "directory":
            path.mkdir()
        elif how == "symlink_loop":
            path.symlink_to(path.name)
        return True
    if how in OTHER_FORMATS:
        path.write_bytes(OTHER_FORMATS[how])
        return True
    middle = rng.randrange(max(1, len(content)))
    changed = bytearray(content)
    for _ in range({"flip": 1, "flip_many": 20}.get(how, 0)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    path.write_bytes(
        {
            "empty": b"",
            "cut": content[:middle],
            "random": rng.randbytes(max(16, min(len(content), 4096))),
            "nul": content[:middle] + bytes(8) + content[middle:],
            "not_utf8": content[:middle] + b"\xff\xfe\xc0" + content[middle:],
            "deep": b"[" * DEEP,
            "digits": DIGITS.encode() + b"\n",
        }.get(how, bytes(changed))
    )
    return how in ("random", "deep")


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where each value within a JSON value stands, its own place first."""
    yield place
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_in(each, (*place, key))


def value_at(value: Any, place: tuple[Any, ...]) -> Any:
    """Return what stands at a place."""
    for key in place:
        value = value[key]
    return value


def put(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return the value with something else at a place."""
    if not place:
        return new
    value_at(value, place[:-1])[place[-1]] = new
    return value


def is_other_type(old: Any, new: Any) -> bool:
    """Return whether no reader of ``old`` may take ``new``: another type, or no finite number."""
    if isinstance(old, bool) or isinstance(new, bool):
        return type(old) is not type(new)
    if isinstance(old, int | float) and isinstance(new, int | float):
        return isinstance(new, float) and (new != new or new in (float("inf"), -float("inf")))
    return type(old) is not type(new)


def to_json(value: Any) -> str:
    """Return a JSON text, which may hold NaN, huge integers and halves of surrogate pairs."""
    return json.dumps(value)


def replace_tree(source: Path, target: Path) -> Path:
    """Copy a file or directory, so that it may be damaged."""
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    return target
