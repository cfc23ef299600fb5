"""Programs and cells in bubblewrap, and what is left of them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo_megatron.config.sandbox import SandboxConfig
from bapo_megatron.sandbox.base import Outcome, SandboxError, SandboxLostError
from bapo_megatron.sandbox.bubblewrap import BubblewrapSandbox, open_sandbox
from bapo_megatron.sandbox.cgroup import Cgroup
from tests.sandbox.host import REPOSITORY, abandoned, children, require_bubblewrap, traces

require_bubblewrap()

WAIT = "import time\ntime.sleep(20)"


@pytest.fixture
def sandbox() -> Iterator[BubblewrapSandbox]:
    with contextlib.closing(
        BubblewrapSandbox(SandboxConfig(timeout_s=10, max_output_bytes=100_000))
    ) as sandbox:
        yield sandbox


IS_MAIN = (
    "import pickle\nclass A: pass\n"
    "if __name__ == '__main__': print(type(pickle.loads(pickle.dumps(A()))))"
)
ECHOES = "import sys\nprint(input()[::-1])\nsys.stderr.write(sys.stdin.read())"
OUTCOMES = {
    "input and two outputs": (ECHOES, "abc\nrest é", Outcome("ok", "cba\n", "rest é")),
    "input left unread": ("print(input())", "1\n" + "x" * 3_000_000, Outcome("ok", "1\n")),
    "main module": (IS_MAIN, "", Outcome("ok", "<class '__main__.A'>\n")),
    "too much": (
        "while True: print('x' * 99)",
        "",
        Outcome("output", ("x" * 99 + "\n") * 1000),
    ),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_program_has_its_input_and_its_output(sandbox: BubblewrapSandbox, name: str) -> None:
    program, stdin, outcome = OUTCOMES[name]
    assert sandbox.run(program, stdin) == outcome


def test_an_error_is_shown_as_by_the_interpreter(sandbox: BubblewrapSandbox) -> None:
    outcome = sandbox.run("def f(x):\n    return 1 / x\n\n\nf(0)")
    assert (outcome.ending, outcome.stdout) == ("error", "")
    lines = [line for line in outcome.stderr.splitlines() if "^" not in line]
    assert lines == [
        "Traceback (most recent call last):",
        '  File "<program>", line 5, in <module>',
        "    f(0)",
        '  File "<program>", line 2, in f',
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
    ]


@pytest.mark.parametrize(
    "program", ["import sys; sys.exit(3)", "import os; os._exit(1)", "(", "\0"]
)
def test_other_ends_than_the_last_line_are_errors(sandbox: BubblewrapSandbox, program: str) -> None:
    assert sandbox.run(program).ending == "error"


def test_a_program_may_be_any_text(sandbox: BubblewrapSandbox) -> None:
    outcome = sandbox.run("print(ascii('\ud800 é'))" + " " * 300_000)
    assert outcome.ending in ("ok", "error")  # SyntaxError for the surrogate
    assert "surrogates not allowed" in outcome.stderr


def test_a_program_has_what_the_interpreter_adds_at_its_start(sandbox: BubblewrapSandbox) -> None:
    python = SandboxConfig().python
    program = "import sys; print(*sys.path[1:]); exit(3)"
    expected = subprocess.check_output(
        [python, "-s", "-c", program[:-9]], text=True, cwd="/", env={}
    )
    assert sandbox.run(program) == Outcome("error", expected, "")


def test_a_sandbox_that_cannot_join_its_control_group_is_one_line(
    sandbox: BubblewrapSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(group: Cgroup, pid: int) -> None:
        raise PermissionError(13, "Permission denied")

    if sandbox._own_slot().cgroup is None:
        pytest.skip("no control group can be created here")
    monkeypatch.setattr(Cgroup, "add", refuse)
    before = children()
    with pytest.raises(SandboxError, match="bubblewrap does not start"):
        sandbox.run("print(1)")
    assert set(children()) <= set(before)


def test_cells_share_variables_and_the_last_value_is_shown(sandbox: BubblewrapSandbox) -> None:
    session = sandbox.session()
    assert session.run("import math\nx = 6") == Outcome("ok")
    assert session.run("print('é', end='')\nx * 7") == Outcome("ok", "é42\n")
    failed = session.run("y = x\n1 / 0")
    assert failed.ending == "error"
    assert failed.stdout.endswith("ZeroDivisionError: division by zero\n")
    assert session.run("y") == Outcome("ok", "6\n")
    assert session.run("input()").stdout.endswith("EOFError: EOF when reading a line\n")
    assert session.run("import sys; sys.exit()").stdout.endswith("SystemExit\n")
    assert not session.has_ended


def test_a_session_ends_with_its_interpreter_and_at_a_limit(sandbox: BubblewrapSandbox) -> None:
    exited, endless = sandbox.session(), sandbox.session()
    assert exited.run("print('bye', flush=True)\nimport os\nos._exit(0)") == Outcome(
        "exit", "bye\n"
    )
    assert endless.run("print('hi', flush=True)\nwhile 1: pass", 0.5) == Outcome("timeout", "hi\n")
    assert (exited.has_ended, endless.has_ended) == (True, True)


SPINS = """
import threading
number = 0
def spin():
    global number
    while True: number += 1
