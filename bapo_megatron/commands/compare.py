"""``bapo-megatron compare``: two evaluations of the same problems."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.commands.options import JsonOption
from bapo_megatron.commands.regrade import run_graded, settings_beside
from bapo_megatron.config.evaluation import EvalConfig
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.evaluation.compare import compare_results
from bapo_megatron.evaluation.report import read_results, rich_table
from bapo_megatron.evaluation.samples import read_samples
from bapo_megatron.evaluation.settings import ResultsError
from bapo_megatron.evaluation.summary import summarise, votes_pool
from bapo_megatron.telemetry.console import uncut_console
from bapo_megatron.types import EvalResult


def command(
    first: Annotated[
        Path, typer.Argument(metavar="A", help="eval.json, a directory with one, or samples.jsonl.")
    ],
    second: Annotated[Path, typer.Argument(metavar="B", help="The other; differences are B − A.")],
    resamples: Annotated[int, typer.Option(min=100, help="Resamples of the bootstrap.")] = 10000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    common: Annotated[
        bool, typer.Option("--common", help="Compare only the problems that both have.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two evaluations of the same problems by a paired bootstrap."""
    if os.path.realpath(first) == os.path.realpath(second):
        raise ResultsError(f"{first}: must differ from B, got the same twice; give two evaluations")
    results = _results_of(first), _results_of(second)
    try:
        found = compare_results(
            *results,
            k_values=EvalConfig().k_values,
            num_resamples=resamples,
            seed=seed,
            common_only=common,
        )
    except ResultsError as error:
        raise ResultsError(f"{first} (A), {second} (B): {error}") from error
    if as_json:
        typer.echo(json.dumps([asdict(comparison) for comparison in found], indent=2))
        return
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
        for comparison in found
        for score in comparison.scores
    ]
    uncut_console().print(rich_table("B against A", headings, rows, num_left=2))
    for comparison in found:
        left_out = f", {comparison.num_left_out:,} left out" if comparison.num_left_out else ""
        typer.echo(f"{comparison.set_name}: {comparison.num_problems:,} problems{left_out}")
        for difference in comparison.different_settings:
            typer.echo(f"{comparison.set_name}: sampled with different {difference}")


def _results_of(path: Path) -> list[EvalResult]:
    """Results as they were written, or recomputed from the recorded rewards of a samples file."""
    if path.is_dir():
        path = path / "eval.json"
    if not path.is_file():
        raise ResultsError(
            f"{path}: no such file; give an eval.json, a directory with one, or a .jsonl of samples"
        )
    if path.suffix != ".jsonl":
        return read_results(path)

    async def count() -> EvalResult:
        settings = settings_beside(path)
        async with votes_pool(RewardConfig()) as votes:
            return await summarise(
                str(settings.get("name", path.stem)),
                read_samples(path),
                votes,
                settings=settings,
                k_values=EvalConfig().k_values,
                num_resamples=EvalConfig().bootstrap_resamples,
                seed=0,
            )

    return [run_graded(count())]
