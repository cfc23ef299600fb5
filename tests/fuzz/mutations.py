"""Seeded damage: to the bytes of a file, to a JSON value, to what stands at one of its places."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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


_PLACES: dict[str, Callable[[Path], Any]] = {
    "directory": lambda path: path.mkdir(),
    "symlink_loop": lambda path: path.symlink_to(path.name),
    "gone": lambda path: None,
}


def _flipped(content: bytes, rng: Random, times: int) -> bytes:
    changed = bytearray(content)
    for _ in range(times if content else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _with(content: bytes, rng: Random, extra: bytes) -> bytes:
    middle = rng.randrange(max(1, len(content)))
    return content[:middle] + extra + content[middle:]


_BYTES: dict[str, Callable[[bytes, Random], bytes]] = {
    "empty": lambda content, rng: b"",
    "cut": lambda content, rng: content[: rng.randrange(max(1, len(content)))],
    "flip": lambda content, rng: _flipped(content, rng, 1),
    "flip_many": lambda content, rng: _flipped(content, rng, 20),
    "random": lambda content, rng: rng.randbytes(max(16, min(len(content), 4096))),
    "nul": lambda content, rng: _with(content, rng, bytes(8)),
    "not_utf8": lambda content, rng: _with(content, rng, b"\xff\xfe\xc0"),
    "deep": lambda content, rng: b"[" * DEEP,
    "digits": lambda content, rng: DIGITS.encode() + b"\n",
}


def damaged(path: Path, rng: Random) -> bool:
    """Damage a file; return whether no reader may take it for an intact one."""
    how = pick(rng, (*_BYTES, *_PLACES, *OTHER_FORMATS))
    if how in _PLACES:
        path.unlink()
        _PLACES[how](path)
    elif how in OTHER_FORMATS:
        path.write_bytes(OTHER_FORMATS[how])
    else:
        path.write_bytes(_BYTES[how](path.read_bytes(), rng))
    return how not in _BYTES or how in ("random", "deep")


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where each value within a JSON value stands, its own place first."""
    yield place
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_in(inner, (*place, key))


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


def pick(rng: Random, choices: Any) -> Any:
    return rng.choice(list(choices))


def poisoned(value: Any, rng: Random, place: tuple[Any, ...]) -> tuple[Any, bool]:
    """Put another value at a place, or remove it; return whether it is of another type now."""
    if place and rng.random() < 0.15 and isinstance(value_at(value, place[:-1]), dict):
        del value_at(value, place[:-1])[place[-1]]
        return value, False
    old, new = value_at(value, place), pick(rng, POISONS)
    if place and isinstance(new, int | float) and rng.random() < 0.2:
        new = -new if new == new else new
    return put(value, place, new), is_other_type(old, new)


def json_damaged(path: Path, rng: Random, strict: Any = ()) -> tuple[str, bool]:
    """Poison a JSON file; return the field's name, and whether the file is certainly wrong now."""
    tree = json.loads(path.read_text())
    place = pick(rng, [place for place in places_in(tree) if place])
    tree, is_wrong = poisoned(tree, rng, place)
    path.write_text(json.dumps(tree))
    names = [key for key in place if isinstance(key, str)]
    return (names[-1] if names else ""), is_wrong and bool(names) and names[0] in strict


def damaged_somehow(path: Path, rng: Random, bytes_share: float) -> None:
    """Damage the bytes of a JSON file, or a value in it."""
    if rng.random() < bytes_share:
        damaged(path, rng)
    else:
        json_damaged(path, rng)


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file; ``change`` returns the new value, or None where it changed the old."""
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(change(tree) or tree))


def edit_line(path: Path, number: int, change: Callable[[Any], Any]) -> None:
    """Change the JSON value of one line, as ``edit_json`` does."""
    lines = path.read_text().splitlines()
    entry = json.loads(lines[number])
    lines[number] = json.dumps(change(entry) or entry)
    path.write_text("\n".join(lines) + "\n")


def with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """Return the table with another column in place of one, or after all."""
    if name not in table.column_names:
        return table.append_column(name, values)
    index = table.column_names.index(name)
    return table.set_column(index, pa.field(name, values.type), values)


def dates(path: Path, number: int, kind: pa.DataType) -> None:
    """Append a column of a date or duration to a Parquet file."""
    table = pq.read_table(path)
    column = pa.array([number] * len(table), pa.int64()).view(kind)
    pq.write_table(with_column(table, "when", column), path)


def copied(intact: Path, files: Path, *names: str) -> None:
    for name in names:
        if (intact / name).is_dir():
            shutil.copytree(intact / name, files / name)
        else:
            shutil.copy(intact / name, files / name)