threading.Thread(target=spin, daemon=True).start()
"""
CHAIN = """
import os
if os.fork() == 0:
    while True:
        if os.fork(): os._exit(0)
"""


def test_a_paused_session_runs_nothing_until_its_next_cell(sandbox: BubblewrapSandbox) -> None:
    others = set(children())
    session = sandbox.session()
    before = int(session.run(SPINS + "number").stdout)
    session.pause()
    [monitor] = set(children()) - others
    [[program]] = map(children, children(monitor))
    tasks = list(Path(f"/proc/{program}/task").iterdir())
    assert [stat_of(task)[0] for task in tasks] == ["T", "T"]
    assert int(session.run("number").stdout) >= before
    assert not session.has_ended


@pytest.mark.parametrize("code", [CHAIN, "import subprocess\nsubprocess.Popen(['sleep', '9'])"])
def test_a_session_that_left_processes_behind_ends_when_it_pauses(
    sandbox: BubblewrapSandbox, code: str
) -> None:
    before = traces()
    session = sandbox.session()
    session.run(code)
    session.pause()
    assert (session.has_ended, traces()) == (True, before)


def test_a_timer_of_the_kernel_cannot_wake_a_paused_session(sandbox: BubblewrapSandbox) -> None:
    create = (
        "import ctypes, struct\n"
        "event = struct.pack('qii48x', 0, 18, 0)\n"  # SIGCONT, SIGEV_SIGNAL
        "timer = ctypes.c_int()\n"
        "ctypes.CDLL(None).timer_create(1, event, ctypes.byref(timer))"
    )
    assert sandbox.session().run(create) == Outcome("ok", "-1\n")


def test_programs_and_sessions_leave_nothing() -> None:
    before = traces()
    with contextlib.closing(BubblewrapSandbox(SandboxConfig(timeout_s=0.5))) as sandbox:
        for program in ("print(1)", "while True: pass", "1/0", "import os\nos.fork()\nos.fork()"):
            sandbox.run(program)
        for _ in range(20):
            sandbox.run("open('/tmp/x', 'w').write('x')")
        sandbox.session().run("x = 1")
    assert traces() == before


def sandbox_of(pid: int | str = "self") -> tuple[int, int]:
    """The monitor and the init of bubblewrap, once a program runs."""
    while True:
        with contextlib.suppress(FileNotFoundError, ValueError):
            for monitor in children(pid):
                if inits := [child for child in children(monitor) if children(child)]:
                    return monitor, inits[0]
        time.sleep(0.01)


def kill_sandboxes(times: int, part: int) -> None:
    """Kill this process's next sandboxes from outside, while programs run in them."""
    for _ in range(times):
        pid = sandbox_of()[part]
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1], ids=["monitor", "init"])
def test_a_program_whose_sandbox_is_killed_runs_again(
    sandbox: BubblewrapSandbox, part: int
) -> None:
    killer = threading.Thread(target=kill_sandboxes, args=(1, part))
    killer.start()
    outcome = sandbox.run("import time\ntime.sleep(1.5)\nprint('done')")
    killer.join()
    assert outcome == Outcome("ok", "done\n")


