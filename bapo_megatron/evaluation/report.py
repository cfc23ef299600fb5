"""Results as tables and as JSON that can be read back."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bapo_megatron.config.evaluation import MAX_SAMPLES
from bapo_megatron.evaluation.settings import MAX_NUMBER, ResultsError
from bapo_megatron.evaluation.summary import is_shown
from bapo_megatron.runtime.calls import decode_json
from bapo_megatron.runtime.files import atomic_write_text, read_regular
from bapo_megatron.types import EvalResult

_SCORE_HEADINGS = ("set", "score", "value", "95 % interval")
_SAMPLE_COLUMNS: dict[str, Callable[[EvalResult], str]] = {
    "set": lambda r: r.name,
    "problems": lambda r: f"{r.num_prompts:,}",
    "samples": lambda r: f"{r.num_prompts * r.samples_per_prompt:,}",
    "tokens mean": lambda r: f"{r.response_tokens_mean:,.1f}",
    "median": lambda r: f"{r.response_tokens_median:,.1f}",
    "p95": lambda r: f"{r.response_tokens_p95:,.1f}",
    "truncated": lambda r: f"{r.truncated_share:.1%}",
    "no answer": lambda r: f"{r.missing_answers:,} ({1 - r.answer_found_share:.1%})",
    "grading time-outs": lambda r: f"{r.grading_timeouts:,}",
    "tokens": lambda r: f"{r.generated_tokens:,}",
    "time": lambda r: f"{r.wall_s:,.1f} s",
    "tokens/s": lambda r: f"{r.tokens_per_s:,.0f}",
}
_SETTING_COLUMNS: dict[str, Callable[[EvalResult], str]] = {
    "set": lambda r: r.name,
    "model": lambda r: str(r.settings["weights"]),
    "n": lambda r: str(r.samples_per_prompt),
    "temperature": lambda r: str(r.settings["temperature"]),
    "top_p": lambda r: str(r.settings["top_p"]),
    "top_k": lambda r: str(r.settings["top_k"]),
    "longest response": lambda r: f"{r.settings['max_response_tokens']:,}",
}
_SETTINGS = {"weights", "temperature", "top_p", "top_k", "max_response_tokens"}
"""What the columns need; samples from elsewhere may lack some."""


def print_results(results: Sequence[EvalResult], console: Console) -> None:
    """Print scores and samples as tables, and ``scoring_lines``."""
    console.print(rich_table("Scores", _SCORE_HEADINGS, _score_rows(results), num_left=1))
    rows = _rows(_SAMPLE_COLUMNS, results)
    console.print(rich_table("Samples", list(_SAMPLE_COLUMNS), rows, num_left=1))
    for line in scoring_lines(results):
        console.print(line, markup=False, highlight=False)


def write_results(results: Sequence[EvalResult], json_path: Path) -> None:
    """Write the results as JSON, and as markdown beside it.

    Raises:
        OSError: A file cannot be written.
    """
    entries = ",\n".join(map(_json_of, results))
    atomic_write_text(json_path, f"[\n{entries}\n]\n")
    known = [result for result in results if result.settings.keys() >= _SETTINGS]
    tables = (
        markdown_table(_SCORE_HEADINGS, _score_rows(results), num_left=2),
        markdown_table(list(_SAMPLE_COLUMNS), _rows(_SAMPLE_COLUMNS, results), num_left=1),
        markdown_table(list(_SETTING_COLUMNS), _rows(_SETTING_COLUMNS, known), num_left=2),
    )
    text = "# Evaluation\n\n" + "\n".join(tables)
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
        results = decode_json(list[EvalResult], read_regular(path))
        _check(results)
    except ValueError as error:
        raise ResultsError(
            f"{path}: holds no results that this version reads ({error}); give the eval.json of "
            "an evaluation, or a .jsonl of its samples"
        ) from error
    return results


def _check(results: Sequence[EvalResult]) -> None:
    """Raise ValueError, with the field, for results that contradict themselves."""
    if not results:
        raise ValueError("the list must have a set, got none")
    for number, result in enumerate(results):
        problems, num_each = result.problems, result.samples_per_prompt
        if result.name in {earlier.name for earlier in results[:number]}:
            raise ValueError(f"'[{number}].name' must differ from those before, got {result.name}")
        if not 1 <= num_each <= MAX_SAMPLES:
            raise ValueError(
                f"'[{number}].samples_per_prompt' must be from 1 to {MAX_SAMPLES}, got {num_each}"
            )
        if not problems or len({problem.prompt_id for problem in problems}) < len(problems):
            raise ValueError(f"'[{number}].problems' must be some, no two with one prompt_id")
        for row, problem in enumerate(problems):
            place, given = f"'[{number}].problems[{row}]'", problem.rewards
            if not len(given) == len(problem.votes) == num_each:
                raise ValueError(
                    f"{place} must have samples_per_prompt = {num_each} rewards and votes, got "
                    f"{len(given)} and {len(problem.votes)}"
                )
            if not all(abs(reward) <= MAX_NUMBER for reward in given):
                raise ValueError(f"{place} must have rewards up to {MAX_NUMBER:g}, got {given}")


def scoring_lines(results: Sequence[EvalResult]) -> list[str]:
    """Return what each score is made of, unless it is one function's, and failures of functions."""
    sums = []
    for result in results:
        functions = result.settings.get("reward", {}).get("functions", ())
        terms = [
            each["name"] if each["weight"] == 1 else f"{each['weight']:g} {each['name']}"
            for each in functions
        ]
        if terms and terms != [functions[0]["name"]]:
            sums.append(f"{result.name}: scored by {' + '.join(terms)}")
    failures = [
        f"{result.name}: a reward function failed on {result.grading_errors:,} samples and gave 0"
        for result in results
        if result.grading_errors
    ]
    return sums + failures


def _score_rows(results: Sequence[EvalResult]) -> list[list[str]]:
    return [
        [result.name, score.name, f"{score.value:.2%}", f"{score.low:.2%} … {score.high:.2%}"]
        for result in results
        for score in result.scores
        if is_shown(score.name, result.problems)
    ]


def _rows(
    columns: Mapping[str, Callable[[EvalResult], str]], results: Sequence[EvalResult]
) -> list[list[str]]:
    return [[cell_of(result) for cell_of in columns.values()] for result in results]


def rich_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int
) -> Table:
    """Make a table for the terminal, texts as they are: Rich's markup has no effect.

    The first ``num_left`` columns are aligned to the left.
    """
    table = Table(title=escape(title))
    for number, heading in enumerate(headings):
        table.add_column(escape(heading), justify="left" if number < num_left else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int) -> str:
    """Return a table in Markdown, the first ``num_left`` columns aligned to the left."""
    marks = ["---" if number < num_left else "---:" for number in range(len(headings))]
    cells = ([" ".join(cell.replace("|", "\\|").splitlines()) for cell in row] for row in rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, marks, *cells))


def _json_of(result: EvalResult) -> str:
    """One result; each problem on a line of its own."""
    fields = asdict(result)
    problems = ",\n".join(f"      {json.dumps(problem)}" for problem in fields.pop("problems"))
    head = json.dumps(fields, indent=2).removesuffix("\n}")
    return f'{head},\n  "problems": [\n{problems}\n  ]\n}}'
