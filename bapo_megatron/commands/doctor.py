"""``bapo-megatron doctor``: what was built, what will run here, and what is incompatible."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.commands.options import JsonOption, OverridesArgument, load
from bapo_megatron.runtime.processes import launched_number
from bapo_megatron.telemetry.console import rich_table, uncut_console
from bapo_megatron.tools.doctor import diagnose, probe, supported_models
from bapo_megatron.tools.preflight import check_cluster


def command(
    overrides: OverridesArgument = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="Check all nodes of this run, under torchrun."),
    ] = None,
    min_network: Annotated[
        float | None,
        typer.Option(min=0, help="GB/s of links and collectives; default: NCCL 10, gloo 0.1."),
    ] = None,
    min_disk: Annotated[
        float, typer.Option(min=0, help="GB/s that a node writes and reads.")
    ] = 0.1,
    min_free: Annotated[
        float | None, typer.Option(min=0, help="GB under run_dir; default: two checkpoints.")
    ] = None,
    models: Annotated[bool, typer.Option("--models", help="List the models that train.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Report what was built, which kernels will run, and what is incompatible.

    With --cluster, compare and measure the nodes of a run. The exit status is 1 if there is a
    problem.
    """
    if models:
        columns = ("architecture", "model_type", "models", "only with", "engines")
        described = [tuple(asdict(model).values()) for model in supported_models()]
        if as_json:
            typer.echo(json.dumps([asdict(model) for model in supported_models()], indent=2))
        else:
            uncut_console().print(rich_table("", columns, described, num_left=5))
        return
    if cluster is None:
        if overrides:
            raise typer.BadParameter("only with --cluster CONFIG", param_hint="KEY=VALUE")
        findings = diagnose(probe())
    else:
        findings = check_cluster(
            load(cluster, overrides),
            network_gb_s=min_network,
            disk_gb_s=min_disk,
            free_gb=min_free,
        )
        if launched_number("RANK", 0):
            return
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        texts = [f"{f.text}\n→ {f.remedy}" if f.remedy else f.text for f in findings]
        rows = [(f.verdict, f.topic, text) for f, text in zip(findings, texts, strict=True)]
        colors = {"ok": "green", "note": "yellow", "problem": "red"}
        headings = ("", "what", "finding")
        uncut_console().print(rich_table("", headings, rows, num_left=3, styles=colors))
    if num_problems := sum(finding.verdict == "problem" for finding in findings):
        if cluster is not None:  # the last line of torchrun, too
            noun = "problem" if num_problems == 1 else "problems"
            raise ValueError(f"doctor --cluster: {num_problems} {noun}; see the table")
        raise typer.Exit(1)
