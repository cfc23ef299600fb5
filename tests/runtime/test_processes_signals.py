"""Ending by signals: tests of ``bapo_megatron.runtime.processes``."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from bapo_megatron.runtime.processes import run_async

PROGRAM = textwrap.dedent(
    """
    import signal, sys, time, weakref
    from bapo_megatron.runtime.processes import end_by_exception

    class Anything:
        pass

    def wait_for_signal(_):
        print("in the callback", flush=True)
        time.sleep(60)

    def set_slowly(*arguments, set_timer=signal.setitimer):
        signal.setitimer = set_timer
        set_timer(*arguments)
        time.sleep(0.1)

    if {is_slow}:  # as where another process gets the core
        signal.setitimer = set_slowly

    end_by_exception()
    try:
        print("ready", flush=True)
        for _ in range({num_callbacks}):
            thing = Anything()
            reference = weakref.ref(thing, wait_for_signal)
            del thing  # an exception of the callback is dropped by Python
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
    """
)


def end_by(
    number: signal.Signals, status: int, program: str, *, num_lines: int = 1, times: int = 1
) -> str:
    """Signal a program after its first lines; it cleans up. Return its standard error."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(num_lines):
        process.stdout.readline()
    for _ in range(times):
        process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == status, err
    assert out.splitlines()[-1] == "cleaned up"
    return err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -2), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    ("num_callbacks", "is_slow"), [(0, False), (1, False), (1, True), (3, False)]
)
def test_a_signal_ends_the_process_wherever_it_arrives(
    number: signal.Signals, status: int, num_callbacks: int, is_slow: bool
) -> None:
    program = PROGRAM.format(num_callbacks=num_callbacks, is_slow=is_slow)
    err = end_by(number, status, program, num_lines=2 if num_callbacks else 1)
    assert "Exception ignored" not in err


ASYNC_PROGRAM = textwrap.dedent(
    """
    import asyncio
    from bapo_megatron.runtime.processes import end_by_exception, run_async

    async def spin():
        while True:  # so that the signal arrives in a task that nobody awaits
            await asyncio.sleep(0)

    async def main():
        tasks = [asyncio.create_task(spin()) for _ in range(50)]
        print("ready", flush=True)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)  # cleaning up may wait
            for task in tasks:
                task.cancel()
            print("cleaned up", flush=True)

    end_by_exception()
    run_async(main())
    """
)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -2), (signal.SIGTERM, 143)])
def test_a_signal_cancels_asynchronous_work_wherever_it_arrives(
    number: signal.Signals, status: int
) -> None:
    err = end_by(number, status, ASYNC_PROGRAM, times=3)  # only the first one counts
    assert "never retrieved" not in err


def test_asynchronous_work_that_ends_leaves_the_handlers_as_they_were() -> None:
    async def work() -> int:
        assert signal.getsignal(signal.SIGINT) is not before
        return 3

    before = signal.getsignal(signal.SIGINT)
    assert run_async(work()) == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_other_dropped_exceptions_are_still_shown() -> None:
    program = PROGRAM.format(num_callbacks=1, is_slow=False).replace("time.sleep(60)", "1 / 0")
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.stderr.count("ZeroDivisionError") == 2  # the callback's and the program's
    assert "Exception ignored" in result.stderr
