"""``bapo-megatron doctor``: what was built, what will run here, and what is incompatible."""

import json
from dataclasses import asdict

import typer
from rich.table import Table

from bapo_megatron.commands.options import JsonOption
from bapo_megatron.telemetry.console import uncut_console
from bapo_megatron.tools.doctor import diagnose, probe


def command(as_json: JsonOption = False) -> None:
    """Report what was built, which kernels will run, and what is incompatible.

    The exit status is 1 if there is a problem.
    """
    findings = diagnose(probe())
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        table = Table("", "what", "finding")
        colors = {"ok": "green", "note": "yellow", "problem": "red"}
        for finding in findings:
            mark = f"[{colors[finding.verdict]}]{finding.verdict}[/]"
            remedy = f"\n→ {finding.remedy}" if finding.remedy else ""
            table.add_row(mark, finding.topic, finding.text + remedy)
        uncut_console().print(table)
    if any(finding.verdict == "problem" for finding in findings):
        raise typer.Exit(1)
