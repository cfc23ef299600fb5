"""Evaluation prompts are found among training prompts, however they are written down."""

import pytest

from bapo_megatron.data.overlap import find_overlaps, normalise
from bapo_megatron.types import Prompt
from tests.data.prompt_sets import make_prompt_set
from tests.data.rows import rendered


def prompts(name, questions):
    return tuple(Prompt(f"{name}:{i}", (1,), "1", rendered(q)) for i, q in enumerate(questions))


def overlaps(train, evaluation):
    """The overlaps of training set t and evaluation set e with these questions."""
    return find_overlaps(
        [make_prompt_set("t", prompts("t", train))], [("e", prompts("e", evaluation))]
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is  3 + 4?", "what is\n3+4"),
        (r"Find $\dfrac{1}{2}\,x$.", r"find \(\frac12 x\)"),
        (r"$\left( a, b \right)$", "(a,b)"),
        ("It costs “five” dollars; don’t pay!", "It costs 'five' dollars dont' pay"),
        ("x² + y", "x2+y"),
    ],
)
def test_notation_does_not_count(one, other):
    assert normalise(one).replace(" ", "") == normalise(other).replace(" ", "")


@pytest.mark.parametrize(
    ("one", "other"),
    [("3 + 4", "3 - 4"), ("3.14", "314"), ("x^2", "x2"), ("1,000", "1 000"), ("a < b", "a > b")],
)
def test_what_changes_the_question_counts(one, other):
    assert normalise(one) != normalise(other)


def test_short_questions_are_compared_whole():
    questions = [f"What is {a}+{b}?" for a in range(4) for b in range(4)]

    assert overlaps([q for q in questions if "3+" not in q], ["What is 3+0?", "What is 3+1?"]) == []
    (overlap,) = overlaps(questions, ["What is 3 + 0?", "What is 9+9?"])
    assert (overlap.num_eval_prompts, overlap.of_eval_prompts) == (1, 2)
    assert overlap.num_train_prompts == 1
    assert (overlap.first_eval_id, overlap.first_train_id) == ("e:0", "t:12")


@pytest.mark.parametrize("num_eval", [1, 2])
def test_a_small_evaluation_set_is_found_among_instructions(num_eval):
    shared = "Find the number of "
    questions = [f"{shared}primes below the {n}th power of the smallest odd one." for n in (3, 5)]
    others = ["Compute the area of a circle inside a square.", "How far is it from A to B?"]
    instructions = "Solve this problem with care: {} Put the answer into a box.".format
    train = [instructions(question) for question in [*questions, *others, questions[0]]]

    (overlap,) = overlaps(train, questions[:num_eval])

    assert (overlap.num_eval_prompts, overlap.num_train_prompts) == (num_eval, num_eval + 1)


def test_every_pair_of_sets_with_a_common_prompt_is_reported():
    sets = [make_prompt_set(name, prompts(name, qs)) for name, qs in (("a", "xy"), ("b", "yz"))]
    evaluation = [("e", prompts("e", "y")), ("f", prompts("f", "zz")), ("g", prompts("g", "q"))]

    warnings = [overlap.warning() for overlap in find_overlaps(sets, evaluation)]
    assert [warning.partition(";")[0] for warning in warnings] == [
        "1 of 1 prompts of evaluation set 'e' are in training set 'a' too (1 there), the first: "
        "e:0 is a:1",
        "1 of 1 prompts of evaluation set 'e' are in training set 'b' too (1 there), the first: "
        "e:0 is b:0",
        "2 of 2 prompts of evaluation set 'f' are in training set 'b' too (1 there), the first: "
        "f:0 is b:1",
    ]
    assert find_overlaps(sets, []) == []
