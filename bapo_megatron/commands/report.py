"""``bapo-megatron report``: an HTML page about runs."""

from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.runtime.files import atomic_write_text


def command(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="One or several run directories.")
    ],
    out: Annotated[Path | None, typer.Option(help="Default: report.html in the first run.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer directory, if the run's own is missing.")
    ] = None,
) -> None:
    """Write one HTML page about one run or several: curves, checks and rollouts to read."""
    from bapo_megatron.tools.report.page import page_data, render

    target = out or run_dirs[0] / "report.html"
    page = render(page_data(run_dirs, tokenizer))
    atomic_write_text(target, page)
    typer.echo(f"wrote {target} ({len(page.encode()) / 1e6:.1f} MB)")
