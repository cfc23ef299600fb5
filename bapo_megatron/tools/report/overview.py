"""What a page says of its runs in words and tables: overview, differences, evaluations."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bapo_megatron.config.settings import public_setting
from bapo_megatron.evaluation.estimators import difference_over_seeds, student_interval
from bapo_megatron.evaluation.report import read_results
from bapo_megatron.evaluation.settings import ResultsError
from bapo_megatron.policy.hf_config import read_fields
from bapo_megatron.tools.compare import compare_results
from bapo_megatron.tools.evaluations import evaluations_in
from bapo_megatron.tools.report.checks import findings_of, results_of
from bapo_megatron.tools.report.runs import Row, Run, RunGroup, events_of
from bapo_megatron.types import EvalResult

_RESAMPLES = 2000
"""Resamples for the interval of a change; the run made those of the scores themselves."""
_OBJECTIVES = {"bapo": "BAPO", "clip": "GRPO's fixed clip bounds", "none": "no clipping"}


def describe(run: Run, group: int) -> dict[str, Any]:
    """Return what figures and the reader of rollouts need to know of a run."""
    return {
        "name": run.name,
        "group": group,
        "events": [asdict(event) for event in events_of(run)],
    }


def card_of(group: RunGroup) -> dict[str, Any]:
    """Return the overview of a group: its settings, and figures, findings and checks of every run.

    ``rows`` has a row per run under ``headings``; a finding names its run where there are several.
    """
    several = len(group.runs) > 1
    figures = [dict(_figures(run)) for run in group.runs]
    headings = list(dict.fromkeys(label for own in figures for label in own))
    return {
        "label": group.label,
        "words": _words(group.runs[0]),
        "headings": ["run", "seed", *headings],
        "rows": [
            [run.name, run.seed, *(own.get(label, "") for label in headings)]
            for run, own in zip(group.runs, figures, strict=True)
        ],
        "notes": [
            f"{run.name}: {note}" if several else note
            for run in group.runs
            if (note := _skipped(run))
        ],
        "findings": [
            {"run": run.name if several else "", **asdict(finding)}
            for run in group.runs
            for finding in findings_of(run)
        ],
        "checks": {
            "headings": [
                "check",
                "result",
                "steps measured",
                "what is lacking",
                *["run"] * several,
            ],
            "rows": [
                [*row, *[run.name] * several] for run in group.runs for row in results_of(run)
            ],
        },
        "settings": {"headings": ["setting", "value"], "rows": _setting_rows(group)},
    }


def _skipped(run: Run) -> str:
    """Say why updates were skipped, as far as the metrics tell."""
    skipped = math.fsum(run.values("train/skipped_updates"))
    if not skipped:
        return ""
    because = "all groups of such an update had equal rewards"
    if any(run.values("rollout/masked_token_share")) or any(run.values("train/nonfinite_tokens")):
        because += ", or none of its tokens could train"
    equal = [1 - share for share in run.values("reward/mixed_groups")]
    share = f"; {fmean(equal):.1%} of the groups had equal rewards" if equal else ""
    total = skipped + math.fsum(run.values("train/updates"))
    return f"{skipped:,.0f} of {total:,.0f} updates were skipped: {because}{share}."


def _setting_rows(group: RunGroup) -> list[tuple[str, str]]:
    """The configuration of a group as the page may show it, after what its first run ran on."""
    rows = [(key, public_setting(key, value)) for key, value in group.settings.items()]
    if starts := group.runs[0].starts:
        rows = [("commit", starts[-1].commit or "unknown"), *starts[-1].versions.items(), *rows]
    return rows


def _words(run: Run) -> str:
    settings = run.settings
    if not settings:
        return "This directory has no config.yaml, so its settings are unknown."

    def shown(key: str) -> str:
        return public_setting(key, settings.get(key))

    objective = shown("algorithm.objective")
    sets = [key for key in settings if re.fullmatch(r"data\.train(\.\d+)?\.(path|hub)", key)]
    data = [public_setting(key, settings[key]) for key in sets if settings[key]]
    return (
        f"{_model(run)}, trained with {_OBJECTIVES.get(objective, objective)} on "
        f"{' and '.join(data) or 'unknown data'}. A batch has "
        f"{shown('rollout.groups_per_step')} groups of "
        f"{shown('rollout.samples_per_group')} responses of at most "
        f"{shown('rollout.max_response_tokens')} tokens and makes "
        f"{shown('algorithm.updates_per_batch')} updates at a learning rate of "
        f"{shown('optimizer.lr')}. Responses come from the {shown('rollout.engine')} engine."
    )


def _model(run: Run) -> str:
    """The model by its architecture, if its configuration is still there, and its directory."""
    path = Path(str(run.settings.get("model.path", "")))
    about = ""
    for directory in (run.path / "hf", path):
        file = directory / "config.json"
        if file.is_file():
            found = read_fields(file)
            kind, layers = found.get("model_type"), found.get("num_hidden_layers")
            if kind and layers and found.get("hidden_size"):
                about = f" ({kind}, {layers} layers of width {found['hidden_size']})"
            break
    return f"The model '{path.name}'{about}"


def _figures(run: Run) -> list[tuple[str, str]]:
    """Labels and values of the headline figures."""
    last_step = run.steps[-1] if run.steps else 0
    total = run.settings.get("train.steps")
    of_all = f" of {total:,}" if isinstance(total, int) else ""
    found = [("steps", f"{last_step:,}{of_all}")]
    for name in run.eval_sets:
        metric = f"eval/{name}/avg_at_k"
        scored = [row for row in run.rows if metric in row]
        if len(scored) > 1:
            found.append((f"{name} accuracy at first", _percent(scored[0][metric])))
        found.append((f"{name} accuracy (95% interval)", _score(scored[-1], metric)))
    for label, metric, form in (
        ("reward", "reward/mean", "{:.3f}"),
        ("entropy, nats", "policy/entropy", "{:.3f}"),
        ("oldest token, updates", "rollout/age_max", "{:.0f}"),
    ):
        if values := run.values(metric):
            found.append((f"{label}, last step", form.format(values[-1])))
    if updates := run.values("train/updates"):
        made, skipped = sum(updates), sum(run.values("train/skipped_updates"))
        of = f" of {made + skipped:,.0f}" if skipped else ""
        found.append(("updates made", f"{made:,.0f}{of}"))
    return found


def difference_table(groups: Sequence[RunGroup], keys: Sequence[str]) -> dict[str, Any]:
    """Return the settings in which the groups differ, a row per key and a column per group."""
    rows = [[key, *_distinct(key, [g.settings.get(key) for g in groups])] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return {"headings": ["setting", *(group.label for group in groups)], "rows": rows}


def _distinct(key: str, values: Sequence[Any]) -> list[str]:
    """The values as the page may show them; different ones that look equal are told apart."""
    looks: dict[str, list[Any]] = {}
    texts = []
    for value in values:
        text = public_setting(key, value)
        known = looks.setdefault(text, [])
        if value not in known:
            known.append(value)
        number = known.index(value) + 1
        texts.append(text if number == 1 or text == "none" else f"{text} (another, {number})")
    return texts


def evaluation_table(runs: Sequence[Run]) -> dict[str, Any]:
    """Return every evaluation, a row per run, set and step; cells are texts or numbers."""
    headings = [
        *("run", "set", "step", "k", "problems", "avg@k (95% interval)"),
        *("change since the first, pp", "pass@k", "maj@k", "answered"),
        *("truncated", "tokens"),
    ]
    rows: list[list[Any]] = []
    for run in runs:
        results = {step: read_results(file) for step, file in evaluations_in(run.path).items()}
        for name in run.eval_sets:
            own = {step: r for step, each in results.items() for r in each if r.name == name}
            start = f"eval/{name}/"
            scored = [row for row in run.rows if f"{start}avg_at_k" in row]
            change = _change(own, int(scored[-1]["step"]))
            for row in scored:
                shares = [
                    _percent(row.get(f"{start}{metric}"))
                    for metric in ("pass_at_k", "maj_at_k", "answer_found_share", "truncated_share")
                ]
                step = int(row["step"])
                size: tuple[int | str, ...] = ("", "")
                if step in own:
                    size = own[step].samples_per_prompt, own[step].num_prompts
                rows.append(
                    [
                        *(run.name, name, step, *size, _score(row, f"{start}avg_at_k")),
                        *(change if row is scored[-1] else "", *shares),
                        f"{row.get(f'{start}response_tokens_mean', 0.0):,.1f}",
                    ]
                )
    # Where no run has its files, nothing is known of k, problems and changes.
    shown = [n for n in range(len(headings)) if any(row[n] != "" for row in rows)]
    headings, *rows = ([each[n] for n in shown] for each in (headings, *rows))
    return {"headings": headings, "rows": rows}


def seed_table(groups: Sequence[RunGroup]) -> dict[str, Any]:
    """Return the last scores of groups of seeds, a row per set and group.

    Intervals are Student's, over seeds. The difference from the first group is paired by seed; it
    is empty where the two have fewer than two seeds in common, or were scored at other steps.
    """
    headings = ["configuration", "set", "step", "seeds", "avg@k, mean (interval over seeds)"]
    several = [group for group in groups if len(group.runs) > 1]
    if not several:
        return {"headings": headings, "rows": []}
    first = several[0]
    if len(several) > 1:
        headings.append(f"against {first.label}, paired, pp")
    names = dict.fromkeys(name for group in several for run in group.runs for name in run.eval_sets)
    rows = []
    for name in names:
        metric = f"eval/{name}/avg_at_k"
        step, base = _last_scores(first, metric)
        for group in several:
            own_step, scores = _last_scores(group, metric)
            if len(scores) < 2:
                continue
            values_S = np.array(list(scores.values()))
            text = _interval(values_S.mean(), *student_interval(values_S))
            row = [group.label, name, own_step, len(scores), text]
            if len(several) > 1:
                shared = [seed for seed in scores if seed in base and own_step == step]
                pairs_S = np.array([scores[seed] - base[seed] for seed in shared])
                row.append(_difference(pairs_S) if group is not first and len(shared) > 1 else "")
            rows.append(row)
    return {"headings": headings, "rows": rows}


def _last_scores(group: RunGroup, metric: str) -> tuple[int, dict[str, float]]:
    """The last step at which all runs of a group have a score, and each run's by its seed."""
    scores = {run.seed: dict(run.points(metric)) for run in group.runs}
    steps = set.intersection(*(set(each) for each in scores.values()))
    if not steps:
        return 0, {}
    return int(max(steps)), {seed: each[max(steps)] for seed, each in scores.items()}


