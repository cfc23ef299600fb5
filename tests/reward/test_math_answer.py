import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.reward.extraction import extract_answer
from bapo_megatron.reward.math_answer import grade_math_answer
from bapo_megatron.reward.math_symbolic import contradicts_itself
from bapo_megatron.reward.math_text import as_number, canonical


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\text{it is } \boxed{5}}", "5"),
        (r"\boxed {7}", "7"),
        (r"\\boxed{7}", "7"),
        (r"\boxed{3} and cut off \boxed{4", "3"),
        (r"} \boxed{8} {", "8"),
        ("The answer is 5. Wait.\nThe final answer is $6$.", "$6$"),
        ("the answer is 5, no, the answer is 6", "6"),
        ("**Answer:** 12", "12"),
        ("Answer:\n12\nThank you", "12"),
        ("48 + 24 = 72\n#### 72", "72"),
        ("<answer>1</answer>, or rather <answer> 2 </answer>", "2"),
    ],
)
def test_the_final_answer_is_found(response, text):
    extracted = extract_answer(response)

    assert extracted is not None
    assert extracted.text == text


@pytest.mark.parametrize(
    "response",
    ["", "42", r"\boxed{}", r"\boxed{42", "I answer nothing", "####", "<answer> </answer>"],
)
def test_a_response_without_a_final_answer_has_none(response):
    assert extract_answer(response) is None
    score = grade_math_answer(response, "42")
    assert (score.reward, score.answer_found, score.extracted) == (0.0, False, "")


def test_an_answer_in_a_sentence_is_compared_by_its_value():
    assert grade_math_answer("The answer is 18 dollars.", "18").reward == 1.0
    assert grade_math_answer("The answer is $\\frac{3}{6}$. I hope so.", "0.5").reward == 1.0
    assert grade_math_answer("The answer is 19 dollars.", "18").reward == 0.0
    assert grade_math_answer("The answer is given by 18.", "18").reward == 1.0


@pytest.mark.parametrize(
    ("response", "reference", "reason"),
    [
        (r"\boxed{ 1/2}", "1/2", "equal_text"),
        (r"\boxed{1,000}", "1000.0", "equal_number"),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", "equal_value"),
        (r"\boxed{3}", "4", "different"),
        (r"\boxed{5\text{ km}}", r"5\text{ m}", "unit_differs"),
        (r"\boxed{3}", "[]", "different"),
        (r"\boxed{3}", "()", "different"),
        ("I cannot say", "4", "no_answer"),
        (r"\boxed{" + "1+" * 600 + "1}", "4", "too_long"),
        (r"\boxed{9^{9^{9^{9}}}}", "4", "too_large"),
        (r"\boxed{" + "(" * 60 + "4" + ")" * 60 + "}", "4", "too_large"),
    ],
)
def test_the_reason_says_why(response, reference, reason):
    score = grade_math_answer(response, reference)

    assert (score.reason, score.answer_found) == (reason, reason != "no_answer")


@pytest.mark.parametrize(
    "answer",
    ["9^{9^{9^{9}}}", "10^{10^{10}}", "1000000!", "(10^9)!", r"\binom{10^9}{10^8}",
     r"\frac{1}{2}^{10^{20}}", "x^{x^{x^{x^{2}}}}", "x^{" * 20 + "2" + "}" * 20,
     "{" * 200 + "2" + "}" * 200, "((" * 100 + "2" + "))" * 100,
     "2^{2^{2000}}", "2^{" + "9" * 301 + "}", r"2^{\infty}", "(" * 24 + "40" + ")" * 24 + r"\%",
     "2^{2^{2^{2^{2^{2}}}}}", r"\prod_{n=1}^\infty n",
     r"\sum_{k=1}^{99999}\frac1k", r"\int" * 5 + "x" + "dx" * 5, "(x+y+z)^{99}",
     r"10^{10^{5}}\cdot 10^{10^{5}}"],
)  # fmt: skip
def test_what_nobody_can_evaluate_is_refused_at_once(answer):
    start_s = time.process_time()

    score = grade_math_answer(rf"\boxed{{{answer}}}", "1")

    assert (score.reward, score.reason) == (0.0, "too_large")
    assert time.process_time() - start_s < 5


def test_a_reference_longer_than_any_number_python_reads_is_compared_as_text():
    digits = "7" * 5000

    assert grade_math_answer(r"\boxed{7}", digits).reward == 0.0
    assert grade_math_answer(rf"#### {digits}", digits).reward == 0.0  # the answer is too long


@pytest.mark.parametrize(
    ("chain", "is_contradiction"),
    [
        ("x=2=3", True),
        ("x=2=2", False),
        ("x=2(3)=6", False),
        (r"x=\frac{0}{0}=5", False),
        ("x=10^{10^{10}}=5", False),
        ("x=10^{10^{10}}=4=5", True),
    ],
)
def test_a_chain_contradicts_itself_where_two_sides_that_can_be_evaluated_differ(
    chain, is_contradiction
):
    assert contradicts_itself(chain) is is_contradiction


def test_the_marks_around_an_answer_are_no_part_of_it():
    assert canonical(r"\[\($\boxed{\boxed{5}}$\)\]") == "5"


def test_a_number_of_more_digits_than_any_answer_has_no_value():
    assert as_number("7" * 1000) == 7 * (10**1000 - 1) // 9
    assert as_number("7" * 1001) is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_integers_are_right_if_and_only_if_they_are_equal(one, other):
    for spelling in (f"{one}", f"{one:,}", f"{one}.0", f"${one}$", rf"{one}\text{{ apples}}"):
        assert grade_math_answer(rf"\boxed{{{spelling}}}", str(one)).reward == 1.0
        assert grade_math_answer(rf"\boxed{{{spelling}}}", str(other)).reward == float(one == other)
