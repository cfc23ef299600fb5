"""Forks of this process, which has imported all commands, and how each ended.

A fork makes a case's files, then is the command. Nothing here starts a thread before the forks do.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 60.0
MAX_LINE_CHARS = 600
_POLL_S = 0.005
_BROKEN_CASE = 99
_IMPORTED_LATE = ("bapo_megatron.tools.report.page", "pandas")
_ERROR_LINE = re.compile(r"bapo-megatron: (.*)")


@dataclass(frozen=True)
class Case:
    """A command on bad input, in the directory of the case's files."""

    command: str | list[str]
    """Words, or a text that is divided at spaces. ``{intact}`` and ``{files}`` are directories."""
    places: tuple[str, ...] = ()
    """Texts of which the error's line must have each: file, override, field."""
    is_wrong: bool = False
    """Whether it must be refused; else it may be accepted."""
    target: str = ""
    """What the command must not leave where it fails, nor anything beside it of its name."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    name: str
    fault: str
    """``traceback``, ``hang``, ``accepted``, ``place``, ``half`` or ``case``; empty: none."""
    line: str
    """The error's line, or the end of the output instead."""
    duration_s: float
    command: str


def load_commands() -> None:
    """Import what the commands would import one by one, in each fork."""
    from transformers import AutoTokenizer  # noqa: F401

    import tests.preloaded  # noqa: F401
    from bapo_megatron import commands

    modules = pkgutil.iter_modules(commands.__path__, "bapo_megatron.commands.")
    for name in (*_IMPORTED_LATE, *(module.name for module in modules)):
        importlib.import_module(name)
    gc.freeze()  # collections in a fork would copy every page


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
    status = None
    while status is None and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        ended, wait_status = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(wait_status)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status


def run_case(
    name: str, make: Callable[[Path, Path], Case], root: Path, scratch_name: str
) -> Outcome:
    """Make a case from the intact files below ``root``, run its command and judge its end."""
    intact, scratch = root / "intact", root / scratch_name
    files, record = scratch / "files", scratch / "case.json"
    files.mkdir(parents=True)

    def be_the_command() -> None:
        from bapo_megatron import cli

        try:
            case = make(intact, files)
        except BaseException:  # noqa: BLE001 - a fault of the campaign, by its status
            traceback.print_exc()
            sys.exit(_BROKEN_CASE)
        command = case.command.split(" ") if isinstance(case.command, str) else case.command
        words = [
            word.replace("{intact}", str(intact)).replace("{files}", str(files)) for word in command
        ]
        record.write_text(json.dumps([words, case.places, case.is_wrong, case.target]))
        os.chdir(files)
        sys.argv = ["bapo-megatron", *words]
        cli.main()

    start_s = time.monotonic()
    status = in_fork(be_the_command, scratch / "out", LIMIT_S)
    duration_s = time.monotonic() - start_s
    errors = (scratch / "out.2").read_text(errors="replace")
    if not record.exists():
        outcome = Outcome(name, "case", errors[-300:], duration_s, "")
    else:
        words, places, is_wrong, target = json.loads(record.read_text())
        fault, line = _judge(status, errors, places, is_wrong)
        if not fault and status and target and list(files.glob(f"*{target}*")):
            fault = "half"
        outcome = Outcome(name, fault, line, duration_s, " ".join(map(repr, words)))
    shutil.rmtree(scratch)
    return outcome


def _judge(
    status: int | None, errors: str, places: tuple[str, ...], is_wrong: bool
) -> tuple[str, str]:
    lines = [line for line in errors.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if status is None:
        return "hang", last
    if "Traceback (most recent call last)" in errors or status < 0:
        return "traceback", f"{status}: {last}"
    if status == 0:
        return ("accepted" if is_wrong else ""), last
    messages = [match[1] for line in lines if (match := _ERROR_LINE.fullmatch(line))]
    if len(messages) != 1 or not _ERROR_LINE.fullmatch(last):
        return "place", f"no one line at the end: {errors[-1500:]!r}"
    (message,) = messages
    missing = [place for place in places if place not in message]
    if "allow_pickle" in message:
        return "place", f"advises to run code: {message}"
    if missing or len(message) > MAX_LINE_CHARS or ";" not in message:
        reason = f"without {missing}" if missing else "without remedy, or too long"
        return "place", f"{reason}: {message[:1500]}"
    return "", last
