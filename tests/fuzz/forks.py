"""Forks of this process, which has imported all commands, and what became of each.

A fork makes a case's files, then is the command. Nothing here starts a thread before the forks do.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 60.0
MAX_LINE_CHARS = 600
_POLL_S = 0.005
_BROKEN_CASE = 99
_COMPLAINT = re.compile(r"bapo-megatron: (.*)")


@dataclass(frozen=True)
class Case:
    """A command on bad input."""

    arguments: list[str]
    places: tuple[str, ...]
    """Texts of which the error's line must have each: file, override, field."""
    is_wrong: bool
    """Whether it must be refused; else it may be accepted."""
    target: Path | None = None
    """What the command must not leave where it fails, nor anything beside it of its name."""


@dataclass(frozen=True)
class Ended:
    """How a case ended."""

    name: str
    fault: str
    """``traceback``, ``hang``, ``accepted``, ``place``, ``half`` or ``case``; empty: none."""
    line: str
    """The error's line, or the end of what it said instead."""
    took_s: float
    command: str


def load_commands() -> None:
    """Import what the commands would import one by one, in each fork."""
    from transformers import AutoTokenizer  # noqa: F401

    import tests.preloaded  # noqa: F401
    from bapo_megatron.commands import (  # noqa: F401
        bounds,
        compare,
        config,
        convert,
        data_show,
        evaluate,
        grade,
        init,
        make_tiny,
        plan,
        plot,
        samples,
        sweep,
        train,
    )
    from bapo_megatron.policy import convert as conversion  # noqa: F401


def in_fork(work: Callable[[], None], out: Path, limit_s: float) -> int | None:
    """Call ``work`` in a fork whose output goes to ``out``; return its status, None if it hung."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
                stream.flush()
                os.dup2(os.open(f"{out}.{descriptor}", os.O_CREAT | os.O_WRONLY), descriptor)
            try:
                work()
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(bool(end.code))
            except BaseException:  # noqa: BLE001 - as Python itself does at its end
                traceback.print_exc()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        finally:
            os._exit(status)
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def run_case(name: str, make: Callable[[Path], Case], scratch: Path) -> Ended:
    """Make a case in ``scratch``, which is removed again, run its command and judge its end."""
    scratch.mkdir()
    made, out = scratch / "made", scratch / "out"
    files = scratch / "files"
    files.mkdir()

    def be_the_command() -> None:
        from bapo_megatron import cli

        try:
            case = make(files)
        except BaseException:  # noqa: BLE001 - a fault of the campaign, told apart by its status
            traceback.print_exc()
            sys.exit(_BROKEN_CASE)
        target = "" if case.target is None else str(case.target)
        made.write_text(repr((case.arguments, case.places, case.is_wrong, target)))
        os.chdir(files)
        sys.argv = ["bapo-megatron", *case.arguments]
        cli.main()

    began_s = time.monotonic()
    status = in_fork(be_the_command, out, LIMIT_S)
    took_s = time.monotonic() - began_s
    said = (scratch / "out.2").read_text(errors="replace")
    if not made.exists():
        ended = Ended(name, "case", said[-300:], took_s, "")
    else:
        arguments, places, is_wrong, target = eval(made.read_text())
        fault, line = _judge(status, said, places, is_wrong)
        if not fault and status and target and list(files.glob(f"*{Path(target).name}*")):
            fault = "half"
        ended = Ended(name, fault, line, took_s, " ".join(map(repr, arguments)))
    shutil.rmtree(scratch)
    return ended


def _judge(
    status: int | None, said: str, places: tuple[str, ...], is_wrong: bool
) -> tuple[str, str]:
    lines = [line for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if status is None:
        return "hang", last
    if "Traceback (most recent call last)" in said or status < 0:
        return "traceback", f"{status}: {last}"
    if status == 0:
        return ("accepted" if is_wrong else ""), last
    complaints = [found[1] for line in lines if (found := _COMPLAINT.fullmatch(line))]
    if len(complaints) != 1 or not _COMPLAINT.fullmatch(last):
        return "place", f"no one line at the end: {said[-1500:]!r}"
    missing = [place for place in places if place not in complaints[0]]
    if "allow_pickle" in complaints[0]:
        return "place", f"advises to run code: {complaints[0]}"
    if missing or len(complaints[0]) > MAX_LINE_CHARS or ";" not in complaints[0]:
        what = f"without {missing}" if missing else "without remedy, or too long"
        return "place", f"{what}: {complaints[0][:1500]}"
    return "", last
