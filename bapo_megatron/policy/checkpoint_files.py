"""The files of checkpoints: names, state.json, damage, publication, retention.

    <root>/step_<n>/    weights and optimizer (Megatron's torch_dist), state.json, checksums.json,
                        rng_<rank>.pt, rollout.parquet (what the rollout's source continues from)
    <root>/latest       name of the newest complete checkpoint
    <root>/best         the checkpoint with the best evaluation, metric and value, as JSON

A checkpoint is written under a temporary name, flushed, and renamed; only then ``latest`` moves,
and then ``best`` if it is the best one. A kill at any moment leaves the previous checkpoint in
place; where one of the same number was being replaced, under the name of
``files.replaced_directory``, until the next save puts it back.
"""

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from bapo_megatron.calls import decode_json, shown_value
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.files import (
    atomic_write_text,
    parse_json,
    publish_directory,
    read_regular,
    replaced_directory,
)

FORMAT = 5
"""In format 4, state.json had no checksum; in format 3, it held what is in rollout.parquet."""
LATEST_NAME = "latest"
BEST_NAME = "best"
STATE_NAME = "state.json"
CHECKSUMS_NAME = "checksums.json"
METADATA_NAME = ".metadata"
ROLLOUT_NAME = "rollout.parquet"
_MAX_NAME_BYTES = 64
STEP_PATTERN = re.compile(r"step_(\d+)")

OTHER_CHECKPOINT = (
    f"to resume from another checkpoint, write its name (step_<n>) into checkpoints/{LATEST_NAME}"
)
"""The remedy for a damaged checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or of another model; the message says what to do."""


class DamagedError(CheckpointError):
    """A file of a checkpoint has changed, or holds what none may; the message names it alone."""


@contextmanager
def damage_of(directory: Path, remedy: str = OTHER_CHECKPOINT) -> Iterator[None]:
    """Say of a damaged file which checkpoint it is in, and what to do."""
    try:
        yield
    except DamagedError as error:
        raise CheckpointError(f"{directory}: damaged, {error}; {remedy}") from error


@dataclass(frozen=True, slots=True)
class Checksums:
    """Contents of checksums.json: XXH3 of 64 bits in hexadecimal digits."""

    files: dict[str, str]
    """Checksum of every small file; state.json and rollout.parquet have their own."""
    pieces: dict[str, dict[str, str]]
    """Checksum of each piece of a file of shards, by its first byte: ranks read only pieces."""


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Contents of state.json."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    """For ``calls.decode_json``: a field that is not here is another version's."""
    num_updates: int
    """Optimizer updates made; the schedule follows from it."""
    layout: dict[str, int]
    """See ``checkpoint.rng_layout``."""
    distributed_optimizer: bool
    """The kind of Megatron's optimizer; each kind reads only its own state."""
    extra: dict[str, Any]
    """The caller's own state, plain JSON values."""
    file_bytes: dict[str, int]
    """Size of every other file of the checkpoint."""
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
    """Return where the checkpoint of a step lies."""
    return root / f"step_{step}"


def unfinished_directory(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies while it is written or removed."""
    return root / f".step_{step}.tmp"


def checkpoint_exists(root: Path, step: int) -> bool:
    """Return whether the complete checkpoint of a step exists, even while it is being replaced."""
    return _existing(step_directory(root, step)) is not None


def _existing(directory: Path) -> Path | None:
    """Return where a complete checkpoint lies; a kill may have left it under its other name."""
    return next((d for d in (directory, replaced_directory(directory)) if d.is_dir()), None)


def find_latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint under ``root``, or None where none was saved.

    Raises:
        CheckpointError: ``latest`` names a checkpoint that is not there.
    """
    pointer = root / LATEST_NAME
    if not pointer.is_file():
        return None
    name = pointer.read_bytes()[:_MAX_NAME_BYTES].decode(errors="replace").strip()
    directory = _existing(root / name) if STEP_PATTERN.fullmatch(name) else None
    if directory is None:
        raise CheckpointError(
            f"{pointer}: names {name!r}, which is not a checkpoint beside it; write the name of "
            "one that is (step_<n>) into it, or delete it to start anew"
        )
    return directory


def how_to_continue(run_dir: Path) -> str:
    """Return what a message says after the reason for which a run ended."""
    try:
        newest = find_latest(run_dir / "checkpoints")
    except CheckpointError as error:
        return f"; {error}"
    if newest is None:
        return "; no checkpoint yet: the same command with --resume starts at step 1"
    return f"; the same command with --resume continues from {newest}"


def find_best(root: Path) -> BestCheckpoint | None:
    """Return the best checkpoint under ``root``, or None where no evaluation chose one.

    Raises:
        CheckpointError: ``best`` is damaged, or names a checkpoint that is not there.
    """
    pointer = root / BEST_NAME
    if not pointer.is_file():
        return None
    try:
        best = decode_json(BestCheckpoint, pointer.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{pointer}: damaged ({error}); delete the file") from error
    if not STEP_PATTERN.fullmatch(best.checkpoint) or not checkpoint_exists(root, best.step):
        raise CheckpointError(
            f"{pointer}: names {best.checkpoint!r}, which is not a checkpoint beside it; write one "
            "that is, or delete the file"
        )
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
    """Read state.json; raise ``CheckpointError`` if it is missing, damaged or of another format."""
    path = directory / STATE_NAME
    try:
        content = read_regular(path)
        fields = parse_json(content)
        found = fields.get("format", FORMAT) if isinstance(fields, dict) else FORMAT
        if found == FORMAT:
            state = decode_json(CheckpointState, content)
            if encode_state(state).encode() != content:
                raise ValueError("it has changed since it was written")
            return state
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory}: not a complete checkpoint, {STATE_NAME} is missing; {OTHER_CHECKPOINT}"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); {OTHER_CHECKPOINT}") from error
    raise CheckpointError(
        f"{path}: format {shown_value(found)}, this version reads format {FORMAT}; resume with the "
        "version that saved it"
    )


