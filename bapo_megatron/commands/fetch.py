"""``bapo-megatron fetch``: the models and data sets of a configuration."""

import typer
from rich.table import Table

from bapo_megatron.commands.options import ConfigArgument, OverridesArgument, load
from bapo_megatron.telemetry.console import uncut_console
from bapo_megatron.tools.fetch import fetch


def command(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """Fetch the models and data sets of CONFIG, and check those already here by checksum.

    An interrupted download continues where it ended. The exit status is 1 if something is missing.
    """
    results = list(fetch(load(config, overrides)))
    table = Table("", "what", "where", "GB", "source")
    for result in results:
        color = {"failed": "red", "unchecked": "yellow"}.get(result.state, "green")
        mark, size = f"[{color}]{result.state}[/]", f"{result.num_bytes / 1e9:.3f}"
        table.add_row(mark, result.key, result.path, size, result.text)
    uncut_console().print(table)
    if any(result.state == "failed" for result in results):
        raise typer.Exit(1)
