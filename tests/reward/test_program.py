"""Programs against tests of every form; the graders run in worker processes."""

import json
import re
import shutil

import pytest

from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.reward.base import Response, RewardError, RowError, Score
from bapo_megatron.reward.rows import check_row
from tests.reward.program_rows import (
    ADD,
    LESS,
    LINES,
    RIGHT,
    TESTS,
    UNUSABLE,
    WRONG,
    fenced,
    module,
)
from tests.reward.scoring import score
from tests.sandbox.host import require_bubblewrap

require_bubblewrap()

SECTION = {
    "functions": [{"name": "code", "function": "program"}],
    "timeout_s": 60,
    "program": {"sandbox": {"timeout_s": 20}},
}
HALF = (fenced("print(3)"), LINES)
"""It passes one of two tests."""


def graded(*rows: tuple[str, str], **program: object) -> list[Score]:
    """The score of each response to tests."""
    section = {**SECTION, "program": {**SECTION["program"], **program}}
    alone, _ = score(section, *(Response(text, answer) for text, answer in rows))
    return alone


def outcomes(*rows: tuple[str, str], **program: object) -> list[tuple[float, str]]:
    """Reward and reason of each response."""
    return [(s.reward, s.reason) for s in graded(*rows, **program)]


@pytest.mark.parametrize("rows", RIGHT)
def test_right_programs_score_1(rows: dict[str, tuple[str, str]]) -> None:
    assert dict(zip(rows, outcomes(*rows.values()), strict=True)) == dict.fromkeys(
        rows, (1.0, "passed")
    )


def test_a_module_of_tests_is_run_whole() -> None:
    answers = [module(code) for code in TESTS.values()]
    right = outcomes(*((fenced(ADD), answer) for answer in answers))
    wrong = outcomes(*((fenced(LESS), answer) for answer in answers))
    assert dict(zip(TESTS, right, strict=True)) == dict.fromkeys(TESTS, (1.0, "passed"))
    assert dict(zip(TESTS, wrong, strict=True)) == dict.fromkeys(TESTS, (0.0, "error"))


@pytest.mark.parametrize("reason", WRONG)
def test_responses_that_are_wrong_or_cheat_score_0(reason: str) -> None:
    sandbox = {"timeout_s": 2 if reason in ("timeout", "output") else 20}
    rows = WRONG[reason]
    ended = [(s.reward, s.reason, s.answer_found) for s in graded(*rows, sandbox=sandbox)]
    assert ended == [(0.0, reason, reason != "no_program")] * len(rows)


def test_rows_whose_reference_holds_no_tests_are_refused_and_others_are_not() -> None:
    program = RewardConfig.model_validate(SECTION)
    for answer, reason in UNUSABLE.items():
        with pytest.raises(
            RowError, match="must hold tests of a program, got .*" + re.escape(reason)
        ):
            check_row(program, answer, {})
    usable = [answer for rows in RIGHT for _, answer in rows.values()]
    usable += [module(code) for code in TESTS.values()]
    usable += ["42", "3 4\n5", "class A", "from here", json.dumps(LINES)]
    for answer in usable:
        check_row(program, answer, {})
    gym = {"functions": [{"name": "gym", "function": "gym"}]}
    with pytest.raises(RowError, match="it scores rows of sets with gym only"):
        check_row(RewardConfig.model_validate(gym), "1", {})


def test_references_that_math_can_never_compare_are_refused() -> None:
    for answer in ("7" * 1001, "{" * 30 + "1" + "}" * 30, json.dumps(["7" * 1001, "x" * 2000])):
        with pytest.raises(RowError, match=r"answers of up to 1000 characters .*, got \d+"):
            check_row(RewardConfig(), answer, {})
    solution = "First, add. " * 200 + r"So \boxed{7}."
    for answer in (r"\frac{1}{2}", "7" * 1000, "[1]" * 9, solution, json.dumps(["7" * 1001, "7"])):
        check_row(RewardConfig(), answer, {})


def test_a_share_of_the_tests_can_be_the_reward() -> None:
    assert outcomes(HALF, max_tests=1) == [(1.0, "passed")]
    [scored] = graded(HALF, score="share")
    assert (scored.reward, scored.reason) == (0.5, "wrong")
    assert scored.metrics == {"code/passed_share": 0.5}
    assert scored.extracted == "print(3)\n"


def test_the_configuration_is_checked() -> None:
    with pytest.raises(
        ValueError, match=r"timeout_s must be above program\.sandbox\.timeout_s = 5"
    ):
        RewardConfig.model_validate({**SECTION, "timeout_s": 5, "program": {}})


def test_without_a_sandbox_the_start_fails_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert shutil.which("bwrap") is None
    with pytest.raises(
        RewardError, match=r"'program' needs a sandbox: bubblewrap .*apt-get install"
    ):
        score(SECTION, Response(fenced("print(1)"), "1"))
