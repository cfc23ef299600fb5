"""Runs programs in the sandbox, under a bare bubblewrap or without any, on a host with secrets.

    python -m tests.sandbox.host UID < requests.json > outcomes.json

As root, the process becomes ``UID`` once everything is imported, since Python's own files may be
readable by root alone.
"""

import contextlib
import gc
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.sandbox import SandboxConfig
from bapo_megatron.sandbox.bubblewrap import _lock, open_sandbox
from bapo_megatron.sandbox.cgroup import left_behind
from tests.sandbox.probes import CANARY, filled

REPOSITORY = Path(__file__).resolve().parents[2]
USER = 12345
PYTHON = "/usr/bin/python3"
BARE = (
    *("bwrap", "--unshare-all", "--clearenv", "--ro-bind", "/", "/"),
    *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
)


def require_bubblewrap() -> None:
    """Skip the module where bubblewrap cannot be installed; fail in CI."""
    if shutil.which("bwrap") is None:
        if os.environ.get("CI"):
            pytest.fail("bubblewrap is not installed", pytrace=False)
        pytest.skip("bubblewrap is not installed", allow_module_level=True)


def outcomes(
    programs: dict[str, str], *, uid: int = 0, how: str = "sandbox", **settings: Any
) -> dict[str, Any]:
    """How each program ended and what it wrote, run by a process of ``uid`` that has secrets."""
    request = {"programs": programs, "how": how, "settings": settings}
    process = subprocess.run(
        [sys.executable, "-m", "tests.sandbox.host", str(uid), CANARY],
        input=json.dumps(request),
        env={**os.environ, "SECRET": CANARY},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return dict(json.loads(process.stdout))


def abandoned() -> set[int]:
    """Slots with a control group that nobody uses; tests beside this one use others."""
    return {n for n in left_behind() if (lock := _lock(n)) is not None and lock.close() is None}


def children(pid: int | str = "self") -> list[int]:
    """Children of a process, with those that nobody has reaped."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def traces() -> list[object]:
    """What a sandbox could leave: processes, control groups, files, descriptors."""
    gc.collect()  # else descriptors of earlier tests may be closed between two calls
    files = [path for folder in ("/tmp", "/dev/shm", "/run") for path in Path(folder).iterdir()]
    named = {path for path in files if re.search("bapo_megatron_sandbox|bwrap|bubble", path.name)}
    return [children(), abandoned(), named, len(list(Path("/proc/self/fd").iterdir()))]


def _main(uid: int) -> None:
    request = json.load(sys.stdin)
    if uid and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        secret = folder / "secret"
        secret.write_text(CANARY)
        os.set_inheritable(os.open(secret, os.O_RDONLY), True)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind("")  # a free abstract name
        local.listen()
        programs = {
            name: filled(
                program,
                file=str(secret),
                port=server.getsockname()[1],
                name=local.getsockname().decode(),
                pid=os.getpid(),
            )
            for name, program in request["programs"].items()
        }
        if request["how"] == "sandbox":
            sandbox = stack.enter_context(
                contextlib.closing(open_sandbox(SandboxConfig(**request["settings"])))
            )
            results = {name: sandbox.run(program) for name, program in programs.items()}
            written = {name: (o.ending, o.stdout, o.stderr) for name, o in results.items()}
        else:
            command = BARE if request["how"] == "bare" else ()
            written = {name: _bare(command, program) for name, program in programs.items()}
    json.dump(written, sys.stdout)


def _bare(command: tuple[str, ...], program: str) -> tuple[str, str, str]:
    process = subprocess.run(
        [*command, PYTHON, "-I", "-c", program],
        check=False,
        capture_output=True,
        text=True,
        close_fds=False,
        timeout=60,
    )
    return "ok" if process.returncode == 0 else "error", process.stdout, process.stderr


if __name__ == "__main__":
    _main(int(sys.argv[1]))
