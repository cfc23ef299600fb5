"""Run directories as records: metrics, configuration, events, and which runs belong together.

Nothing here leaves the machine's layout or a secret in a record (``public_setting``).
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Any

from bapo_megatron.config.settings import differing, read_settings
from bapo_megatron.telemetry.metrics import BEFORE_TRAINING
from bapo_megatron.telemetry.run_dir import Start, read_starts
from bapo_megatron.telemetry.sinks import read_metrics

Row = Mapping[str, float]

_PER_RUN_KEYS = ("name", "run_dir", "seed", "resume")
"""Keys in which the seeds of one configuration differ."""

FAULTS = {
    "reward/errors": "reward functions failed on {:,.0f} responses",
    "reward/timeouts": "grading timed out on {:,.0f} responses",
    "rollout/environment_errors": "the environment failed in {:,.0f} episodes",
    "rollout/lost_requests": "{:,.0f} requests lost their engine and continued on another",
    "train/nonfinite_tokens": "{:,.0f} tokens had non-finite values",
}
"""What a metric above 0 says about its step."""


@dataclass(frozen=True, slots=True)
class Event:
    """What happened in a step, beside training."""

    kind: str
    """``sync``, ``evaluation``, ``fault`` or ``restart``."""
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run directory without its rollouts."""

    path: Path
    name: str
    """The end of its path, as long as needed to differ from the other runs."""
    rows: tuple[Row, ...]
    """Rows of ``metrics.jsonl`` by ascending step; at least one."""
    settings: Mapping[str, Any]
    """config.yaml by dotted key; empty where the file is missing."""
    starts: tuple[Start, ...] = ()
    """Processes that trained it, in their order."""

    @property
    def seed(self) -> str:
        """The seed as text; empty if unknown."""
        return str(self.settings.get("seed", ""))

    @property
    def steps(self) -> list[int]:
        """Finished steps, without the evaluation before training."""
        return [int(row["step"]) for row in self.rows if row["step"] != BEFORE_TRAINING]

    @property
    def eval_sets(self) -> list[str]:
        """Sorted names of the sets that it was evaluated on."""
        return self.matching("eval/", "/avg_at_k")

    @property
    def metrics(self) -> set[str]:
        """Names of the metrics that were recorded in any step."""
        return {name for row in self.rows for name in row} - {"step"}

    def points(self, metric: str) -> list[tuple[float, float]]:
        """Steps and values of a metric, where it was recorded."""
        return [(row["step"], row[metric]) for row in self.rows if metric in row]

    def values(self, metric: str) -> list[float]:
        """Values of a metric, where it was recorded."""
        return [value for _, value in self.points(metric)]

    def matching(self, start: str, end: str) -> list[str]:
        """Sorted middles of the metrics that begin with ``start`` and finish with ``end``."""
        pattern = re.compile(f"{re.escape(start)}(.+){re.escape(end)}", re.DOTALL)
        return sorted(match[1] for match in map(pattern.fullmatch, self.metrics) if match)


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs that differ in their seeds only."""

    label: str
    runs: tuple[RunRecord, ...]
    settings: Mapping[str, Any]
    """The configuration of all of them, without the seed."""


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read run directories.

    Raises:
        ValueError: A directory holds no readable run, or is given twice.
        OSError: A file cannot be read.
    """
    real = [os.path.realpath(path) for path in paths]
    for number, path in enumerate(paths):
        if real[number] in real[:number]:
            raise ValueError(f"{path}: given twice; give every run once")
    names = _distinct_names([Path.cwd() / path for path in paths])
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def _read_run(path: Path, name: str) -> RunRecord:
    metrics, config = path / "metrics.jsonl", path / "config.yaml"
    if not os.path.lexists(metrics):
        raise ValueError(f"{metrics}: no such file; give the directory of a run")
    rows = sorted(read_metrics(metrics), key=lambda row: row["step"])
    if not rows:
        raise ValueError(f"{metrics}: no step was recorded yet; wait for the first one")
    settings = read_settings(config) if os.path.lexists(config) else {}
    return RunRecord(path, name, tuple(rows), settings, tuple(read_starts(path)))


def _distinct_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart, of equally many parts each."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        ends = ["/".join(path.parts[-length:]).lstrip("/") for path in paths]
        # Bytes that are not UTF-8 are in no page, and figures cannot draw them.
        names = [os.fsencode(end).decode(errors="backslashreplace") for end in ends]
        if len(set(names)) == len(names):
            break
    return names


def group_runs(runs: Sequence[RunRecord]) -> tuple[list[RunGroup], list[str]]:
    """Put seeds of one configuration together; a seed that a group has already begins another one.

    Returns:
        The groups in the order of their first runs, and the keys in which they differ. Runs without
        a configuration are groups of their own.
    """
    members: list[list[RunRecord]] = []
    shared: list[dict[str, Any]] = []
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key not in _PER_RUN_KEYS}
        for group, other in zip(members, shared, strict=True):
            has_seed = run.seed in [member.seed for member in group]
            if settings and other and not has_seed and not differing(settings, other):
                group.append(run)
                break
        else:
            members.append([run])
            shared.append(settings)
    pairs = [(one, other) for one, other in combinations(shared, 2) if one and other]
    unequal = {key for one, other in pairs for key in differing(one, other)}
    ordered = dict.fromkeys(key for settings in shared for key in settings if key in unequal)
    labels = _labels([[run.name for run in group] for group in members])
    groups = map(RunGroup, labels, map(tuple, members), shared)
    return list(groups), list(ordered)


def _labels(groups: Sequence[Sequence[str]]) -> list[str]:
    """Name each group by the common start of its runs' names, without the seed."""
    labels: list[str] = []
    for names in groups:
        start = commonprefix(names)  # noqa: RUF071 — of names, not of paths
        shared = re.sub(r"((^|[-_./])(seed|s)?[-_]*)?\d*$", "", start)
        label = names[0] if len(names) == 1 else f"{shared or names[0]} ({len(names)} seeds)"
        labels.append(label if label not in labels else f"{label}, {names[0]}")
    return labels


def events_of(run: RunRecord) -> list[Event]:
    """Return weight syncs, evaluations and faults by step, then restarts."""
    events, sets = [], run.eval_sets
    for row in run.rows:
        step = int(row["step"])
        if syncs := row.get("weight_sync/syncs", 0.0):
            count = "weight sync" if syncs == 1 else f"{syncs:,.0f} weight syncs"
            seconds = row.get("weight_sync/sync_s", 0.0)
            events.append(Event("sync", step, f"{count}, {seconds:.2f} s"))
        scores = {name: row.get(f"eval/{name}/avg_at_k") for name in sets}
        texts = [f"{name} {score:.1%}" for name, score in scores.items() if score is not None]
        if texts:
            events.append(Event("evaluation", step, "evaluation: " + ", ".join(texts)))
        for metric, text in FAULTS.items():
            if row.get(metric, 0.0) > 0:
                events.append(Event("fault", step, text.format(row[metric])))
    for previous, start in pairwise(run.starts):
        text = f"resumed after {start.step:,} finished steps"
        if start.commit != previous.commit:
            text += f"; commit {start.commit or 'unknown'}, was {previous.commit or 'unknown'}"
        events.append(Event("restart", start.step + 1, text))
    return events
