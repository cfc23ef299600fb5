"""What a program tries in the sandbox, as root and as a user; each try succeeds without it."""

import os
from typing import Any

import pytest

from tests.sandbox.host import USER, outcomes, require_bubblewrap
from tests.sandbox.probes import EIGHT_PROCESSES, LIMITS, PROBES

require_bubblewrap()

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
USERS = [pytest.param(0, id="root", marks=AS_ROOT), pytest.param(USER, id="user")]


@pytest.fixture(scope="module")
def sandboxed() -> dict[int, dict[str, Any]]:
    uids = [0, USER] if os.geteuid() == 0 else [USER]
    return {uid: outcomes(PROBES, uid=uid, timeout_s=20) for uid in uids}


@pytest.fixture(scope="module")
def unguarded() -> dict[str, str]:
    """What the probes print under a bare bubblewrap, then without any."""
    written = [outcomes(PROBES, how=how) for how in ("bare", "none")]
    return {name: "".join(by_name[name][1] for by_name in written) for name in PROBES}


@pytest.mark.slow
@pytest.mark.parametrize("uid", USERS)
@pytest.mark.parametrize("name", PROBES)
def test_a_probe_does_not_get_through(
    sandboxed: dict[int, dict[str, Any]], name: str, uid: int
) -> None:
    ending, stdout, _ = sandboxed[uid][name]
    assert ending in ("ok", "error")
    assert "BREACH" not in stdout


@AS_ROOT
@pytest.mark.slow
@pytest.mark.parametrize("name", PROBES)
def test_a_probe_gets_through_without_the_sandbox(unguarded: dict[str, str], name: str) -> None:
    assert "BREACH" in unguarded[name]


@pytest.mark.slow
@pytest.mark.parametrize("uid", USERS)
@pytest.mark.exhaustive
def test_programs_that_never_end_or_take_too_much_end_at_their_limit(uid: int) -> None:
    programs = {name: program for name, (program, _) in LIMITS.items()}
    ended = outcomes(programs, uid=uid, timeout_s=1.5, processes=12)
    assert {name: LIMITS[name][1] | {out[0]} for name, out in ended.items()} == {
        name: endings for name, (_, endings) in LIMITS.items()
    }


@AS_ROOT
def test_processes_share_one_limit_of_memory_where_there_is_a_cgroup() -> None:
    [(ending, stdout, _)] = outcomes(
        {"eight": EIGHT_PROCESSES}, memory_limit_mb=128, timeout_s=20
    ).values()
    assert (ending, stdout.count("held") < 8) == ("memory", True)
    [(_, stdout, _)] = outcomes({"eight": EIGHT_PROCESSES}, how="bare").values()
    assert stdout.count("held") == 8
