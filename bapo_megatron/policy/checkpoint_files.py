"""The files of checkpoints: names, state.json, damage, publication, retention.

    <root>/step_<n>/    weights and optimizer (Megatron's torch_dist), state.json, checksums.json,
                        rng_<rank>.pt, rollout.parquet (what the rollout's source continues from)
    <root>/latest       name of the newest complete checkpoint
    <root>/best         the checkpoint with the best evaluation, metric and value, as JSON
    <root>/abandoned_<k>/step_<n>/    newer than the one that a run continued from

A checkpoint is written under a temporary name, flushed, and renamed; only then ``latest`` moves,
and then ``best`` if it is the best one. A kill at any moment leaves the previous checkpoint in
place; one of the same step that was being replaced keeps its ``replaced_directory`` name until the
next save puts it back. Saves remove only checkpoints of steps up to their own.
"""

import itertools
import json
import os
import pickle
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.errors import first_line
from bapo_megatron.runtime.calls import decode_json, shown_value
from bapo_megatron.runtime.files import (
    atomic_write_text,
    parse_json,
    publish_directory,
    read_regular,
    replaced_directory,
)

FORMAT = 7
LATEST_NAME = "latest"
BEST_NAME = "best"
STATE_NAME = "state.json"
CHECKSUMS_NAME = "checksums.json"
METADATA_NAME = ".metadata"
COMMON_NAME = "common.pt"
"""Where Megatron looks first for what all ranks share; a run writes no such file."""
ROLLOUT_NAME = "rollout.parquet"
STEP_PATTERN = re.compile(r"step_(0|[1-9][0-9]{0,17})")


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or of another model; the message says what to do."""


class DamagedError(CheckpointError):
    """A checkpoint file has changed, or holds what it must not; the message has no remedy."""


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn any error of reading a file into a ``DamagedError`` that names it."""
    try:
        yield
    except DamagedError:
        raise
    except FileNotFoundError as error:
        raise DamagedError(f"{Path(error.filename or name).name} is missing") from error
    except Exception as error:  # json, pickle and torch raise anything
        raise DamagedError(f"{name} cannot be read ({reason_of(error)})") from error


def reason_of(error: BaseException) -> str:
    """Return why a file cannot be read, in the operating system's words if it has any."""
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
        # torch's message suggests trusting the file.
        return "a pickle is damaged, or names what might run code"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return first_line(cause or error)


@contextmanager
def damage_of(directory: Path, remedy: str = "") -> Iterator[None]:
    """Add directory and remedy (``other_checkpoint``) to a ``DamagedError``."""
    try:
        yield
    except DamagedError as error:
        remedy = remedy or other_checkpoint(directory)
        raise CheckpointError(f"{directory}: damaged, {error}; {remedy}") from error


@dataclass(frozen=True, slots=True)
class Checksums:
    """Contents of checksums.json: XXH3 of 64 bits in hexadecimal digits."""

    files: dict[str, str]
    """Checksum of every small file; state.json and rollout.parquet have their own."""
    pieces: dict[str, dict[str, str]]
    """Checksum of each piece of a shard file, by its first byte; ``convert`` reads some."""


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Contents of state.json."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    """For ``calls.decode_json``: an unknown field comes from another version."""
    num_updates: int
    """Optimizer updates made; the schedule follows from it."""
    layout: dict[str, int]
    """See ``checkpoint.rng_layout``."""
    extra: dict[str, Any]
    """The caller's own state, plain JSON values."""
    file_bytes: dict[str, int]
    """Size of every other file of the checkpoint."""
    lora: dict[str, Any] | None = None
    """See ``lora.identity``; None: the checkpoint holds all weights of the model."""
    format: int = FORMAT
    checksum: str = ""
    """Checksum of the other fields, which ``encode_state`` fills in; '' before."""


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """Contents of ``best``."""

    checkpoint: str
    """Name of the directory beside it."""
    metric: str
    """``checkpoint.best`` of the run."""
    value: float

    @property
    def step(self) -> int:
        """Number of the checkpoint."""
        return int(self.checkpoint.removeprefix("step_"))


