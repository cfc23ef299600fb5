from __future__ import annotations

import json
import time

import pytest

from bapo_megatron.data.schemas import parse_answer
from bapo_megatron.reward.math_answer import extract_answer, grade_math_answer


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
    ],
)
def test_the_final_answer_is_found(response, text):
    extracted = extract_answer(response)

    assert extracted is not None
    assert extracted.text == text


@pytest.mark.parametrize(
    "response", ["", "42", r"\boxed{}", r"\boxed{42", "I answer nothing", "####"]
)
def test_a_response_without_a_final_answer_has_none(response):
    assert extract_answer(response) is None
    score = grade_math_answer(response, "42")
    assert (score.reward, score.answer_found, score.extracted) == (0.0, False, "")


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        ("42", "42"),
        ("25", "025"),
        ("1,234", "1234"),
        (r"1\,234", "1234"),
        ("42.0", "42"),
        ("+3", "3"),
        (r"\$18", "18"),
        (r"18\text{ dollars}", "18"),
        (r"\dfrac{1}{2}", r"\frac12"),
        ("0.5", r"\frac{1}{2}"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        ("(x+1)^2", "x^2+2x+1"),
        ("x=5", "5"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        (r"\{2, 1\}", r"\{1, 2\}"),
        ("0.5", '["1/2", "one half"]'),
    ],
)
def test_equal_answers_score_one(given, reference):
    score = grade_math_answer(rf"Thus \boxed{{{given}}}.", reference)

    assert (score.reward, score.answer_found, score.extracted) == (1.0, True, given)


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        ("41", "42"),
        ("-42", "42"),
        ("0.42", "42"),
        ("1 1/2", "11/2"),
        ("18 19", "1819"),
        ("(2,1)", "(1,2)"),
        ("x^2+1", "x^2+2x+1"),
        ("east", "west"),
        ("3", '["1", "2"]'),
        ("42" + "0" * 2000, "42"),
        ("\x00", "42"),
    ],
)
def test_other_answers_score_zero_but_are_found(given, reference):
    score = grade_math_answer(rf"Thus \boxed{{{given}}}.", reference)

    assert (score.reward, score.answer_found) == (0.0, True)


def test_an_answer_in_a_sentence_is_compared_by_its_value():
    assert grade_math_answer("The answer is 18 dollars.", "18").reward == 1.0
    assert grade_math_answer("The answer is $\\frac{3}{6}$. I hope so.", "0.5").reward == 1.0
    assert grade_math_answer("The answer is 19 dollars.", "18").reward == 0.0


def test_every_sampled_gsm8k_reference_grades_itself_and_no_other(shared_data):
    lines = (shared_data / "gsm8k_train.jsonl").read_text().splitlines()
    references = [parse_answer(json.loads(line)["answer"]) for line in lines[:: len(lines) // 200]]
    assert len(references) >= 200

    for reference in references:
        wrong = str(int(reference.replace(",", "")) + 1)
        boxed, plain = rf"So \boxed{{{reference}}}", f"So\n#### {reference}"
        assert grade_math_answer(boxed, reference).reward == 1.0
        assert grade_math_answer(plain, reference).reward == 1.0
        assert grade_math_answer(boxed, wrong).reward == 0.0
        assert grade_math_answer(rf"So \boxed{{{wrong}}}", reference).reward == 0.0


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" * 100_000,
        "{" * 1_000_000,
        "\\" * 1_000_000,
        "#" * 1_000_000,
        "answer is " * 100_000,
        "answer" + " " * 1_000_000,
        r"\boxed{" + "{" * 500_000 + "1" + "}" * 500_000 + "}",
    ],
    ids=["boxes", "braces", "backslashes", "hashes", "answers", "spaces", "nested"],
)
def test_extraction_is_linear_in_a_hostile_megabyte(response):
    start_s = time.process_time()

    extract_answer(response)

    # A quadratic scan of a million characters takes hours.
    assert time.process_time() - start_s < 10
