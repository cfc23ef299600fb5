"""Text and tables of the page: overview, differences, evaluations."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from bapo_megatron.config.settings import public_setting
from bapo_megatron.evaluation.estimators import PairedDifference
from bapo_megatron.evaluation.results import read_results
from bapo_megatron.evaluation.samples import ResultsError
from bapo_megatron.tools.compare import (
    compare_groups,
    compare_results,
    evaluations_in,
    group_scores,
)
from bapo_megatron.tools.report.checks import CHECKS, findings_of
from bapo_megatron.tools.report.runs import Row, RunGroup, RunRecord
from bapo_megatron.types import EvalResult

Table = dict[str, Sequence[Any]]
"""``headings``, and ``rows`` of as many texts or numbers."""


def card_of(group: RunGroup) -> dict[str, Any]:
    """Return the overview of a group: its settings, and figures, findings and checks of every run.

    ``rows`` has a row per run under ``headings``; a finding names its run where there are several.
    """
    several = len(group.runs) > 1
    names = [run.name for run in group.runs]
    checks = [[check.result(run) for run in group.runs] for check in CHECKS]
    figures = [_figures(run) for run in group.runs]
    labels = list(dict.fromkeys(label for values in figures for label in values))
    return {
        "label": group.label,
        "words": _words(group.runs[0]),
        "headings": ["run", "seed", *labels],
        "rows": [
            [run.name, run.seed, *(values.get(label, "") for label in labels)]
            for run, values in zip(group.runs, figures, strict=True)
        ],
        "findings": [
            {"run": run.name if several else "", **asdict(finding)}
            for run in group.runs
            for finding in findings_of(run)
        ],
        "results": [result for row in checks for _, result, _ in row],
        "checks": {
            "headings": ["check", *(names if several else ["result"])],
            "rows": [
                [row[0][0], *(f"{result}, {measured} steps" for _, result, measured in row)]
                for row in checks
            ],
        },
        "settings": {"headings": ["setting", "value"], "rows": _setting_rows(group)},
    }


def _setting_rows(group: RunGroup) -> list[tuple[str, str]]:
    """The configuration of a group as the page may show it, after the versions of its first run."""
    rows = [(key, public_setting(key, value)) for key, value in group.settings.items()]
    if starts := group.runs[0].starts:
        rows = [("commit", starts[-1].commit or "unknown"), *starts[-1].versions.items(), *rows]
    return rows


def _words(run: RunRecord) -> str:
    """The settings that tell most about a run."""
    settings = run.settings
    if not settings:
        return "This directory has no config.yaml, so its settings are unknown."
    sets = [key for key in settings if re.fullmatch(r"data\.train(\.\d+)?\.(path|hub)", key)]
    keys = (
        *("model.path", *(key for key in sets if settings[key]), "algorithm.objective"),
        *("optimizer.lr", "rollout.groups_per_step", "rollout.samples_per_group"),
        *("rollout.max_response_tokens", "algorithm.updates_per_batch", "rollout.engine"),
    )
    optional = (
        *("model.lora.rank", "rollout.environment", "rollout.agent", "algorithm.kl.coefficient"),
        *("algorithm.distillation.teacher.path", "algorithm.router_replay"),
    )
    keys += tuple(k for k in optional if settings.get(k) not in (None, 0, "none", "single_turn"))
    keys += ("parallel.expert",) if "router/load_mean" in run.metrics else ()
    words = [f"{key} {public_setting(key, settings.get(key))}" for key in keys]
    rank, alpha = settings.get("model.lora.rank"), settings.get("model.lora.alpha")
    if isinstance(rank, int) and isinstance(alpha, int | float) and rank > 0:
        targets = settings.get("model.lora.targets") or ["all linears of the layers"]
        names = public_setting("model.lora.targets", targets)
        words.append(f"adapters on {names}, α/r = {alpha / rank:g}")
    return " · ".join(words)


def _figures(run: RunRecord) -> dict[str, str]:
    last_step = run.steps[-1] if run.steps else 0
    total = run.settings.get("train.steps")
    figures = {"steps": f"{last_step:,}{f' of {total:,}' if isinstance(total, int) else ''}"}
    newest = [*evaluations_in(run.path).values()][-1:]
    k = {result.name: result.samples_per_prompt for f in newest for result in read_results(f)}
    for name in run.eval_sets:
        metric = f"eval/{name}/avg_at_k"
        first, *others = [row for row in run.rows if metric in row]
        score = f"{name} avg@{k.get(name, 'k')}"
        if others:
            figures[f"{score}, first"] = _percent(first[metric])
        figures[f"{score}, last (95% interval)"] = _score([first, *others][-1], metric)
    for label, metric, form in (
        ("reward", "reward/mean", "{:.3f}"),
        ("entropy", "policy/entropy", "{:.3f} nats"),
        ("oldest token", "rollout/age_max", "{:.0f} updates"),
    ):
        if values := run.values(metric):
            figures[f"{label}, last step"] = form.format(values[-1])
    if num_bytes := sum(run.values("weight_sync/bytes")):
        syncs = sum(run.values("weight_sync/syncs"))
        figures["per weight sync"] = f"{num_bytes / syncs / 1e6:,.1f} MB"
    if updates := run.values("train/updates"):
        num_made, skipped = sum(updates), sum(run.values("train/skipped_updates"))
        figures["updates"] = f"{num_made:,.0f} of {num_made + skipped:,.0f}"
    return figures


def difference_table(groups: Sequence[RunGroup], keys: Sequence[str]) -> Table:
    """Return the settings in which the groups differ, a row per key and a column per group."""
    rows = [[k, *(public_setting(k, g.settings.get(k)) for g in groups)] for k in keys]
    return {"headings": ["setting", *(group.label for group in groups)], "rows": rows}


def evaluation_table(runs: Sequence[RunRecord]) -> Table:
    """Return every evaluation, a row per run, set and step; cells are texts or numbers."""
    headings = [
        *("run", "set", "step", "k", "problems", "avg@k (95% interval)"),
        *("change since the first, pp", "pass@k", "maj@k", "answered", "truncated", "tokens"),
    ]
    shares = ("pass_at_k", "maj_at_k", "answer_found_share", "truncated_share")
    rows: list[list[Any]] = []
    for run in runs:
        results = {step: read_results(file) for step, file in evaluations_in(run.path).items()}
        for name in run.eval_sets:
            by_step = {
                s: result for s, sets in results.items() for result in sets if result.name == name
            }
            start = f"eval/{name}/"
            scored = [row for row in run.rows if f"{start}avg_at_k" in row]
            for row in scored:
                step = int(row["step"])
                result = by_step.get(step)
                rows.append(
                    [
                        *(run.name, name, step),
                        *((result.samples_per_prompt, result.num_prompts) if result else ("", "")),
                        _score(row, f"{start}avg_at_k"),
                        _change(by_step, step) if row is scored[-1] else "",
                        *(_percent(row.get(f"{start}{share}")) for share in shares),
                        f"{row.get(f'{start}response_tokens_mean', 0.0):,.1f}",
                    ]
                )
    return {"headings": headings, "rows": rows}


def _change(results: Mapping[int, EvalResult], step: int) -> str:
    """The paired difference of this evaluation from the first; empty if one is not known."""
    first, last = next(iter(results.values()), None), results.get(step)
    if first is None or last is None or first is last:
        return ""
    try:
        compared = compare_results([first], [last], k_values=(), common_only=True)
    except ResultsError:  # a resumed run may have other data under the same name
        return "other problems"
    return _points(compared[0].scores[0].paired)


def seed_table(groups: Sequence[RunGroup]) -> Table:
    """Return the last scores of groups of seeds, a row per set and group.

    Intervals are Student's, over seeds. The difference from the first group is paired by seed; it
    is empty where the two have fewer than two seeds in common, or were scored at other steps or on
    other problems.
    """
    headings = ["configuration", "set", "step", "seeds", "avg@k, mean (interval over seeds)"]
    several = [group for group in groups if len(group.runs) > 1]
    if len(several) > 1:
        headings.append(f"against {several[0].label}, paired, pp")
    last = [_last_results(group) for group in several]
    rows: list[list[Any]] = []
    for group, (step, results) in zip(several, last, strict=True):
        differences = {}
        first_step, first = last[0]
        if results is not first and step == first_step:
            with suppress(ResultsError):
                compared = compare_groups(first, results, k_values=(), common_only=True)
                differences = {c.set_name: c.scores[0].paired for c in compared}
        for score in group_scores(results) if results else ():
            if score.name.startswith("avg@") and score.low is not None and score.high is not None:
                interval = _interval(score.mean, score.low, score.high)
                row = [group.label, score.set_name, step, len(score.by_seed), interval]
                if len(several) > 1:
                    paired = differences.get(score.set_name)
                    row.append(f"{_points(paired)}, p = {paired.p_value:.2g}" if paired else "")
                rows.append(row)
    rows.sort(key=lambda row: row[1])
    return {"headings": headings, "rows": rows}


def _last_results(group: RunGroup) -> tuple[int, dict[Any, list[EvalResult]]]:
    """The last step at which all runs of a group were evaluated, and the results by their seeds."""
    files = {run.seed: evaluations_in(run.path) for run in group.runs}
    step = max(set.intersection(*map(set, files.values())), default=None)
    if step is None:
        return 0, {}
    return step, {seed: read_results(by_step[step]) for seed, by_step in files.items()}


def _score(row: Row, metric: str) -> str:
    """A score with its interval, if it has one."""
    low, high = (row.get(f"{metric}_{end}") for end in ("low", "high"))
    if low is None or high is None:
        return _percent(row[metric])
    return _interval(row[metric], low, high)


def _interval(value: float, low: float, high: float) -> str:
    return f"{value:.1%} ({low:.1%} … {high:.1%})"


def _points(paired: PairedDifference) -> str:
    """A difference of shares and its interval in percentage points."""
    values = (paired.difference, paired.low, paired.high)
    texts = (f"{100 * value:+.1f}".replace("-", "−") for value in values)
    return "{} ({} … {})".format(*texts)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
