"""``bapo-megatron fetch``: the models and data sets of a configuration."""

import typer

from bapo_megatron.commands.options import ConfigArgument, OverridesArgument, load
from bapo_megatron.telemetry.console import rich_table, uncut_console
from bapo_megatron.tools.fetch import fetch


def command(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """Fetch the models and data sets of CONFIG, and check those already here by checksum.

    An interrupted download continues where it ended. The exit status is 1 if something is missing.
    """
    results = list(fetch(load(config, overrides)))
    headings = ("", "what", "where", "GB", "source")
    rows = [(r.state, r.key, r.path, f"{r.num_bytes / 1e9:.3f}", r.text) for r in results]
    colors = {"failed": "red", "unchecked": "yellow", "there": "green", "fetched": "green"}
    uncut_console().print(rich_table("", headings, rows, num_left=5, styles=colors))
    if any(result.state == "failed" for result in results):
        raise typer.Exit(1)
