"""What earns a reward whatever the question is: nothing. Pairs of references that only look alike.

``tests.benchmarks.reward_pairs`` grades many times more of both.
"""

from __future__ import annotations

import pytest

from bapo_megatron.reward.math_answer import grade_math_answer
from tests.reward.answer_corpus import FORMS, UNIVERSAL, pairs, references

pytestmark = pytest.mark.exhaustive


def reward(pred, reference):
    return grade_math_answer(rf"\boxed{{{pred}}}", reference).reward


def test_the_corpus_has_every_form_and_is_the_same_each_time():
    corpus = references(5)

    assert corpus == references(5)
    assert corpus.keys() == FORMS.keys()
    assert sum(map(len, corpus.values())) >= 500
    assert len(set(UNIVERSAL)) == len(UNIVERSAL) >= 90
    assert not set(UNIVERSAL) & {text for texts in corpus.values() for text in texts}
    drawn = pairs(300)
    assert len({(pred, gold) for _, pred, gold in drawn}) == 300
    assert all(pred != gold for _, pred, gold in drawn)


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


@pytest.mark.parametrize("pred", ["", r"\,", ".", "=", "$$", r"\text{}"])
def test_an_empty_answer_is_not_right_even_where_the_reference_is_missing(pred):
    assert reward(pred, "") == 0.0


@pytest.mark.parametrize(
    ("pred", "reference", "is_right"),
    [
        (r"2\frac{5}{3}", r"\frac{11}{3}", False),
        (r"2\frac{5}{3}", r"\frac{10}{3}", False),
        (r"2\frac{5}{3}x", r"\frac{10x}{3}", False),
        (r"2\frac{5}{3}", r"2\frac53", True),
        (r"2\frac{1}{2}x", "x", False),
        (r"2\frac{1}{2}x", r"\frac{5x}{2}", True),
        (r"\pi-2\frac{1}{2}", r"\pi-2.5", True),
        (r"x^2\frac{1}{2}", r"\frac{x^2}{2}", True),
        (r"2(\frac{5}{3})", r"\frac{10}{3}", True),
        (r"2(\frac{5}{3})", r"\frac{11}{3}", False),
        ("(2)(3)", "6", True),
        ("2(3)", "5", False),
        (r"\frac{69}{0}", r"\frac{11}{0}", False),
        (r"\{\frac{0}{0}\}", r"\{\frac{1}{0}\}", False),
        (r"\frac{1}{0}", r"\infty", False),
        ("2", r"3\infty-2", False),
        (r"\sin x=2", r"3\infty-2", False),
        (r"\infty", r"3\infty-2", True),
        (r"3\cdot 10^{-45}", r"2\cdot 10^{-47}", False),
        (r"30\cdot 10^{-46}", r"3\cdot 10^{-45}", True),
    ],
)
def test_mixed_numbers_products_and_numbers_that_are_tiny_or_undefined(pred, reference, is_right):
    assert reward(pred, reference) == float(is_right)
