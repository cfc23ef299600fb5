"""Two results on the same problems, compared problem by problem."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from bapo_megatron.evaluation.estimators import PairedDifference, paired_difference
from bapo_megatron.evaluation.settings import ResultsError
from bapo_megatron.evaluation.summary import values_by_problem
from bapo_megatron.types import EvalProblem, EvalResult

_COMPARED_SETTINGS = (
    *("temperature", "top_p", "top_k", "max_response_tokens", "prompts", "reward"),
    *("environment", "max_turns"),
)


@dataclass(frozen=True, slots=True)
class ScoreDifference:
    """One score of both results."""

    name: str
    first: float
    second: float
    paired: PairedDifference
    """Second minus first."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All scores of one set; ``compare --json`` prints these fields."""

    set_name: str
    num_problems: int
    """Those that both have."""
    num_left_out: int
    """Those that only one of them has."""
    different_settings: tuple[str, ...]
    """Settings other than the model in which the two differ, such as ``temperature 0.6 and 1.0``;
    those that one of them did not record are left out."""
    scores: tuple[ScoreDifference, ...]


def compare_results(
    first: Sequence[EvalResult],
    second: Sequence[EvalResult],
    *,
    k_values: Sequence[int],
    num_resamples: int,
    seed: int,
    common_only: bool,
) -> list[Comparison]:
    """Compare every set that both have, by name; where each has one set, those two.

    Differences are ``second`` − ``first``; ``k_values`` are k of pass@k and maj@k besides the n of
    both. ``common_only`` leaves out problems that only one of them has, instead of refusing.

    Raises:
        ResultsError: They have no set in common, or different problems.
    """
    if len(first) == len(second) == 1:
        pairs = [(first[0], second[0])]
    else:
        by_name = {result.name: result for result in second}
        pairs = [(result, by_name[result.name]) for result in first if result.name in by_name]
    if not pairs:
        names = (", ".join(result.name for result in each) or "none" for each in (first, second))
        raise ResultsError(
            f"the results have no set in common: {' against '.join(names)}; compare results on the "
            "same data"
        )
    compared = []
    for a, b in pairs:
        problems = _common(a, b, common_only=common_only)
        differing = (
            f"{name} {json.dumps(a.settings[name])} and {json.dumps(b.settings[name])}"
            for name in _COMPARED_SETTINGS
            if name in a.settings and name in b.settings and a.settings[name] != b.settings[name]
        )
        compared.append(
            Comparison(
                set_name=a.name if a.name == b.name else f"{a.name}, {b.name}",
                num_problems=len(problems),
                num_left_out=len(a.problems) + len(b.problems) - 2 * len(problems),
                different_settings=tuple(differing),
                scores=_differences(problems, k_values, num_resamples, seed),
            )
        )
    return compared


def _common(
    first: EvalResult, second: EvalResult, *, common_only: bool
) -> list[tuple[EvalProblem, EvalProblem]]:
    """The problems of both, by id."""
    by_id = {problem.prompt_id: problem for problem in second.problems}
    pairs = [(p, by_id[p.prompt_id]) for p in first.problems if p.prompt_id in by_id]
    for a, b in pairs:
        if a.answer != b.answer:
            raise ResultsError(
                f"{a.prompt_id}: has the answer {a.answer!r} in A and {b.answer!r} in B: other "
                "data under the same names; compare results on the same data"
            )
    have_same = len(first.problems) == len(second.problems) == len(pairs)
    if not pairs or not (have_same or common_only):
        raise ResultsError(
            f"A has {len(first.problems)} problems of {first.name}, B {len(second.problems)} of "
            f"{second.name}, {len(pairs)} in common; compare results on the same data"
            + (", or compare these with --common" if pairs else "")
        )
    return pairs


def _differences(
    pairs: Sequence[tuple[EvalProblem, EvalProblem]],
    k_values: Sequence[int],
    num_resamples: int,
    seed: int,
) -> tuple[ScoreDifference, ...]:
    first, second = zip(*pairs, strict=True)
    num_first, num_second = len(first[0].rewards), len(second[0].rewards)
    sizes = [k for k in {*k_values, num_first, num_second} if k <= min(num_first, num_second)]
    names, first_PM = values_by_problem(first, sizes)
    others, second_PM = values_by_problem(second, sizes)
    # avg@k is the first score of both, whatever the number of samples.
    shown = names[0] if names[0] == others[0] else f"{names[0]}, {others[0]}"
    shared = [(name, names.index(name), others.index(name)) for name in names[1:] if name in others]
    differences = []
    for name, column, other in [(shown, 0, 0), *shared]:
        a_P, b_P = first_PM[:, column], second_PM[:, other]
        paired = paired_difference(b_P - a_P, num_resamples, seed)
        differences.append(ScoreDifference(name, float(a_P.mean()), float(b_P.mean()), paired))
    return tuple(differences)
