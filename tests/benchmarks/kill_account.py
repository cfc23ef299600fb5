"""What became of every group of a finished run, from its files alone.

Nothing of the trainer is imported: a mistake that its writers and readers share would not show.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_METADATA = b"bapo_megatron.rollout"
_WAITING = -1
"""Column ``batch`` of ``rollout.parquet``: the group is in the buffer."""
_MAX_ERROR = 1e-6
"""Relative, of a mean that is computed in another order."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the configuration of the run said."""

    groups_per_step: int
    samples_per_group: int
    num_prompts: int
    """In the only data set; an epoch draws each of them once."""


@dataclass(slots=True)
class Account:
    """The groups of a run, and everything that is wrong with them."""

    num_steps: int = 0
    num_drawn: int = 0
    num_trained: int = 0
    num_waiting: int = 0
    """In the buffer of the last checkpoint."""
    num_lost_requests: int = 0
    """Continued on another server."""
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _File:
    about: dict[str, Any]
    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> _File:
        table = pq.read_table(path)
        return cls(json.loads(table.schema.metadata[_METADATA]), table.to_pylist())


def audit(run_dir: Path, shape: Shape) -> Account:
    """Follow every group that was drawn; ``problems`` is empty if each was trained or waits.

    No group may be dropped: the configuration gives no reason for it.
    """
    account = Account()
    dumps = {
        path.stem: _File.read(path)
        for path in sorted((run_dir / "rollouts").glob("step_*.parquet"))
    }
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    metrics = [row for row in map(json.loads, lines) if row["step"] > 0]
    account.num_steps = len(metrics)
    account.num_lost_requests = int(sum(row["rollout/lost_requests"] for row in metrics))
    expected = list(range(1, len(metrics) + 1))
    if [row["step"] for row in metrics] != expected:
        account.problems.append("metrics.jsonl: not one row per step")
    if [dump.about["step"] for dump in dumps.values()] != expected:
        account.problems.append("rollouts/: not one dump per step")
    account.problems += _problems_of_steps(dumps, metrics, shape)

    newest = (run_dir / "checkpoints" / "latest").read_text().strip()
    if newest != f"step_{len(metrics)}":
        account.problems.append(f"checkpoints/latest: {newest} after {len(metrics)} steps")
    saved = _File.read(run_dir / "checkpoints" / newest / "rollout.parquet")
    prompts = {row["group_id"]: row["prompt_id"] for dump in dumps.values() for row in dump.rows}
    prompts |= {row["group_id"]: json.loads(row["prompt"])["prompt_id"] for row in saved.rows}
    trained = Counter(
        group for dump in dumps.values() for group in {row["group_id"] for row in dump.rows}
    )
    waiting = {row["group_id"] for row in saved.rows if row["batch"] == _WAITING}
    account.num_drawn = saved.about["next_group_id"]
    account.num_trained, account.num_waiting = trained.total(), len(waiting)
    named = {
        "trained more than once": [group for group, times in trained.items() if times > 1],
        "trained, and still in the buffer": waiting & trained.keys(),
        "lost": set(range(account.num_drawn)) - trained.keys() - waiting,
        "never drawn": (trained.keys() | waiting) - set(range(account.num_drawn)),
    }
    account.problems += [f"groups {sorted(ids)}: {what}" for what, ids in named.items() if ids]
    if saved.about["num_trained"] != account.num_trained:
        account.problems.append(f"the checkpoint counts {saved.about['num_trained']} as trained")
    if any(saved.about["dropped"].values()):
        account.problems.append(f"dropped: {saved.about['dropped']}")
    account.problems += _problems_of_epochs(prompts, shape)
    return account


def _problems_of_steps(
    dumps: dict[str, _File], metrics: list[dict[str, float]], shape: Shape
) -> Iterator[str]:
    """Each dump by itself, and against the row of metrics that was written of it."""
    num_updates = 0
    for (name, dump), row in zip(dumps.items(), metrics, strict=False):
        samples = Counter(sample["group_id"] for sample in dump.rows)
        if set(samples.values()) != {shape.samples_per_group}:
            yield f"{name}: groups of {sorted(set(samples.values()))} samples"
        if len(samples) != shape.groups_per_step:
            yield f"{name}: {len(samples)} groups"
        if dump.about["version"] != num_updates:
            yield f"{name}: version {dump.about['version']} after {num_updates} updates"
        num_updates += int(row["train/updates"])
        for sample in dump.rows:
            if problem := _problem_of_sample(sample, dump.about["version"]):
                yield f"{name}: sample {sample['index']} of group {sample['group_id']}: {problem}"
        means = {
            "reward/mean": [sample["reward"] for sample in dump.rows],
            "rollout/response_tokens_mean": [len(s["behaviour_logprobs"]) for s in dump.rows],
        }
        for metric, values in means.items():
            if not math.isclose(row[metric], sum(values) / len(values), rel_tol=_MAX_ERROR):
                yield f"{name}: its {metric} is not that of metrics.jsonl"


def _problem_of_sample(sample: dict[str, Any], version: int) -> str:
    """What cannot be of a response of one turn in a batch that was formed at ``version``."""
    num_tokens = len(sample["response_token_ids"])
    if num_tokens != len(sample["behaviour_logprobs"]) or num_tokens != sum(
        sample["version_tokens"]
    ):
        return "tokens, log-probs and versions differ in number"
    if sample["versions"] != sorted(set(sample["versions"])) or sample["versions"][-1] > version:
        return f"versions {sample['versions']} in a batch of version {version}"
    if not all(math.isfinite(logprob) for logprob in sample["behaviour_logprobs"]):
        return "a log-prob is not finite"
    return ""


def _problems_of_epochs(prompts: dict[int, str], shape: Shape) -> Iterator[str]:
    """Each complete epoch must have drawn every prompt once; ``prompts`` are by group."""
    size = shape.num_prompts
    for epoch in range((max(prompts, default=-1) + 1) // size):
        drawn = {prompts.get(group) for group in range(epoch * size, (epoch + 1) * size)}
        if len(drawn - {None}) != size:
            yield f"epoch {epoch + 1}: {len(drawn - {None})} of {size} prompts"


def different_files(first: Path, second: Path) -> list[str]:
    """Names of the weights files of two exports that are not equal bit for bit."""
    names = {path.name for folder in (first, second) for path in folder.glob("*.safetensors")}
    assert names, f"{first}: no weights"
    contents = {
        name: [
            path.read_bytes() if path.exists() else None for path in (first / name, second / name)
        ]
        for name in sorted(names)
    }
    return [name for name, (one, other) in contents.items() if one != other]
