"""``data …``: looking at prompts."""

from __future__ import annotations

from typing import Annotated

import typer

from bapo_megatron.cli_options import ConfigArgument, OverridesArgument, load
from bapo_megatron.telemetry.console import uncut_console

app = typer.Typer(no_args_is_help=True, help="Look at prompts before a run.")


@app.callback()
def _group() -> None:
    """Look at prompts before a run."""


@app.command("show")
def show(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    rows: Annotated[
        int, typer.Option(min=0, help="Prompts to print, of training and of each evaluation set.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read and render every prompt of CONFIG; needs the model's tokenizer, no GPU and no server.

    Prints counts, token lengths, shares, what was left out, training prompts that evaluation sets
    have too, and prompts as the engine will see them: the first draws of training.
    """
    run_config = load(config, overrides)
    from bapo_megatron.config.check_data import check_data

    check_data(run_config)
    from bapo_megatron.data.show import inspect_data

    report = inspect_data(run_config, rows)
    if as_json:
        typer.echo(report.to_json())
    else:
        report.print(uncut_console())
