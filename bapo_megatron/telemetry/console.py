"""Output for people: lines, tables, entries, progress, and their log; time per phase."""

import asyncio
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import indent
from types import MappingProxyType
from typing import Any, Self

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from bapo_megatron.errors import StoppedError, describe_cause
from bapo_megatron.runtime.processes import describe_exit

_PLAIN_INTERVAL_S = 10.0
"""Minimum time between two lines of progress without a terminal."""
_REPORT_INTERVAL_S = 0.5
_VISIBLE = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F), 0xFFFD),
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
}
"""Replacements of control characters, some of which reverse the order of text."""
_UNCUT_COLUMNS = 10_000
_STYLES = {"heading": "bold", "fact": "dim", "environment": "cyan", "trained": "green"}
"""Terminal styles of the kinds of an entry's parts; other kinds are plain text."""

_LOG = logging.getLogger(__name__)
"""Gets what ``say`` and ``show`` print, for ``console_kept_in``."""


class _VisibleConsole(Console):
    """Makes control characters ``visible`` in strings, table cells and titles.

    For a ``Text``, the caller must do it.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def uncut_console() -> Console:
    """Return standard output, wide enough for every row unless a terminal or ``COLUMNS`` limits it.

    In a pipe, Rich would assume 80 columns and cut cells that people may want to search.
    """
    console = _VisibleConsole()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return _VisibleConsole(width=_UNCUT_COLUMNS)


def visible(text: str) -> str:
    """Return a text with visible control characters, such as ``␛``; tabs and newlines stay."""
    return text.translate(_VISIBLE)


def say(line: str) -> None:
    """Print a line for people on standard error, verbatim except for control characters."""
    _VisibleConsole(stderr=True).print(Text(visible(line)), soft_wrap=True)
    _LOG.info("%s", visible(line))


def show(part: str | Table, style: str = "") -> None:
    """Print a line, as ``say`` does, or a table for people on standard output."""
    console = uncut_console()
    if isinstance(part, str):
        console.print(Text(visible(part), style), soft_wrap=True)
        _LOG.info("%s", visible(part))
    else:
        console.print(part)
        plain = io.StringIO()
        _VisibleConsole(
            file=plain, width=_UNCUT_COLUMNS, color_system=None, force_terminal=False
        ).print(part)
        _LOG.info("\n%s", plain.getvalue().rstrip())


def rich_table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    num_left: int,
    styles: Mapping[str, str] = MappingProxyType({}),
) -> Table:
    """Build a table for the terminal, with texts verbatim, without Rich's markup.

    The first ``num_left`` columns are left-aligned. ``styles`` are Rich's, by a cell's text.
    """
    table = Table(title=escape(title))
    for number, heading in enumerate(headings):
        side: JustifyMethod = "left" if number < num_left else "right"
        table.add_column(escape(heading), justify=side, overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell), styles.get(cell, "")) for cell in row))
    return table


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int) -> str:
    """Return a Markdown table with the first ``num_left`` columns left-aligned."""
    marks = ["---" if number < num_left else "---:" for number in range(len(headings))]
    cells = ([" ".join(cell.replace("|", "\\|").splitlines()) for cell in row] for row in rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, marks, *cells))


def print_table(
    console: Console,
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    num_left: int,
) -> None:
    """Print a table: drawn on a terminal, else as Markdown without the title."""
    if console.is_terminal:
        console.print(rich_table(title, headings, rows, num_left=num_left))
    else:
        console.out(visible(markdown_table(headings, rows, num_left=num_left)), end="")


def print_entry(console: Console, title: str, parts: Sequence[tuple[str, str]]) -> None:
    """Print an entry as Markdown, with colours on a terminal.

    ``parts`` are pairs of kind and text. A ``heading`` or ``fact`` is a line; other kinds, written
    by a model or a data file, are indented blocks, which their text cannot end.
    """
    lines = [Text(f"\n### {visible(title)}", "bold")]
    for kind, text in parts:
        form = {"heading": "\n**{}**", "fact": "- {}"}.get(kind)
        shown = form.format(visible(text)) if form else "\n" + indent(visible(text), "    ")
        lines.append(Text(shown, _STYLES.get(kind, "")))
    console.print(Text("\n").join(lines), soft_wrap=True)


@contextmanager
def console_kept_in(path: Path) -> Iterator[None]:
    """Append the output of ``say`` and ``show`` in the block to ``path``, with times.

    Also warnings of every logger, which still go to standard error, and the block's error.
    """
    file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    # Some libraries log everything.
    file.addFilter(lambda record: record.name == __name__ or record.levelno >= logging.WARNING)
    root = logging.getLogger()
    # Python uses ``lastResort`` only if no logger has a handler.
    handlers = [file] if root.handlers or not logging.lastResort else [file, logging.lastResort]
    level = _LOG.level
    _LOG.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        is_failure = isinstance(error, Exception) and not isinstance(error, StoppedError)
        text = describe_cause(error)
        if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
            text = describe_exit(128 - error.code)  # from ``processes.end_by_exception``
        _LOG.info("%s", text, exc_info=is_failure)
        raise
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        _LOG.setLevel(level)
        file.close()


class ProgressLine:
    """A status line on standard error, updated in place; plain lines without a terminal."""

    def __init__(self) -> None:
        self._console = _VisibleConsole(stderr=True)
        self._status = self._console.status("starting") if self._console.is_terminal else None
        self._text, self._last_print_s = "", time.monotonic()
        """Without a terminal, the last line printed: equal ones are not repeated."""
        self._file: Path | None = None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def move_to(self, file: Path) -> None:
        """Without a terminal, write the newest line to ``file`` from now on, not between rows."""
        self._file = file

    def update(self, text: str) -> None:
        """Show the progress, such as ``rollout 12: 40/64 groups, 2100 tokens/s``."""
        if self._status is not None:
            self._status.update(Text(visible(text)))
        elif text != self._text and time.monotonic() - self._last_print_s >= _PLAIN_INTERVAL_S:
            with suppress(OSError):  # a full disk must not end a run over its progress
                if self._file is None:
                    self._console.print(Text(visible(text)), soft_wrap=True)
                else:
                    self._file.write_text(f"{text}\n", encoding="utf-8")
            self._text, self._last_print_s = text, time.monotonic()


@contextmanager
def reporting(report: Callable[[], None]) -> Iterator[None]:
    """Call ``report`` at once and then twice a second until the block ends."""

    async def repeat() -> None:
        while True:
            report()
            await asyncio.sleep(_REPORT_INTERVAL_S)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()


def describe_rate(num_tokens: int, began_s: float) -> str:
    """Return such as ``, 2100 tokens/s`` since ``began_s`` (``time.monotonic``); '' without any."""
    return f", {num_tokens / (time.monotonic() - began_s):.0f} tokens/s" if num_tokens else ""


class Pulse:
    """The phase of a process and its last heartbeat; recording one takes under a microsecond."""

    def __init__(self) -> None:
        self.note("start")

    def note(self, phase: str) -> None:
        """Begin a phase."""
        self.phase, self.num_beats, self.beat_s = phase, 0, time.monotonic()

    def beat(self) -> None:
        """Record a heartbeat: progress of this process or of one that it waits for."""
        self.num_beats += 1
        self.beat_s = time.monotonic()


class PhaseTimer:
    """Adds up wall time by phase name, in seconds, for the current step and for the whole run."""

    def __init__(self) -> None:
        self.pulse = Pulse()
        """Records the phase."""
        self._step_s: dict[str, float] = {}
        self.total_s: dict[str, float] = {}
        """Seconds by phase since the timer was created."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block, also if it raises."""
        start, outer = time.perf_counter(), self.pulse.phase
        self.pulse.note(name)
        try:
            yield
        finally:
            self.pulse.note(outer)
            duration_s = time.perf_counter() - start
            for sums in (self._step_s, self.total_s):
                sums[name] = sums.get(name, 0.0) + duration_s

    def end_step(self) -> dict[str, float]:
        """Return this step's seconds by phase and start the next step at zero."""
        step_s, self._step_s = self._step_s, {}
        return step_s