def _difference(differences_S: np.ndarray) -> str:
    """A mean difference over seeds, with its interval and p-value."""
    found = difference_over_seeds(differences_S)
    return f"{_points(found.difference, found.low, found.high)}, p = {found.p_value:.2g}"


def _score(row: Row, metric: str) -> str:
    """A score with its interval, if it has one."""
    low, high = (row.get(f"{metric}_{end}") for end in ("low", "high"))
    if low is None or high is None:
        return _percent(row[metric])
    return _interval(row[metric], low, high)


def _interval(value: float, low: float, high: float) -> str:
    return f"{value:.1%} ({low:.1%} … {high:.1%})"


def _points(difference: float, low: float, high: float) -> str:
    """A difference of shares and its interval in percentage points."""
    values = (f"{100 * each:+.1f}".replace("-", "−") for each in (difference, low, high))
    return "{} ({} … {})".format(*values)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _change(results: Mapping[int, EvalResult], step: int) -> str:
    """The paired difference of this evaluation from the first; empty if one is not known."""
    first, last = next(iter(results.values()), None), results.get(step)
    if first is None or last is None or first is last:
        return ""
    try:
        compared = compare_results(
            *([first], [last]), k_values=(), num_resamples=_RESAMPLES, seed=0, common_only=True
        )
    except ResultsError:  # a resumed run may have other data under the same name
        return "other problems"
    paired = compared[0].scores[0].paired
    return _points(paired.difference, paired.low, paired.high)
