"""math-verify as it comes: what it finds, and that nothing which it raises leaves the grader."""

import threading

import pytest
from math_verify.errors import TimeoutException

from bapo_megatron.reward import math_verify_grader
from bapo_megatron.reward.math_verify_grader import grade_by_math_verify


@pytest.mark.parametrize(
    ("response", "answer", "reward", "reason"),
    [
        (r"So \boxed{\frac{2}{4}}.", r"\frac12", 1.0, "equal"),
        (r"So \boxed{3}.", r"\frac12", 0.0, "different"),
        ("The answer is $\\sqrt{8}$.", r"2\sqrt2", 1.0, "equal"),
        (r"\boxed{5\text{ north}}", r"5\text{ south}", 1.0, "equal"),
        (r"\boxed{0.5}", '["7", "1/2"]', 1.0, "equal"),
        (r"\boxed{2\begin{pmatrix}1\\2\end{pmatrix}}", "5", 0.0, "different"),
        ("I cannot say.", "5", 0.0, "no_answer"),
    ],
)
def test_it_grades_as_math_verify_does(response, answer, reward, reason):
    score = grade_by_math_verify(response, answer)

    assert (score.reward, score.reason) == (reward, reason)
    assert score.answer_found is (reason != "no_answer")


@pytest.mark.parametrize("error", [TimeoutException, RecursionError, ValueError])
@pytest.mark.parametrize("function", ["parse", "verify"])
def test_what_math_verify_raises_is_wrong_with_its_name(monkeypatch, function, error):
    def fail(*_arguments, **_options):
        raise error

    monkeypatch.setattr(math_verify_grader, function, fail)

    score = grade_by_math_verify(r"\boxed{5}", "5")

    assert (score.reward, score.reason) == (0.0, error.__name__)


def test_a_thread_without_signals_grades_alike():
    scores = []
    thread = threading.Thread(target=lambda: scores.append(grade_by_math_verify("$5$", "5")))
    thread.start()
    thread.join()

    assert [score.reward for score in scores] == [1.0]
