"""``bapo-megatron plot``: training dynamics of one or several runs as a PNG."""

from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.tools.plot import draw_dynamics


def command(
    run_dirs: Annotated[list[Path], typer.Argument(help="One or several run directories.")],
    out: Annotated[Path | None, typer.Option(help="Default: RUN_DIR/dynamics.png.")] = None,
) -> None:
    """Draw the training dynamics of one or several runs as a PNG.

    Each colour is a configuration: the mean of its seeds, in a band from minimum to maximum.
    """
    target = out or run_dirs[0] / "dynamics.png"
    draw_dynamics(run_dirs, target)
    typer.echo(f"drew {target}")
