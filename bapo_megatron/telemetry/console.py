"""Where tables go: a terminal, a pipe or a file."""

from __future__ import annotations

import os

from rich.console import Console

_UNCUT_WIDTH = 10_000


def uncut_console() -> Console:
    """Standard output, wide enough for every row where it is neither a terminal nor given a width.

    Rich takes 80 columns then, so that a search in a pipe finds half of the cells.
    """
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=_UNCUT_WIDTH)


def say(line: str) -> None:
    """Print a line for people on standard error, as it is."""
    Console(stderr=True).print(line, highlight=False, soft_wrap=True, markup=False)
