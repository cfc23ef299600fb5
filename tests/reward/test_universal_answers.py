"""What earns a reward whatever the question is: nothing. Pairs of references that only look alike.

``tests.benchmarks.reward_pairs`` grades many times more of both.
"""

import pytest

from bapo_megatron.reward.math_answer import grade_math_answer
from tests.reward.answer_corpus import UNIVERSAL, pairs, references

pytestmark = pytest.mark.exhaustive


def reward(pred, reference):
    return grade_math_answer(rf"\boxed{{{pred}}}", reference).reward


@pytest.mark.slow
def test_no_universal_answer_is_right_for_any_form_of_reference():
    texts = [text for texts in references(1).values() for text in texts]

    taken = [
        (pred, gold)
        for number, gold in enumerate(texts)
        for pred in UNIVERSAL[number % 8 :: 8]
        if reward(pred, gold)
    ]

    assert taken == []


@pytest.mark.slow
def test_two_references_of_one_form_are_equal_only_where_their_values_are():
    accepted = {(pred, gold) for _, pred, gold in pairs(150, per_form=2) if reward(pred, gold)}

    assert accepted == set()
