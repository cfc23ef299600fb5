"""The commands about evaluation: ``eval`` and ``compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.telemetry.console import uncut_console


def evaluate(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="YAML file of the run; --from works without."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides: eval.temperature=0.6"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue an evaluation; short for resume=true."),
    ] = False,
    samples: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Grade this samples file again, without a server; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --from: directory for what was graded again.")
    ] = None,
) -> None:
    """Score the configured evaluation sets with model.path, or grade its samples again."""
    from bapo_megatron.config.load import load_config

    if out is not None and not samples:
        raise typer.BadParameter("--out needs --from; an evaluation writes into its run_dir")
    if config is None and not samples:
        raise typer.BadParameter("give CONFIG, or --from with a samples file")
    if resume and samples:
        raise typer.BadParameter("--from samples nothing, so that there is nothing to --resume")
    given = [*(overrides or []), *(["resume=true"] if resume else [])]
    run_config = load_config(config, given) if config is not None else None
    from bapo_megatron.evaluation.report import print_results

    if samples:
        from bapo_megatron.trainer.regrade import regrade

        results = regrade(samples, run_config, out)
    else:
        from bapo_megatron.trainer.evaluate import evaluate_model

        assert run_config is not None, "refused above"
        results = evaluate_model(run_config)
    print_results(results, uncut_console())


def compare(
    first: Annotated[
        Path, typer.Argument(metavar="A", help="eval.json, a directory with one, or samples.jsonl.")
    ],
    second: Annotated[Path, typer.Argument(metavar="B", help="The same; differences are B − A.")],
    resamples: Annotated[int, typer.Option(min=100, help="Of the bootstrap.")] = 10000,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    common: Annotated[
        bool, typer.Option("--common", help="Compare the problems that both have.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two evaluations on the same problems by a paired bootstrap."""
    from bapo_megatron.evaluation.compare import COMPARISON_HEADINGS
    from bapo_megatron.evaluation.report import rich_table
    from bapo_megatron.trainer.regrade import compare_files

    found = compare_files(first, second, num_resamples=resamples, seed=seed, common_only=common)
    if as_json:
        typer.echo(json.dumps([comparison.to_json_dict() for comparison in found], indent=2))
        return
    rows = [row for comparison in found for row in comparison.rows()]
    uncut_console().print(rich_table("B against A", COMPARISON_HEADINGS, rows, num_left=2))
    for comparison in found:
        left_out = f", {comparison.num_left_out:,} left out" if comparison.num_left_out else ""
        typer.echo(f"{comparison.set_name}: {comparison.num_problems:,} problems{left_out}")
        for difference in comparison.different_settings:
            typer.echo(f"{comparison.set_name}: sampled with different {difference}")
