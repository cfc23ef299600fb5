"""Results as tables on the terminal and in markdown, and as JSON that can be read back.

What an evaluation will cost, told before it starts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from bapo_megatron.evaluation.settings import ResultsError
from bapo_megatron.files import atomic_write_text
from bapo_megatron.types import EvalProblem, EvalResult, EvalScore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import Console


SCORE_HEADINGS = ("set", "score", "value", "95 % interval")
SAMPLE_HEADINGS = (
    "set",
    "problems",
    "samples",
    "tokens mean",
    "median",
    "p95",
    "truncated",
    "no answer",
    "grading time-outs",
    "tokens",
    "time",
    "tokens/s",
)


SETTING_HEADINGS = ("set", "model", "n", "temperature", "top_p", "top_k", "longest response")


def setting_rows(results: Sequence[EvalResult]) -> list[tuple[str, ...]]:
    """A row for each set whose settings are known, under ``SETTING_HEADINGS``."""
    return [
        (
            result.name,
            str(result.settings["weights"]),
            str(result.samples_per_prompt),
            str(result.settings["temperature"]),
            str(result.settings["top_p"]),
            str(result.settings["top_k"]),
            f"{result.settings['max_response_tokens']:,}",
        )
        for result in results
        if result.settings
    ]


def score_rows(results: Sequence[EvalResult]) -> list[tuple[str, ...]]:
    """A row for each score, under ``SCORE_HEADINGS``."""
    return [
        (
            result.name,
            score.name,
            f"{score.value:.2%}",
            f"{score.low:.2%} … {score.high:.2%}",
        )
        for result in results
        for score in result.scores
    ]


def sample_rows(results: Sequence[EvalResult]) -> list[tuple[str, ...]]:
    """A row for each set, under ``SAMPLE_HEADINGS``."""
    return [
        (
            result.name,
            f"{result.num_prompts:,}",
            f"{result.num_prompts * result.samples_per_prompt:,}",
            f"{result.response_tokens_mean:,.1f}",
            f"{result.response_tokens_median:,.1f}",
            f"{result.response_tokens_p95:,.1f}",
            f"{result.truncated_share:.1%}",
            f"{result.missing_answers:,} ({1 - result.answer_found_share:.1%})",
            f"{result.grading_timeouts:,}",
            f"{result.generated_tokens:,}",
            f"{result.wall_s:,.1f} s",
            f"{result.tokens_per_s:,.0f}",
        )
        for result in results
    ]


def scoring_lines(results: Sequence[EvalResult]) -> list[str]:
    """Of each set whose score is not that of one function what it is, and failures of functions."""
    sums = [
        f"{result.name}: scored by {_sum_of(functions)}"
        for result in results
        if (functions := result.settings.get("reward", {}).get("functions", ()))
        and (len(functions) > 1 or functions[0]["weight"] != 1)
    ]
    failures = [
        f"{result.name}: a reward function failed on {result.grading_errors:,} samples and gave 0"
        for result in results
        if result.grading_errors
    ]
    return sums + failures


def _sum_of(functions: Sequence[Mapping[str, Any]]) -> str:
    """Such as ``math + 0.1 style``."""
    terms = [
        entry["name"] if entry["weight"] == 1 else f"{entry['weight']:g} {entry['name']}"
        for entry in functions
    ]
    return " + ".join(terms)


def print_results(results: Sequence[EvalResult], console: Console) -> None:
    """Print both tables."""
    for title, headings, rows in (
        ("Scores", SCORE_HEADINGS, score_rows(results)),
        ("Samples", SAMPLE_HEADINGS, sample_rows(results)),
    ):
        console.print(rich_table(title, headings, rows, num_left=1))
    for line in scoring_lines(results):
        console.print(line, markup=False, highlight=False)


def rich_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int
) -> Table:
    """A table for the terminal; the first ``num_left`` columns are aligned to the left."""
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < num_left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int) -> str:
    """The same in markdown."""
    marks = ["---" if number < num_left else "---:" for number in range(len(headings))]
    lines = [headings, marks, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_results(results: Sequence[EvalResult], json_path: Path) -> None:
    """Write the results as JSON, and as markdown beside it.

    Raises:
        OSError: A file cannot be written.
    """
    entries = ",\n".join(map(_json_of, results))
    atomic_write_text(json_path, f"[\n{entries}\n]\n")
    text = "# Evaluation\n\n"
    text += markdown_table(SCORE_HEADINGS, score_rows(results), num_left=2)
    text += "\n" + markdown_table(SAMPLE_HEADINGS, sample_rows(results), num_left=1)
    text += "\n" + markdown_table(SETTING_HEADINGS, setting_rows(results), num_left=2)
    text += "".join(f"\n{line}\n" for line in scoring_lines(results))
    text += (
        "\nIntervals: percentile bootstrap over problems. A response counts as truncated where it "
        "reached the limit of tokens. Definitions: docs/evaluation.md.\n"
    )
    atomic_write_text(json_path.with_suffix(".md"), text)


def read_results(path: Path) -> list[EvalResult]:
    """Read what ``write_results`` wrote.

    Raises:
        ResultsError: It is no such file.
        OSError: It cannot be read.
    """
    try:
        return [result_from_json(entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise ResultsError(
            f"{path}: holds no results that this version reads ({error}); give the eval.json of "
            "an evaluation, or a .jsonl of its samples"
        ) from error


def result_from_json(entry: dict[str, Any]) -> EvalResult:
    """A result from its fields as JSON values."""
    scores = tuple(EvalScore(**score) for score in entry["scores"])
    problems = tuple(
        EvalProblem(
            **{**problem, "rewards": tuple(problem["rewards"]), "votes": tuple(problem["votes"])}
        )
        for problem in entry["problems"]
    )
    return EvalResult(**{**entry, "scores": scores, "problems": problems})


def _json_of(result: EvalResult) -> str:
    """One result; each problem on a line of its own."""
    fields = asdict(result)
    problems = ",\n".join(f"      {json.dumps(problem)}" for problem in fields.pop("problems"))
    head = json.dumps(fields, indent=2).removesuffix("\n}")
    return f'{head},\n  "problems": [\n{problems}\n  ]\n}}'


_MINUTE_S = 60.0
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class SetCost:
    """The work that one set still needs."""

    name: str
    num_prompts: int
    samples_per_prompt: int
    num_done: int
    """Samples of an earlier try."""
    max_response_tokens: int

    @property
    def num_samples(self) -> int:
        """Samples still to be made."""
        return self.num_prompts * self.samples_per_prompt - self.num_done

    @property
    def max_tokens(self) -> int:
        """Response tokens if every response reaches its limit."""
        return self.num_samples * self.max_response_tokens


def describe_cost(sets: Sequence[SetCost], tokens_per_s: float) -> list[str]:
    """Lines with the samples, the tokens at most, and the time that follows from a rate.

    Args:
        sets: At least one.
        tokens_per_s: ``eval.assumed_tokens_per_s``.
    """
    lines = [
        f"{cost.name}: {cost.num_prompts:,} problems × {cost.samples_per_prompt} samples"
        + (f" − {cost.num_done:,} done" if cost.num_done else "")
        + f" = {cost.num_samples:,}, at most {cost.max_tokens:,} tokens "
        f"({cost.num_samples:,} × {cost.max_response_tokens:,})"
        for cost in sets
    ]
    num_tokens = sum(cost.max_tokens for cost in sets)
    lines.append(
        f"in all {sum(cost.num_samples for cost in sets):,} samples, at most {num_tokens:,} "
        f"tokens; assuming {tokens_per_s:,.0f} tokens/s of all servers together "
        f"(eval.assumed_tokens_per_s) at most {describe_duration(num_tokens / tokens_per_s)}, half "
        "of it where responses use half of their limit"
    )
    return lines


def describe_duration(seconds: float) -> str:
    """Such as ``4.4 hours``."""
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} seconds"
    if seconds < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} minutes"
    return f"{seconds / _HOUR_S:.1f} hours"
