"""``bapo-megatron config``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bapo_megatron.commands.options import OverridesArgument, load
from bapo_megatron.config.describe import describe_keys
from bapo_megatron.config.load import dump_yaml
from bapo_megatron.runtime.processes import launched_number
from bapo_megatron.telemetry.console import rich_table
from bapo_megatron.trainer.check import check_training


def command(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG")] = None,
    overrides: OverridesArgument = None,
    key: Annotated[str, typer.Option(help="List only keys whose names contain this text.")] = "",
) -> None:
    """Print the resolved CONFIG and check it as train does; without one, list every key.

    Keys are listed with type, default and meaning: as a table on a terminal, otherwise one
    tab-separated line each.
    """
    if config is None:
        _list_keys(key)
        return
    if key:
        raise typer.BadParameter("--key lists keys of any run; leave out CONFIG")
    run_config = load(config, overrides)
    typer.echo(dump_yaml(run_config), nl=False)
    # The check needs neither servers nor the final number of ranks.
    layout = run_config.parallel
    replica_size = layout.tensor * layout.pipeline * layout.context
    world_size = launched_number("WORLD_SIZE", replica_size)
    check_training(run_config, world_size, trains_here=False)


def _list_keys(text: str) -> None:
    keys = [[part.replace("``", "") for part in key] for key in describe_keys() if text in key.name]
    if not keys:
        raise typer.BadParameter(f"no key contains '{text}'; leave out --key to list all of them")
    console = Console()
    if not console.is_terminal:
        typer.echo("\n".join("\t".join(key) for key in keys))
        return
    console.print(rich_table("", ("key", "type", "default", "meaning"), keys, num_left=4))
