"""Kinds of bad input, continued: what runs and evaluations have written, and tokens of others."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import numpy as np

from tests.fuzz import mutations as harm
from tests.fuzz.forks import Case

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random


# --- evaluations ------------------------------------------------------------------------------


def samples(intact: Path, files: Path, rng: Random) -> Case:
    """A field of a sample, or the bytes of the file."""
    path = _copy_samples(intact, files)
    lines = path.read_text().splitlines()
    is_wrong, places = False, ["sums.jsonl"]
    if rng.random() < 0.3:
        is_wrong = harm.damaged(path, rng)
    else:
        number, entry = rng.randrange(len(lines)), json.loads(lines[0])
        entry = json.loads(lines[number])
        field = harm.pick(rng, [name for name in entry if name not in ("state", "row")])
        entry, is_wrong = harm.poisoned(entry, rng, (field,))
        places += [field] if is_wrong else []
        lines[number] = harm.to_json(entry)
        path.write_text("\n".join(lines) + "\n")
    return _evaluate(path, tuple(places), is_wrong=is_wrong)


def settings(intact: Path, files: Path, rng: Random) -> Case:
    """A setting beside samples."""
    path = _copy_samples(intact, files)
    beside = files / "sums.settings.json"
    if rng.random() < 0.3:
        harm.damaged(beside, rng)
    else:
        harm.json_damaged(beside, rng)
    return _evaluate(path, ("sums",), is_wrong=False)


def _copy_samples(intact: Path, files: Path) -> Path:
    shutil.copy(intact / "sums.settings.json", files / "sums.settings.json")
    shutil.copy(intact / "sums.jsonl", files / "sums.jsonl")
    return files / "sums.jsonl"


def _evaluate(path: Path, places: tuple[str, ...], *, is_wrong: bool) -> Case:
    target = path.parent / "again"
    return Case(["eval", "--from", str(path), "--out", str(target)], places, is_wrong, target)


def results(intact: Path, files: Path, rng: Random) -> Case:
    """A field of eval.json, or its bytes."""
    path = files / "eval.json"
    shutil.copy(intact / "eval.json", path)
    if rng.random() < 0.3:
        harm.damaged(path, rng)
    else:
        harm.json_damaged(path, rng)
    given = ["compare", str(path), str(intact / "eval.json"), "--resamples", "100"]
    return Case(given, ("eval.json",), is_wrong=False)


def graded(intact: Path, files: Path, rng: Random) -> Case:
    """A line of responses."""
    path = files / "responses.jsonl"
    shutil.copy(intact / "responses.jsonl", path)
    places: tuple[str, ...] = ("responses.jsonl",)
    if rng.random() < 0.4:
        return Case(["grade", str(path)], places, harm.damaged(path, rng))
    lines = path.read_text().splitlines()
    number = rng.randrange(len(lines))
    entry = json.loads(lines[number])
    field, new = harm.pick(rng, list(entry)), harm.pick(rng, harm.POISONS)
    entry[field] = new
    lines[number] = json.dumps(entry)
    path.write_text("\n".join(lines) + "\n")
    is_wrong = not isinstance(new, str) if field == "response" else new is None
    return Case(["grade", str(path)], (*places, field) if is_wrong else places, is_wrong)


# --- archives and metrics ---------------------------------------------------------------------


def archive(intact: Path, files: Path, rng: Random) -> Case:
    """Tokens for the bound search."""
    name = harm.pick(rng, ("tokens.npz", "tokens.parquet"))
    path = files / name
    shutil.copy(intact / name, path)
    if rng.random() < 0.5:
        return Case(["bounds", str(path)], (name,), harm.damaged(path, rng))
    columns = dict(np.load(intact / "tokens.npz"))
    field = harm.pick(rng, sorted(columns))
    bad = (
        *(np.full(3, np.nan), np.full(3, 1e308), np.zeros(2), np.zeros((3, 1)), np.float64(1)),
        *(np.array(["a", "b", "c"]), np.array([1 + 2j, 0, 0]), np.full(3, 7), np.zeros(3, "M8[s]")),
        np.zeros(3, [("a", "f4")]),
    )
    columns[field] = harm.pick(rng, bad)
    np.savez(files / "tokens.npz", **columns)
    return Case(["bounds", str(files / "tokens.npz")], ("tokens.npz", field), is_wrong=False)


def metrics(intact: Path, files: Path, rng: Random) -> Case:
    """The metrics of a run."""
    path = files / "run" / "metrics.jsonl"
    path.parent.mkdir()
    shutil.copy(intact / "run" / "metrics.jsonl", path)
    lines = path.read_text().splitlines()
    if rng.random() < 0.4:
        harm.damaged(path, rng)
    else:
        row = json.loads(lines[0])
        named = ("step", "reward/mean", "clip/high")
        row, _ = harm.poisoned(row, rng, (harm.pick(rng, [name for name in named if name in row]),))
        lines.append(harm.to_json(row))
        path.write_text("\n".join(lines) + "\n")
    target = files / "picture.png"
    given = ["plot", str(path.parent), "--out", str(target)]
    return Case(given, ("metrics.jsonl",), False, target)


# --- checkpoints ------------------------------------------------------------------------------


def resumed(intact: Path, files: Path, rng: Random) -> Case:
    """The state, the pointers and the unfinished samples of a run that is continued."""
    shutil.copytree(intact / "run", files / "run")
    root = files / "run" / "checkpoints"
    path = harm.pick(rng, (root / "step_1" / "state.json", root / "latest"))
    if path.suffix == ".json" and rng.random() < 0.6:
        harm.json_damaged(path, rng)
    else:
        harm.damaged(path, rng)
    given = ["train", str(intact / "replay.yaml"), f"run_dir={files / 'run'}", "resume=true"]
    return Case([*given, "log.console=false"], ("checkpoints",), is_wrong=False)


def checkpoint(intact: Path, files: Path, rng: Random) -> Case:
    """A file of a checkpoint that is converted."""
    shutil.copytree(intact / "checkpoint", files / "checkpoint")
    path = harm.pick(rng, sorted(p for p in (files / "checkpoint").rglob("*") if p.is_file()))
    harm.damaged(path, rng)
    target = files / "target"
    given = ["convert", str(files / "checkpoint"), str(target)]
    return Case(given, ("checkpoint",), False, target)
