"""Two results compared problem by problem, or two groups of runs compared seed by seed.

Shape legend: P = problems, S = seeds, M = estimates.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bapo_megatron.evaluation.estimators import (
    PairedDifference,
    difference_over_seeds,
    paired_difference,
    student_interval,
)
from bapo_megatron.evaluation.results import is_shown, limits_of, read_results, values_by_problem
from bapo_megatron.evaluation.samples import ResultsError
from bapo_megatron.types import EvalProblem, EvalResult

Results = Sequence[EvalResult]
"""One evaluation: a result per set."""
ResultsBySeed = Mapping[int, Results]
"""The evaluations of runs that differ in their seeds only, by seed."""
Estimates = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Estimates that both have and a table needs, by name: [P] of the first and of the second."""

_NUM_RESAMPLES = 10_000
"""Of the bootstrap over problems."""
_COMPARED_SETTINGS = (
    *("samples_per_prompt", "temperature", "max_response_tokens", "prompts"),
    *("reward", "environment", "max_turns"),
)


@dataclass(frozen=True, slots=True)
class ScoreDifference:
    """One score of both results."""

    name: str
    first: float
    """Mean over problems, and over seeds."""
    second: float
    paired: PairedDifference
    """Second minus first."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All scores of one set; ``compare --json`` prints these fields."""

    set_name: str
    num_problems: int
    """Problems that both have, over all seeds."""
    num_left_out: int
    """Problems that only one of them has."""
    seeds: tuple[int, ...] = ()
    """Seeds that both groups have, by which differences are paired; empty where two results are
    compared, whose differences are paired by problem."""
    seeds_left_out: tuple[int, ...] = ()
    """Seeds that only one group has."""
    different_settings: tuple[str, ...] = ()
    """Settings other than the model in which the two differ, such as ``temperature 0.6 and 1.0``;
    those that one of them did not record are left out."""
    scores: tuple[ScoreDifference, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupScore:
    """One score of a group of runs."""

    set_name: str
    name: str
    by_seed: dict[int, float]
    mean: float
    low: float | None
    """Low end of Student's 95 % interval over seeds; None where there is one seed."""
    high: float | None


def evaluations_in(run_dir: Path) -> dict[int, Path]:
    """Return the results files of a training run by step, ascending; 0 is before training."""
    start = run_dir / "eval" / "start.json"
    files = {0: start} if start.exists() else {}
    for path in run_dir.glob("eval/step_*.json"):
        step = path.stem.removeprefix("step_")
        if step.isdecimal():
            files[int(step)] = path
    return dict(sorted(files.items()))


def newest_results(run_dir: Path) -> Path | None:
    """Return the file of a run's newest scores: of ``eval``, else of its last evaluated step."""
    alone = run_dir / "eval.json"
    if alone.exists():
        return alone
    return next(reversed(evaluations_in(run_dir).values()), None)


def find_group(path: Path) -> list[Path]:
    """Return the runs in a directory, or that match a pattern such as ``runs/a-seed*``.

    Sorted; empty where it is neither.
    """
    if path.is_dir():
        candidates = path.iterdir() if newest_results(path) is None else iter(())
    else:
        root = Path(path.anchor)
        candidates = root.glob(str(path.relative_to(root)))
    return sorted(
        run for run in candidates if (run / "config.yaml").exists() or newest_results(run)
    )


def read_group(run_dirs: Sequence[Path]) -> ResultsBySeed:
    """Read the newest scores of runs that differ in their seeds.

    Raises:
        ResultsError: A run has no scores, those of another step, or the seed of another run.
        OSError: A file cannot be read.
    """
    group: dict[int, Results] = {}
    files = [newest_results(run_dir) for run_dir in run_dirs]
    for run_dir, file in zip(run_dirs, files, strict=True):
        if file is None:
            raise ResultsError(
                f"{run_dir}: has no evaluation yet; finish the run, or name a group without it"
            )
        if files[0] is not None and file.name != files[0].name:
            raise ResultsError(
                f"{file}: newest evaluation must be at the step of the others, {files[0].name}; "
                "finish the runs of the group"
            )
        results = read_results(file)
        seed = results[0].settings.get("seed")
        if not isinstance(seed, int):
            raise ResultsError(f"{file}: records no seed; evaluate the run again")
        if seed in group:
            raise ResultsError(
                f"{file}: seed {seed} must be unique in its group, another run has it; give the "
                "runs of one group different seeds"
            )
        group[seed] = results
    return group


def compare_results(
    first: Results, second: Results, *, k_values: Sequence[int], common_only: bool
) -> list[Comparison]:
    """Compare every set that both have, by name; where each has one set, those two.

    Differences are ``second`` − ``first``, with a bootstrap over problems; ``k_values`` are k of
    pass@k and maj@k besides the n of both. ``common_only`` leaves out problems that only one of
    them has, instead of refusing.

    Raises:
        ResultsError: They have no set in common, or different problems.
    """
    comparisons = []
    for comparison, estimates in _pairs(first, second, k_values, common_only=common_only):
        scores = []
        for name, (first_P, second_P) in estimates.items():
            paired = paired_difference(second_P - first_P, _NUM_RESAMPLES, seed=0)
            means = float(first_P.mean()), float(second_P.mean())
            scores.append(ScoreDifference(name, *means, paired))
        comparisons.append(replace(comparison, scores=tuple(scores)))
    return comparisons


def compare_groups(
    first: ResultsBySeed, second: ResultsBySeed, *, k_values: Sequence[int], common_only: bool
) -> list[Comparison]:
    """Compare two groups of runs; runs with equal seeds are pairs, each on its own problems.

    The scores of a run are means over its problems. Their differences ``second`` − ``first``, one
    per seed, go into Student's t-test: its interval covers variation across seeds on these
    problems, not across problems. ``common_only`` leaves out seeds and problems that only one group
    has, instead of refusing.

    Raises:
        ResultsError: They have fewer than two seeds in common, or a pair cannot be compared.
    """
    seeds = sorted(first.keys() & second.keys())
    left_out = sorted(first.keys() ^ second.keys())
    if len(seeds) < 2 or (left_out and not common_only):
        raise ResultsError(
            f"A has the seeds {sorted(first)}, B {sorted(second)}, {len(seeds)} in common; "
            + ("compare these with --common" if len(seeds) > 1 else "at least 2 are needed")
        )
    by_seed = []
    for seed in seeds:
        try:
            by_seed.append(_pairs(first[seed], second[seed], k_values, common_only=common_only))
        except ResultsError as error:
            raise ResultsError(f"seed {seed}: {error}") from error
        names, other_names = ([pair.set_name for pair, _ in by_seed[n]] for n in (0, -1))
        if names != other_names:
            raise ResultsError(
                f"seed {seed}: must have the sets of seed {seeds[0]}, {', '.join(names)}, got "
                f"{', '.join(other_names)}; evaluate all runs on the same sets"
            )
    comparisons = []
    for of_set in zip(*by_seed, strict=True):
        pairs = [pair for pair, _ in of_set]
        settings = dict.fromkeys(text for pair in pairs for text in pair.different_settings)
        comparisons.append(
            Comparison(
                set_name=pairs[0].set_name,
                num_problems=sum(pair.num_problems for pair in pairs),
                num_left_out=sum(pair.num_left_out for pair in pairs),
                seeds=tuple(seeds),
                seeds_left_out=tuple(left_out),
                different_settings=tuple(settings),
                scores=_scores_over_seeds([estimates for _, estimates in of_set]),
            )
        )
    return comparisons


def group_scores(group: ResultsBySeed) -> list[GroupScore]:
    """Return the scores that all runs of a group have, in the order of its first run."""
    by_seed = {
        seed: {
            (result.name, score.name): score.value
            for result in results
            for score in result.scores
            if is_shown(score.name, result.problems)
        }
        for seed, results in sorted(group.items())
    }
    group_scores = []
    for key in next(iter(by_seed.values())):
        if all(key in scores for scores in by_seed.values()):
            values = {seed: scores[key] for seed, scores in by_seed.items()}
            values_S = np.array(list(values.values()))
            all_results = (result for results in group.values() for result in results)
            problems = [p for r in all_results if r.name == key[0] for p in r.problems]
            limits = limits_of(key[1], problems)
            low, high = (
                student_interval(values_S, limits=limits) if len(values) > 1 else (None, None)
            )
            group_scores.append(GroupScore(*key, values, float(values_S.mean()), low, high))
    return group_scores


def _scores_over_seeds(by_seed: Sequence[Estimates]) -> tuple[ScoreDifference, ...]:
    """The scores that all seeds have."""
    scores = []
    for name in by_seed[0]:
        if all(name in estimates for estimates in by_seed):
            means_S2 = [[value_P.mean() for value_P in estimates[name]] for estimates in by_seed]
            first_S, second_S = np.array(means_S2).T
            values_P = np.concatenate([v_P for estimates in by_seed for v_P in estimates[name]])
            limit = 1.0 if values_P.min() >= 0 and values_P.max() <= 1 else math.inf
            paired = difference_over_seeds(second_S - first_S, limit)
            means = float(first_S.mean()), float(second_S.mean())
            scores.append(ScoreDifference(name, *means, paired))
    return tuple(scores)


def _pairs(
    first: Results, second: Results, k_values: Sequence[int], *, common_only: bool
) -> list[tuple[Comparison, Estimates]]:
    """Every set that both have, by name; where each has one set, those two."""
    if len(first) == len(second) == 1:
        pairs = [(first[0], second[0])]
    else:
        by_name = {result.name: result for result in second}
        pairs = [(result, by_name[result.name]) for result in first if result.name in by_name]
    if not pairs:
        raise ResultsError("the results have no set in common; compare results on the same data")
    return [_pair(a, b, k_values, common_only=common_only) for a, b in pairs]


def _pair(
    a: EvalResult, b: EvalResult, k_values: Sequence[int], *, common_only: bool
) -> tuple[Comparison, Estimates]:
    """One set of both on the problems that are compared: its comparison without scores."""
    problems = _common_problems(a, b, common_only=common_only)
    differing = (
        f"{name} {json.dumps(a.settings[name])} and {json.dumps(b.settings[name])}"
        for name in _COMPARED_SETTINGS
        if name in a.settings and name in b.settings and a.settings[name] != b.settings[name]
    )
    first, second = zip(*problems, strict=True)
    num_first, num_second = len(first[0].rewards), len(second[0].rewards)
    sizes = [k for k in {*k_values, num_first, num_second} if k <= min(num_first, num_second)]
    names, first_PM = values_by_problem(first, sizes)
    other_names, second_PM = values_by_problem(second, sizes)
    # avg@k is the first score of both, whatever the number of samples.
    average = names[0] if names[0] == other_names[0] else f"{names[0]}, {other_names[0]}"
    estimates = {average: (first_PM[:, 0], second_PM[:, 0])}
    for column, name in enumerate(names):
        if column and name in other_names and is_shown(name, (*first, *second)):
            estimates[name] = first_PM[:, column], second_PM[:, other_names.index(name)]
    comparison = Comparison(
        set_name=a.name if a.name == b.name else f"{a.name}, {b.name}",
        num_problems=len(problems),
        num_left_out=len(a.problems) + len(b.problems) - 2 * len(problems),
        different_settings=tuple(differing),
    )
    return comparison, estimates


def _common_problems(
    first: EvalResult, second: EvalResult, *, common_only: bool
) -> list[tuple[EvalProblem, EvalProblem]]:
    """The problems of both, by id."""
    by_id = {problem.prompt_id: problem for problem in second.problems}
    pairs = [(p, by_id[p.prompt_id]) for p in first.problems if p.prompt_id in by_id]
    for a, b in pairs:
        if a.answer != b.answer:
            raise ResultsError(
                f"{a.prompt_id}: has the answer {a.answer!r} in A and {b.answer!r} in B: same "
                "ids, different data; compare results on the same data"
            )
    have_same = len(first.problems) == len(second.problems) == len(pairs)
    if not pairs or not (have_same or common_only):
        raise ResultsError(
            f"A has {len(first.problems)} problems of {first.name}, B {len(second.problems)} of "
            f"{second.name}, {len(pairs)} in common; compare results on the same data"
            + (", or compare these with --common" if pairs else "")
        )
    return pairs