def step_directory(root: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint."""
    return root / f"step_{step}"


def unfinished_directory(root: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint while it is written or removed."""
    return root / f".step_{step}.tmp"


def find_checkpoint(root: Path, step: int) -> Path | None:
    """Find the checkpoint of a step; a kill may have left it under its other name."""
    directory = step_directory(root, step)
    return next((d for d in (directory, replaced_directory(directory)) if d.is_dir()), None)


def step_name(directory: Path) -> str:
    """Return the name of a checkpoint in ``latest``."""
    match = STEP_PATTERN.search(directory.name)
    assert match is not None, "a checkpoint of a run"
    return match[0]


def step_of(directory: Path) -> int:
    """Return the number of a checkpoint."""
    return int(step_name(directory).removeprefix("step_"))


def find_steps(root: Path) -> list[int]:
    """Return the steps of all checkpoints under ``root`` in order, complete or not."""
    paths = root.iterdir() if root.is_dir() else ()
    names = (path.name.removeprefix(".").removesuffix(".replaced.tmp") for path in paths)
    steps = {int(match[1]) for name in names if (match := STEP_PATTERN.fullmatch(name))}
    return sorted(step for step in steps if find_checkpoint(root, step) is not None)


def find_unfinished_steps(root: Path) -> list[int]:
    """Return the steps of checkpoints that are being written, or that a kill has left so."""
    names = (path.name.removeprefix(".").removesuffix(".tmp") for path in root.glob(".step_*.tmp"))
    return sorted(int(match[1]) for name in names if (match := STEP_PATTERN.fullmatch(name)))


def holds_checkpoints(root: Path) -> bool:
    """Return whether a run has saved under ``root``, judging by names."""
    patterns = ("step_*", ".step_*.replaced.tmp", "abandoned_*")
    has_any = any(path for pattern in patterns for path in root.glob(pattern))
    return has_any or os.path.lexists(root / LATEST_NAME)


def find_latest(root: Path) -> Path | None:
    """Return the checkpoint that ``latest`` names, complete or not; None if there is no file.

    Raises:
        DamagedError: It cannot be read, or names no checkpoint beside it; the message names it.
    """
    pointer = root / LATEST_NAME
    if not os.path.lexists(pointer):
        return None
    try:
        name = read_regular(pointer).decode(errors="replace").strip()
    except OSError as error:
        raise DamagedError(f"{pointer}: unreadable ({error.strerror})") from error
    match = STEP_PATTERN.fullmatch(name)
    if match is None:
        raise DamagedError(f"{pointer}: holds {shown_value(name)} instead of a checkpoint's name")
    directory = find_checkpoint(root, int(match[1]))
    if directory is None:
        raise DamagedError(f"{pointer}: names {name}, which is not there")
    return directory


def check_complete(directory: Path) -> None:
    """Raise ``DamagedError`` if sizes or the checksums of small files show damage.

    Damaged shards show only when they are read. Another format is a ``CheckpointError``.
    """
    check_files(directory, read_state(directory))
    read_checksums(directory)


def why_incomplete(directory: Path) -> str:
    """Return why a checkpoint is not complete; '' if it is."""
    try:
        check_complete(directory)
    except CheckpointError as error:
        return str(error)
    return ""


def first_complete(root: Path, steps: Iterable[int]) -> Path | None:
    """Return the first checkpoint of ``steps`` that is complete (``check_complete``)."""
    directories = (find_checkpoint(root, step) for step in steps)
    return next((path for path in directories if path and not why_incomplete(path)), None)


def other_checkpoint(directory: Path) -> str:
    """Return the remedy for a damaged checkpoint: the newest complete one before it, or after."""
    root, step = directory.parent, step_of(directory)
    others = sorted(set(find_steps(root)) - {step}, key=lambda other: (other > step, -other))
    other = first_complete(root, others)
    if other is None:
        return "restore it from a copy, or change run_dir: no other checkpoint is complete"
    return f"write {step_name(other)} into {root / LATEST_NAME} to continue from there"


def find_best(root: Path) -> BestCheckpoint | None:
    """Return the best checkpoint under ``root``, or None if no evaluation chose one.

    Raises:
        CheckpointError: ``best`` is damaged, or names a checkpoint that is not there.
    """
    pointer = root / BEST_NAME
    if not pointer.is_file():
        return None
    try:
        best = decode_json(BestCheckpoint, pointer.read_bytes())
        if not STEP_PATTERN.fullmatch(best.checkpoint) or not find_checkpoint(root, best.step):
            raise ValueError(f"names {best.checkpoint!r}, which is not a checkpoint beside it")
    except ValueError as error:
        raise CheckpointError(f"{pointer}: damaged ({error}); delete the file") from error
    return best


def name_best(root: Path, best: BestCheckpoint) -> None:
    """Make ``best`` name another checkpoint, atomically; its predecessor may now be pruned."""
    atomic_write_text(root / BEST_NAME, json.dumps(asdict(best)) + "\n")


def encode_state(state: CheckpointState) -> str:
    """Return the content of state.json, with its checksum."""
    fields = asdict(replace(state, checksum=""))
    fields["checksum"] = checksum(json.dumps(fields, sort_keys=True).encode())
    return json.dumps(fields, indent=2) + "\n"


def read_state(directory: Path) -> CheckpointState:
    """Read state.json.

    Raises:
        DamagedError: It is missing or damaged.
        CheckpointError: It is of another format.
    """
    path = directory / STATE_NAME
    with reading(STATE_NAME):
        content = read_regular(path)
        fields = parse_json(content)
        version = fields.get("format", FORMAT) if isinstance(fields, dict) else FORMAT
    if version != FORMAT:
        raise CheckpointError(
            f"{path}: format {shown_value(version)}, this version reads format {FORMAT}; resume "
            "with the version that saved it"
        )
    with reading(STATE_NAME):
        state = decode_json(CheckpointState, content)
    if encode_state(state).encode() != content:
        raise DamagedError(f"{STATE_NAME} has changed since it was written")
    return state


def check_files(directory: Path, state: CheckpointState) -> None:
    """Raise ``DamagedError`` for a file that is not what ``state`` says.

    A file that must not be there is a ``CheckpointError``.
    """
    actual_bytes = _file_bytes(directory)
    if COMMON_NAME in actual_bytes:
        raise CheckpointError(
            f"{directory / COMMON_NAME}: not part of the checkpoint, and Megatron would load it; "
            "delete the file"
        )
    for name, num_bytes in state.file_bytes.items():
        actual = actual_bytes.get(name)
        if actual != num_bytes:
            finding = "is missing" if actual is None else f"has {actual} bytes"
            raise DamagedError(f"{name} {finding} instead of {num_bytes} bytes")


def checksum(content: bytes) -> str:
    """Return the checksum of some bytes, as in ``Checksums``."""
    return xxhash.xxh3_64(content).hexdigest()


def write_checksums(directory: Path, pieces: Mapping[str, Mapping[str, str]]) -> None:
    """Write checksums.json, the last file but state.json; ``pieces`` as in ``Checksums``."""
    files = {
        path.name: checksum(path.read_bytes())
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name not in (*pieces, ROLLOUT_NAME)
    }
    content = json.dumps({"files": files, "pieces": pieces})
    atomic_write_text(directory / CHECKSUMS_NAME, content + "\n")


def read_checksums(directory: Path, *, small_files: bool = True) -> Checksums | None:
    """Read checksums.json; None if there is none, as in checkpoints of other tools.

    Raises:
        DamagedError: It cannot be read, or, with ``small_files``, one of these has changed since it
            was written.
    """
    path = directory / CHECKSUMS_NAME
    if not path.is_file():
        return None
    with reading(CHECKSUMS_NAME):
        checksums = decode_json(Checksums, path.read_bytes())
    for name, expected in checksums.files.items() if small_files else ():
        with reading(name):
            actual = checksum((directory / name).read_bytes())
        if actual != expected:
            raise DamagedError(f"{name} has changed since it was written")
    return checksums


def remove_unfinished(root: Path) -> None:
    """Remove leftovers of killed saves and removals; put back a checkpoint being replaced."""
    for path in root.glob(".step_*.tmp"):
        step = root / path.name.removeprefix(".").partition(".")[0]
        is_replaced = path == replaced_directory(step)
        if is_replaced and not step.exists():
            path.rename(step)
        elif not is_replaced or not why_incomplete(step):
            shutil.rmtree(path)


def begin_at(root: Path, directory: Path) -> str:
    """Start a run at a checkpoint: newer ones move aside, whole, and ``latest`` names it.

    Return one line about those that moved; '' if there are none.
    """
    pointer, step = root / LATEST_NAME, step_of(directory)
    newer = [step_directory(root, other) for other in find_steps(root) if other > step]
    paths = [place for path in newer for place in (path, replaced_directory(path))]
    news = ""
    if moving := [path for path in paths if path.is_dir()]:
        numbered = (root / f"abandoned_{k}" for k in itertools.count(1))
        abandoned = next(path for path in numbered if not os.path.lexists(path))
        abandoned.mkdir()
        for path in moving:
            target = abandoned / path.name.removeprefix(".").removesuffix(".replaced.tmp")
            path.rename(target.with_suffix(".replaced") if target.exists() else target)
        names = ", ".join(sorted(path.name for path in abandoned.iterdir()))
        news = (
            f"moved {names} to {abandoned}, because this run continues from step_{step}; no run "
            "deletes that directory"
        )
    atomic_write_text(pointer, f"step_{step}\n")
    return news


def publish(root: Path, step: int, fields: dict[str, Any], names: Collection[str]) -> None:
    """Complete the unfinished checkpoint of ``step`` and let ``latest`` name it.

    ``fields`` are those of ``CheckpointState`` except the sizes of files; ``names`` are the files
    that all ranks have written.

    Raises:
        OSError: It cannot be written, or a file of another rank is not visible; ``latest`` stays.
    """
    unfinished = unfinished_directory(root, step)
    file_bytes = _file_bytes(unfinished)
    if missing := sorted(set(names) - set(file_bytes)):
        raise not_shared(missing[0])
    state = CheckpointState(**fields, file_bytes=file_bytes)
    atomic_write_text(unfinished / STATE_NAME, encode_state(state))
    publish_directory(unfinished, step_directory(root, step))
    atomic_write_text(root / LATEST_NAME, f"{step_directory(root, step).name}\n")


def not_shared(name: str) -> OSError:
    """Return the error of a rank that does not see another rank's file."""
    return OSError(
        f"{name}, which another rank wrote, is not there; put run_dir on a file system that all "
        "nodes share"
    )


def remove_others(root: Path, saved_step: int, config: CheckpointConfig) -> None:
    """Remove checkpoints, except the newest, those to keep forever, the best and later steps.

    A damaged ``best`` is a ``CheckpointError``, and nothing is removed.
    """
    steps = [step for step in find_steps(root) if step <= saved_step]
    kept_steps = set(steps[-config.keep_last :])
    if config.keep_every > 0:
        kept_steps.update(step for step in steps if step % config.keep_every == 0)
    if (best := find_best(root)) is not None:
        kept_steps.add(best.step)
    for step in set(steps) - kept_steps:
        # Renamed first: a kill in the middle must not leave half a checkpoint under a valid name.
        removed = unfinished_directory(root, step)
        step_directory(root, step).rename(removed)
        shutil.rmtree(removed)


def _file_bytes(directory: Path) -> dict[str, int]:
    return {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != STATE_NAME
    }
