"""Two results on the same problems, compared problem by problem."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bapo_megatron.evaluation.estimators import PairedDifference, paired_difference
from bapo_megatron.evaluation.settings import ResultsError
from bapo_megatron.evaluation.summary import values_by_problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.types import EvalProblem, EvalResult

COMPARISON_HEADINGS = ("set", "score", "A", "B", "B − A", "95 % interval", "p")


_COMPARED_SETTINGS = ("temperature", "top_p", "top_k", "max_response_tokens", "prompts", "reward")


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
    """All scores of one set."""

    set_name: str
    num_problems: int
    """Those that both have."""
    num_left_out: int
    """Those that only one of them has."""
    different_settings: tuple[str, ...]
    """How the samples of one were made otherwise than those of the other, beside the model."""
    scores: tuple[ScoreDifference, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each score, under ``COMPARISON_HEADINGS``."""
        return [
            (
                self.set_name,
                score.name,
                f"{score.first:.2%}",
                f"{score.second:.2%}",
                f"{score.paired.difference:+.2%}",
                f"{score.paired.low:+.2%} … {score.paired.high:+.2%}",
                f"{score.paired.p_value:.4f}",
            )
            for score in self.scores
        ]

    def to_json_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


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

    Args:
        first: A.
        second: B; differences are B − A.
        k_values: Of pass@k and maj@k, beside the n of both.
        num_resamples: Of the bootstrap.
        seed: Of the bootstrap.
        common_only: Leave out problems that only one of them has, instead of refusing.

    Raises:
        ResultsError: They have no set in common, or other problems.
    """
    if len(first) == len(second) == 1:
        pairs = [(first[0], second[0])]
    else:
        by_name = {result.name: result for result in second}
        pairs = [(result, by_name[result.name]) for result in first if result.name in by_name]
    if not pairs:
        raise ResultsError(
            f"the results have no set in common: {_names(first)} against {_names(second)}; compare "
            "results on the same data"
        )
    return [
        _compare(a, b, k_values, num_resamples, seed, common_only=common_only) for a, b in pairs
    ]


def _compare(
    first: EvalResult,
    second: EvalResult,
    k_values: Sequence[int],
    num_resamples: int,
    seed: int,
    *,
    common_only: bool,
) -> Comparison:
    pairs, num_left_out = _common(first, second, common_only=common_only)
    most = min(first.samples_per_prompt, second.samples_per_prompt)
    sizes = [
        k for k in {*k_values, first.samples_per_prompt, second.samples_per_prompt} if k <= most
    ]
    names, first_PM = values_by_problem([a for a, _ in pairs], sizes)
    others, second_PM = values_by_problem([b for _, b in pairs], sizes)
    scores = []
    for column, name in enumerate(names):
        # avg@k is the first of both, whatever the number of samples.
        other = 0 if column == 0 else others.index(name) if name in others else None
        if other is None:
            continue
        a_P, b_P = first_PM[:, column], second_PM[:, other]
        paired = paired_difference(b_P - a_P, num_resamples, seed)
        shown = name if column or name == others[0] else f"{name}, {others[0]}"
        scores.append(ScoreDifference(shown, float(a_P.mean()), float(b_P.mean()), paired))
    name = first.name if first.name == second.name else f"{first.name}, {second.name}"
    return Comparison(
        name, len(pairs), num_left_out, _different_settings(first, second), tuple(scores)
    )


def _different_settings(first: EvalResult, second: EvalResult) -> tuple[str, ...]:
    """Such as ``temperature 0.6 and 1.0``; nothing where they are not known."""
    a, b = first.settings, second.settings
    return tuple(
        f"{name} {json.dumps(a[name])} and {json.dumps(b[name])}"
        for name in _COMPARED_SETTINGS
        if name in a and name in b and a[name] != b[name]
    )


def _common(
    first: EvalResult, second: EvalResult, *, common_only: bool
) -> tuple[list[tuple[EvalProblem, EvalProblem]], int]:
    """The problems of both, by id, and how many only one has."""
    by_id = {problem.prompt_id: problem for problem in second.problems}
    pairs = [(p, by_id[p.prompt_id]) for p in first.problems if p.prompt_id in by_id]
    num_left_out = len(first.problems) + len(second.problems) - 2 * len(pairs)
    for a, b in pairs:
        if a.answer != b.answer:
            raise ResultsError(
                f"{a.prompt_id}: has the answer {a.answer!r} in A and {b.answer!r} in B: other "
                "data under the same names; compare results on the same data"
            )
    if not pairs or (num_left_out and not common_only):
        remedy = " or compare these with --common" if pairs else ""
        raise ResultsError(
            f"A has {len(first.problems)} problems of {first.name}, B {len(second.problems)} of "
            f"{second.name}, {len(pairs)} in common; compare results on the same data"
            f"{',' if remedy else ''}{remedy}"
        )
    return pairs, num_left_out


def _names(results: Sequence[EvalResult]) -> str:
    return ", ".join(result.name for result in results) or "none"