def test_a_program_whose_sandbox_is_lost_twice_is_not_wrong(sandbox: BubblewrapSandbox) -> None:
    killer = threading.Thread(target=kill_sandboxes, args=(2, 0))
    killer.start()
    with pytest.raises(SandboxLostError, match="was killed while a program ran"):
        sandbox.run(WAIT)
    killer.join()


def test_a_program_that_kills_itself_is_wrong(sandbox: BubblewrapSandbox) -> None:
    assert sandbox.run("import os; os.kill(os.getpid(), 9)") == Outcome("error")
    with pytest.raises(SandboxLostError) as raised:
        sandbox.session().run("import os; os.kill(os.getpid(), 9)")
    assert raised.value.outcome == Outcome("exit")


def stat_of(folder: Path) -> list[str]:
    """The fields of a process or thread from its state on."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def has_ended(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return stat_of(Path(f"/proc/{pid}"))[0] == "Z"
    return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_programs_end_with_their_owner(number: signal.Signals) -> None:
    code = (
        "from bapo_megatron.config.sandbox import SandboxConfig\n"
        "from bapo_megatron.sandbox.bubblewrap import BubblewrapSandbox\n"
        "BubblewrapSandbox(SandboxConfig(timeout_s=60)).run('''\n"
        "import ctypes, os, signal\n"
        "ctypes.CDLL(None).prctl(1, 0)\n"
        "for n in range(1, 32):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except OSError: pass\n"
        "os.setpgid(0, 0) if os.fork() else os.setsid()\n"
        "while True: pass\n"
        "''')"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY)
    _, init = sandbox_of(owner.pid)
    owner.send_signal(number)
    owner.wait()
    # It ends last of its namespace. Who reaps it depends on the processes above this one.
    for _ in range(500):
        if not has_ended(init):
            time.sleep(0.02)
    assert has_ended(init)
    with contextlib.closing(BubblewrapSandbox(SandboxConfig())) as sandbox:
        sandbox.run("")  # takes the slot that was left
    assert abandoned() == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_each_sandbox_of_root_has_a_user_of_its_own(sandbox: BubblewrapSandbox) -> None:
    others = set(children())  # of earlier tests
    sessions = [sandbox.session() for _ in range(2)]
    for session in sessions:
        session.run("x = 1")
    uids = set()
    for monitor in set(children()) - others:
        for init in children(monitor):
            status = Path(f"/proc/{init}/status").read_text()
            uids.add(re.search(r"Uid:\t(\d+)", status)[1])  # type: ignore[index]
    assert len(uids) == 2
    assert all(60578 <= int(uid) < 61184 for uid in uids)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the sandbox's user can read, as pytest's are not."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_what_cannot_be_mounted_is_one_line(folder: Path) -> None:
    with pytest.raises(SandboxError, match=r"does not start: Can't find source path .*missing"):
        open_sandbox(SandboxConfig(read_only=(folder / "missing",)))


def test_an_interpreter_that_cannot_be_read_is_one_line(folder: Path) -> None:
    config = SandboxConfig(python=folder / "python3", read_only=(folder,))
    with pytest.raises(SandboxError, match=r"execvp .*python3: No such file") as raised:
        open_sandbox(config)
    assert "\n" not in str(raised.value)


def test_a_link_to_an_interpreter_that_the_sandbox_does_not_show_is_named(folder: Path) -> None:
    (folder / "python3").symlink_to("/opt/pythons/3.12/bin/python3.12")
    config = SandboxConfig(python=folder / "python3", read_only=(folder,))
    with pytest.raises(SandboxError) as raised:
        open_sandbox(config)
    assert str(raised.value) == (
        f"{folder}/python3 is a link to /opt/pythons/3.12/bin/python3.12, which the sandbox does "
        "not show; add /opt/pythons/3.12 to read_only"
    )


def test_python_outside_of_what_the_sandbox_shows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"python must be below /usr .* got /opt/python"):
        SandboxConfig(python=Path("/opt/python"))


def test_directories_of_read_only_can_be_read_and_not_written(folder: Path) -> None:
    (folder / "data").write_text("here")
    with contextlib.closing(BubblewrapSandbox(SandboxConfig(read_only=(folder,)))) as sandbox:
        assert sandbox.run(f"print(open('{folder}/data').read())").stdout == "here\n"
        assert "Read-only" in sandbox.run(f"open('{folder}/data', 'w')").stderr