def check_files(directory: Path, state: CheckpointState) -> None:
    """Raise ``CheckpointError`` for a file that is not what ``state`` says."""
    found = _file_bytes(directory)
    for name, num_bytes in state.file_bytes.items():
        if found.get(name) != num_bytes:
            actual = f"has {found[name]} bytes" if name in found else "is missing"
            raise CheckpointError(
                f"{directory}: damaged, {name} {actual} instead of {num_bytes} bytes; "
                f"{OTHER_CHECKPOINT}"
            )


new_checksum = xxhash.xxh3_64
"""The hash of ``Checksums``, for content that comes in parts."""


def checksum(content: bytes) -> str:
    """Return what ``Checksums`` holds of some bytes."""
    return new_checksum(content).hexdigest()


def write_checksums(directory: Path, pieces: Mapping[str, Mapping[str, str]]) -> None:
    """Complete a checkpoint's files but state.json; ``pieces`` are those of ``Checksums``."""
    files = {
        path.name: checksum(path.read_bytes())
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name not in (*pieces, ROLLOUT_NAME)
    }
    content = json.dumps({"files": files, "pieces": pieces})
    atomic_write_text(directory / CHECKSUMS_NAME, content + "\n")


def read_checksums(directory: Path) -> Checksums | None:
    """Read checksums.json; None where there is none, as other tools leave it.

    Raises:
        DamagedError: It cannot be read.
    """
    path = directory / CHECKSUMS_NAME
    if not path.is_file():
        return None
    try:
        return decode_json(Checksums, path.read_bytes())
    except ValueError as error:
        raise DamagedError(f"{CHECKSUMS_NAME} cannot be read ({error})") from error


def verify_small_files(directory: Path, checksums: Checksums) -> None:
    """Raise ``DamagedError`` for a small file that has changed since it was written."""
    for name, written in checksums.files.items():
        path = directory / name
        if not path.is_file() or checksum(path.read_bytes()) != written:
            raise DamagedError(f"{name} has changed since it was written")


def remove_unfinished(root: Path) -> None:
    """Remove what killed saves and removals left; put back what was about to be replaced."""
    for path in root.glob(".step_*.tmp"):
        step = root / path.name.removeprefix(".").partition(".")[0]
        if path == replaced_directory(step) and not step.exists():
            path.rename(step)
        else:
            shutil.rmtree(path)


def publish(root: Path, step: int, fields: dict[str, Any], written: Collection[str]) -> None:
    """Complete the unfinished checkpoint of ``step`` and let ``latest`` name it.

    ``fields`` are those of ``CheckpointState`` except the sizes of files; ``written`` names the
    files that all ranks have written.

    Raises:
        OSError: It cannot be written, or a file of another rank is not visible here; ``latest``
            and the checkpoint that it names are untouched.
    """
    unfinished = unfinished_directory(root, step)
    file_bytes = _file_bytes(unfinished)
    if missing := sorted(set(written) - set(file_bytes)):
        raise OSError(
            f"{missing[0]}, which another rank wrote, is not there; put run_dir on a file system "
            "that all nodes share"
        )
    state = CheckpointState(**fields, file_bytes=file_bytes)
    atomic_write_text(unfinished / STATE_NAME, encode_state(state))
    publish_directory(unfinished, step_directory(root, step))
    atomic_write_text(root / LATEST_NAME, f"{step_directory(root, step).name}\n")


def remove_others(root: Path, saved_step: int, config: CheckpointConfig) -> None:
    """Keep the newest checkpoints, those to keep for good, the best one, and nothing else.

    Steps above the one just saved belong to an attempt that was abandoned for this one, and go; so
    does ``best`` if it names one of them. A damaged ``best`` is a ``CheckpointError``, and nothing
    is removed.
    """
    steps = [
        int(match[1]) for path in root.iterdir() if (match := STEP_PATTERN.fullmatch(path.name))
    ]
    kept = set(sorted(step for step in steps if step <= saved_step)[-config.keep_last :])
    if config.keep_every > 0:
        kept.update(s for s in steps if s <= saved_step and s % config.keep_every == 0)
    best = find_best(root)
    if best is not None and best.step <= saved_step:
        kept.add(best.step)
    elif best is not None:
        (root / BEST_NAME).unlink()
    for step in set(steps) - kept:
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
