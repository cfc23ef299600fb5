"""``bapo-megatron config``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.commands.options import OverridesArgument, load
from bapo_megatron.config.describe import print_keys
from bapo_megatron.config.load import dump_yaml
from bapo_megatron.telemetry.console import uncut_console


def command(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]")] = None,
    overrides: OverridesArgument = None,
) -> None:
    """Print the resolved CONFIG; without one, every key with type, default and meaning."""
    if config is not None:
        typer.echo(dump_yaml(load(config, overrides)), nl=False)
    else:
        print_keys(uncut_console())
