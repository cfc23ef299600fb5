"""``data …``: looking at prompts, and at what became of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bapo_megatron.cli_options import OverridesArgument, load
from bapo_megatron.telemetry.console import uncut_console

if TYPE_CHECKING:
    from bapo_megatron.data.show import DataReport
    from bapo_megatron.data.show_dump import DumpReport

app = typer.Typer(no_args_is_help=True, help="Look at prompts before a run, at responses after it.")


@app.callback()
def _group() -> None:
    """Look at prompts before a run, at responses after it."""


@app.command("show")
def show(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|DUMP.parquet", help="YAML file of a run, or a rollout dump of one."
        ),
    ],
    overrides: OverridesArgument = None,
    rows: Annotated[
        int,
        typer.Option(
            "--rows",
            "-n",
            min=0,
            help="Prompts to print, of training and of each evaluation set; or samples of a dump.",
        ),
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read and render every prompt of CONFIG; needs the model's tokenizer, no GPU and no server.

    Prints counts, token lengths, shares, what was left out, training prompts that evaluation sets
    have too, and prompts as the engine will see them: the first draws of training.

    With a rollout dump: its first samples, by turns of policy and environment.
    """
    is_dump = file.suffix == ".parquet"
    report = _show_dump(file, overrides, rows) if is_dump else _show_config(file, overrides, rows)
    if as_json:
        typer.echo(report.to_json())
    else:
        report.print(uncut_console())


def _show_config(config: Path, overrides: list[str] | None, rows: int) -> DataReport:
    run_config = load(config, overrides)
    from bapo_megatron.config.check_data import check_data

    check_data(run_config)
    from bapo_megatron.data.show import inspect_data

    return inspect_data(run_config, rows)


def _show_dump(dump: Path, overrides: list[str] | None, rows: int) -> DumpReport:
    if overrides:
        raise typer.BadParameter(
            f"{dump} is a rollout dump, which takes no '{overrides[0]}'; leave it out"
        )
    from bapo_megatron.data.show_dump import inspect_dump

    return inspect_dump(dump, rows)
