"""Exits in others' code."""

import os
import re
import sys

import pytest

from bapo_megatron.runtime.exits import EarlyExitError, exits_noticed
from bapo_megatron.runtime.processes import RequestedExit


def status_of(block) -> tuple[int, str]:
    """Exit status of a process that runs ``block``, and what it was told."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with exits_noticed(lambda line: os.write(write, line.encode())):
                block()
            os._exit(0)
        finally:
            os._exit(99)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(read) as told:
        return os.waitstatus_to_exitcode(status), told.read()


@pytest.mark.parametrize(("code", "status"), [(0, 1), (1, 1), (7, 7), (256, 1)])
def test_an_exit_at_once_tells_its_place_and_is_no_success(code: int, status: int) -> None:
    line = exit_with.__code__.co_firstlineno + 1
    ended, message = status_of(lambda: exit_with(code))
    assert (ended, message.partition(" ended ")[0]) == (
        status,
        f"os._exit({code}) at {__file__}:{line}",
    )


def exit_with(status: int) -> None:
    os._exit(status)


def test_forked_processes_may_exit_as_they_like() -> None:
    def fork() -> None:
        children = [os.fork()]
        if children[0] == 0:
            os._exit(3)
        children.append(os.fork())
        if children[1] == 0:
            sys.exit(4)
        for child, status in zip(children, (3, 99), strict=True):  # 99: of ``status_of``
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status

    assert status_of(fork) == (0, "")


@pytest.mark.parametrize("code", [0, None, 2, "nothing to do"])
def test_an_exit_of_others_is_an_error_with_its_place(code: object) -> None:
    def leave() -> None:
        sys.exit(code)  # type: ignore[arg-type]

    line = leave.__code__.co_firstlineno + 1
    place = re.escape(f"SystemExit({code!r}) at {__file__}:{line} ")
    with pytest.raises(EarlyExitError, match=place), exits_noticed(print):
        leave()


def test_exits_that_were_asked_for_pass_and_nothing_stays_replaced() -> None:
    exit_at_once = os._exit
    with pytest.raises(RequestedExit) as raised, exits_noticed(print):
        raise RequestedExit(143)
    assert raised.value.code == 143
    assert os._exit is exit_at_once
