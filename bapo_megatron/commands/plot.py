"""``bapo-megatron plot``: training dynamics of one or several runs as a PNG."""

import io
from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.runtime.files import atomic_write_bytes
from bapo_megatron.tools.plot import dynamics_figure


def command(
    run_dirs: Annotated[list[Path], typer.Argument(help="One or several run directories.")],
    out: Annotated[Path | None, typer.Option(help="By default RUN_DIR/dynamics.png.")] = None,
) -> None:
    """Draw the training dynamics of one or several runs as a PNG.

    Colours are runs; seeds of one configuration are their mean in a band from the smallest to the
    largest.
    """
    target = out or run_dirs[0] / "dynamics.png"
    buffer = io.BytesIO()
    dynamics_figure(run_dirs).savefig(buffer, format="png", dpi=130)
    atomic_write_bytes(target, buffer.getvalue())
    typer.echo(f"drew {target}")
