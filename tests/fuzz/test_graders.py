"""Answers that nobody writes never fail a built-in grader."""

import asyncio
import os
import time

import pytest

from bapo_megatron.reward.math_answer import grade_math_answer
from tests.fuzz.graders import expressions, grade, strings
from tests.sandbox.host import require_bubblewrap

require_bubblewrap()

BATCHES = int(os.environ.get("BAPO_TEST_GRADINGS", "3"))
"""Of thirty texts each."""


@pytest.mark.slow
def test_no_answer_fails_a_built_in_grader() -> None:
    texts = strings(20 * BATCHES, seed=5) + expressions(10 * BATCHES, seed=5)

    totals = asyncio.run(grade(texts))

    assert totals.faults == []
    assert totals.reasons.total() == (30 * 5 + 1) * BATCHES
    assert len(totals.limits) <= BATCHES


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r"\boxed{x^{x^{x^{x^{x^{x^{2}}}}}}}", "too_large"),
        (r"\boxed{" + "{" * 20 + "7" + "}" * 20 + "}", "equal_value"),
        (r"\boxed{" + "{" * 20 + "8" + "}" * 20 + "}", "different"),
    ],
)
def test_towers_and_needless_braces_are_judged_in_time(text: str, reason: str) -> None:
    began_s = time.process_time()

    assert grade_math_answer(text, "7.0").reason == reason
    assert time.process_time() - began_s < 30.0
