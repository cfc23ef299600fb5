"""Programs and cells in pydantic-monty."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bapo_megatron.config.sandbox import SandboxConfig
from bapo_megatron.sandbox.base import Outcome, SandboxError, SandboxLostError
from bapo_megatron.sandbox.load import open_sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bapo_megatron.sandbox.base import Sandbox

pytest.importorskip("pydantic_monty")

LIMITS = {
    "while True: pass": "timeout",
    "x = []\nwhile True: x.append([1] * 1000)": "memory",
    "x = 'a' * (10 << 30)": "memory",
    "while True: print('x' * 99)": "output",
    "def f(): return f()\nf()": "error",
    "raise MemoryError('memory is full')": "error",
}


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    config = SandboxConfig(kind="monty", timeout_s=1, memory_limit_mb=64, max_output_bytes=100_000)
    with closing(open_sandbox(config)) as sandbox:
        yield sandbox


def test_cells_share_variables_and_the_last_value_is_shown(sandbox: Sandbox) -> None:
    session = sandbox.session()
    assert session.run("x = 6") == Outcome("ok")
    assert session.run("print('é', end='')\nx * 7") == Outcome("ok", "é42\n")
    assert session.run("1 / 0").stdout.endswith("ZeroDivisionError: division by zero\n")
    assert session.run("x") == Outcome("ok", "6\n")
    session.close()


@pytest.mark.parametrize(("program", "ending"), LIMITS.items())
def test_a_limit_ends_a_program_and_others_go_on(
    sandbox: Sandbox, program: str, ending: str
) -> None:
    assert sandbox.run(program).ending == ending
    assert sandbox.run("print(1)") == Outcome("ok", "1\n")


@pytest.mark.parametrize(
    "program",
    [
        "open('/etc/passwd').read()",
        "import os\nos.environ['HOME']",
        "import os\nos.listdir('/')",
        "import subprocess",
        "import socket",
        "import ctypes",
        "__import__('os').system('true')",
        "().__class__.__base__.__subclasses__()",
    ],
)
def test_the_host_cannot_be_reached(sandbox: Sandbox, program: str) -> None:
    outcome = sandbox.run(f"print({program!r})\n{program}\nprint('BREACH')")
    assert (outcome.ending, "\nBREACH" in outcome.stdout) == ("error", False)
    python = subprocess.run(
        [sys.executable, "-c", f"{program}\nprint('BREACH')"], capture_output=True, text=True
    )
    assert python.stdout.endswith("BREACH\n")


def test_a_killed_process_is_a_lost_sandbox_and_replaced(sandbox: Sandbox) -> None:
    session = sandbox.session()
    session.run("x = 1")
    for child in Path("/proc/self/task").glob("*/children"):
        for pid in child.read_text().split():
            if "monty" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(int(pid), signal.SIGKILL)
    with pytest.raises(SandboxLostError, match="pydantic-monty crashed"):
        session.run("x")
    assert session.has_ended
    assert sandbox.run("print(1)") == Outcome("ok", "1\n")


def test_standard_input_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="no standard input in monty; use bubblewrap"):
        sandbox.run("print(1)", "text")
