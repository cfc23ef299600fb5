"""Directories of checkpoints in any state: no run destroys a complete checkpoint that it finds."""

from __future__ import annotations

import os
import random
import re
import shutil
from typing import TYPE_CHECKING

import pytest

from bapo_megatron.policy.checkpoint_files import CheckpointError, begin_at, step_of
from bapo_megatron.trainer.opening import choose_checkpoint
from tests.policy.small_checkpoints import FILES, content_of, save_small

if TYPE_CHECKING:
    from pathlib import Path

SEEDS = range(160)
LAST_STEP = 14

Originals = dict[int, dict[str, bytes]]
"""The files of each checkpoint as they were saved, by step."""


@pytest.fixture(autouse=True)
def _unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here is about a crash of the machine, and flushing takes most of their time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def _damage(directory: Path, rng: random.Random) -> None:
    for name in rng.sample(FILES, rng.randint(1, len(FILES))):
        path = directory / name
        content = bytearray(path.read_bytes())
        match rng.choice(("missing", "truncated", "flipped")):
            case "missing":
                path.unlink()
            case "truncated":
                path.write_bytes(content[: rng.randrange(len(content))])
            case "flipped":
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
                path.write_bytes(content)


def _rewrite_latest(root: Path, rng: random.Random) -> None:
    latest = root / "latest"
    match rng.choice(("as it is", "missing", "directory", "link", "bytes", "step", "step")):
        case "as it is":
            return
        case "missing":
            latest.unlink(missing_ok=True)
        case "directory":
            latest.unlink(missing_ok=True)
            latest.mkdir()
        case "link":
            latest.unlink(missing_ok=True)
            latest.symlink_to(rng.choice(("gone", "latest", ".")))
        case "bytes":
            contents = (b"", b"\n", b"step_", b"step_03", b"step_8" + b" " * 99 + b"x")
            latest.write_bytes(rng.choice((*contents, rng.randbytes(9), b"step_3/../step_8")))
        case "step":
            latest.write_text(f"step_{rng.randint(0, LAST_STEP)}\n")


def _make_directory(root: Path, rng: random.Random) -> Originals:
    """Save some checkpoints, and let anything happen to them."""
    root.mkdir()
    originals: Originals = {}
    for step in sorted(rng.sample(range(LAST_STEP + 1), rng.randint(0, 5))):
        originals[step] = content_of(save_small(root, step))
    for step in originals:
        directory, replaced = root / f"step_{step}", root / f".step_{step}.replaced.tmp"
        if rng.random() < 0.15:
            shutil.copytree(directory, replaced)
            if rng.random() < 0.3:
                _damage(replaced, rng)
        if rng.random() < 0.4:
            _damage(directory, rng)
        if rng.random() < 0.15 and not replaced.exists():
            directory.rename(replaced)
    for step in rng.sample(range(LAST_STEP + 1), rng.randint(0, 2)):
        (root / f".step_{step}.tmp").mkdir()
        (root / f".step_{step}.tmp" / "rng_0.pt").write_bytes(b"half")
    if rng.random() < 0.8:
        _rewrite_latest(root, rng)
    return originals


def _complete(root: Path, originals: Originals) -> set[int]:
    """The steps whose checkpoint is somewhere under ``root`` with every byte."""
    found = [content_of(path) for path in root.rglob("*") if path.is_dir()]
    return {step for step, content in originals.items() if content in found}


def _in_place(root: Path, originals: Originals) -> dict[int, bool]:
    """The steps under their own name or, without it, their second one; whether with every byte."""
    found = {}
    for step, content in originals.items():
        paths = (root / f"step_{step}", root / f".step_{step}.replaced.tmp")
        path = next((path for path in paths if path.is_dir()), None)
        if path is not None:
            found[step] = content_of(path) == content
    return found


def _named(root: Path) -> int | None:
    """The step that ``latest`` names, if it names one as a run writes it."""
    latest = root / "latest"
    match = re.fullmatch(rb"step_(\d+)\n", latest.read_bytes()) if latest.is_file() else None
    return int(match[1]) if match else None


def _expected(root: Path, originals: Originals) -> int | None:
    """The step that is to continue; None where one line refuses or, in an empty one, begins."""
    in_place = _in_place(root, originals)
    named = _named(root)
    if named in in_place:
        return named if in_place[named] else None
    return max((step for step, is_whole in in_place.items() if is_whole), default=None)


def _stamps(root: Path) -> dict[Path, tuple[int, int]]:
    """What shows that a file or directory has changed; reading one changes more of its status."""
    status = {path: path.lstat() for path in root.rglob("*")}
    return {path: (each.st_ino, each.st_mtime_ns) for path, each in status.items()}


def _check_refusal(root: Path, line: str, originals: Originals) -> None:
    """A line names a path and a remedy; what it says to continue from continues."""
    assert "\n" not in line
    assert str(root) in line
    if proposed := re.search(rf"; write step_(\d+) into {root}/latest to continue from", line):
        (root / "latest").write_text(f"step_{proposed[1]}\n")
        assert _expected(root, originals) == int(proposed[1])
        assert choose_checkpoint(root.parent)[1] == ""
    else:
        assert "; restore " in line


@pytest.mark.parametrize("keep_last", [99, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_begins_at_the_newest_complete_checkpoint_or_refuses_and_destroys_none(
    tmp_path: Path, seed: int, keep_last: int
) -> None:
    root = tmp_path / "checkpoints"
    originals = _make_directory(root, random.Random(seed))
    complete, expected = _complete(root, originals), _expected(root, originals)
    before = _stamps(root)
    try:
        checkpoint, _ = choose_checkpoint(tmp_path)
    except CheckpointError as error:
        assert expected is None
        assert _stamps(root) == before
        _check_refusal(root, str(error), originals)
        return
    if checkpoint is None:
        assert not originals
        assert not os.path.lexists(root / "latest")
        step = 0
    else:
        step = step_of(checkpoint)
        assert step == expected
        said = begin_at(root, checkpoint)
        assert "\n" not in said
        assert choose_checkpoint(tmp_path) == (checkpoint, "")
        assert _complete(root, originals) == complete
    own = [each for each in originals if each <= step]
    for new in (step + 1, step + 2):
        save_small(root, new, keep_last=keep_last)
        own.append(new)
    assert _named(root) == step + 2
    kept = own[-keep_last:]
    assert sorted(path.name for path in root.glob("step_*")) == sorted(f"step_{n}" for n in kept)
    # Two new ones were saved; retention removes only what the run itself descends from.
    pruned = {each for each in own if each not in kept}
    assert complete - pruned <= _complete(root, originals)
    assert {n for n in complete if n > step} <= _complete(root, originals)
