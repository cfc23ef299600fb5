"""``bapo-megatron compare``: two evaluations of the same problems, or two groups of runs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.commands.options import JsonOption
from bapo_megatron.config.evaluation import EvalConfig
from bapo_megatron.evaluation.results import read_results
from bapo_megatron.evaluation.samples import ResultsError
from bapo_megatron.telemetry.console import rich_table, uncut_console, visible
from bapo_megatron.tools.compare import (
    Comparison,
    compare_groups,
    compare_results,
    find_group,
    newest_results,
    read_group,
)
from bapo_megatron.types import EvalResult

_OVER_PROBLEMS = "Intervals cover variation across problems, not seeds (bootstrap over problems)."
_OVER_SEEDS = "Intervals cover variation across seeds, not problems (Student's t over seeds)."
_HELP = "Run directory or eval.json; or a group: directory of runs, or a pattern."


def command(
    first: Annotated[Path, typer.Argument(metavar="A", help=_HELP)],
    second: Annotated[
        Path, typer.Argument(metavar="B", help="Of the same kind as A; differences are B − A.")
    ],
    common: Annotated[
        bool, typer.Option("--common", help="Compare only problems and seeds that both have.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two evaluations by problem, or two groups of runs by seed.

    Two evaluations of the same problems: a paired bootstrap over problems. Two groups of runs:
    Student's paired t-test over the seeds that both have.
    """
    groups = find_group(first), find_group(second)
    if bool(groups[0]) != bool(groups[1]):
        group, other = (first, second) if groups[0] else (second, first)
        raise ResultsError(f"{group} is a group of runs, {other} is not; give two of a kind")
    k_values = EvalConfig().k_values
    try:
        if groups[0]:
            by_seed = map(read_group, groups)
            comparisons = compare_groups(*by_seed, k_values=k_values, common_only=common)
        else:
            results = map(_results_of, (first, second))
            comparisons = compare_results(*results, k_values=k_values, common_only=common)
    except ResultsError as error:
        raise ResultsError(f"{first} (A), {second} (B): {error}") from error
    if as_json:
        typer.echo(json.dumps([asdict(comparison) for comparison in comparisons], indent=2))
    else:
        _show(comparisons)


def _show(comparisons: Sequence[Comparison]) -> None:
    headings = ("set", "score", "A", "B", "B − A", "95 % interval", "p")
    rows = [
        (
            comparison.set_name,
            score.name,
            f"{score.first:.2%}",
            f"{score.second:.2%}",
            f"{score.paired.difference:+.2%}",
            f"{score.paired.low:+.2%} … {score.paired.high:+.2%}",
            f"{score.paired.p_value:.4f}",
        )
        for comparison in comparisons
        for score in comparison.scores
    ]
    uncut_console().print(rich_table("B against A", headings, rows, num_left=2))
    for comparison in comparisons:
        over = f" over {len(comparison.seeds)} seeds" if comparison.seeds else ""
        left_out = f", {comparison.num_left_out:,} left out" if comparison.num_left_out else ""
        lines = [
            f"{comparison.num_problems:,} problems{over}{left_out}",
            *(f"sampled with {text}" for text in comparison.different_settings),
        ]
        for line in lines:
            typer.echo(visible(f"{comparison.set_name}: {line}"))
    seeds, unpaired_seeds = comparisons[0].seeds, comparisons[0].seeds_left_out
    if seeds:
        unpaired = f"; left out: {', '.join(map(str, unpaired_seeds))}" if unpaired_seeds else ""
        typer.echo(f"runs paired by seed {', '.join(map(str, seeds))}{unpaired}")
    typer.echo(_OVER_SEEDS if seeds else _OVER_PROBLEMS)


def _results_of(path: Path) -> list[EvalResult]:
    file = newest_results(path) if path.is_dir() else path
    if file is None:
        raise ResultsError(f"{path}: holds no evaluation; give a run that has been evaluated")
    return read_results(file)
