"""Hand-labelled pairs: each of answer_pairs.jsonl is graded right, or is a known limit.

``equal`` says what is true of the two answers, whatever the grader says. A pair with
``known_limit`` scores 0 though it is equal, for the reason it gives; when it no longer does, the
list is wrong. The pairs of reported_pairs.jsonl, by kind, have no limits.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from bapo_megatron.reward.math_answer import grade_math_answer
from bapo_megatron.reward.pool import RewardPool

PAIRS, REPORTED = (
    [json.loads(line) for line in Path(__file__).with_name(name).read_text().splitlines()]
    for name in ("answer_pairs.jsonl", "reported_pairs.jsonl")
)


def reward(pred, answer):
    return grade_math_answer(rf"\boxed{{{pred}}}", answer).reward


def test_the_set_is_large_and_varied():
    pairs = {(pair["response"], pair["answer"]) for pair in PAIRS}
    assert len(pairs) == len(PAIRS) >= 300
    assert min(Counter(pair["equal"] for pair in PAIRS).values()) >= 150
    assert len({pair["category"] for pair in PAIRS}) >= 25
    assert all(len(pair.get("known_limit", "none" * 9)) > 20 for pair in PAIRS)


@pytest.mark.slow
async def test_every_pair_is_graded_right_or_is_a_known_limit_and_needs_no_limit_of_the_workers():
    async with RewardPool(workers=1, timeout_s=20) as pool:
        asked = [pool.score(pair["response"], pair["answer"]) for pair in PAIRS]
        scores = await asyncio.gather(*asked)

    wrong = [
        (pair["category"], pair["answer"], pair["response"], score.reason)
        for pair, score in zip(PAIRS, scores, strict=True)
        if score.reward != float(pair["equal"] and "known_limit" not in pair) or score.timed_out
    ]

    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in REPORTED}))
def test_reported_pairs_of_a_kind_are_graded_right(kind):
    """Pairs of public reports, others like them, and wrong ones written before the code."""
    pairs = [pair for pair in REPORTED if pair["kind"] == kind]
    assert sum(not pair["equal"] for pair in pairs) >= 10

    wrong = [
        (pair["pred"], pair["answer"])
        for pair in pairs
        if reward(pair["pred"], pair["answer"]) != pair["equal"]
    ]

    assert wrong == []


@pytest.mark.parametrize(
    "answer",
    ["4 x^{2}+8 x+19=0", "x^2+1=0", "e^{x}=-6", "x^2+y^2=-1", r"7^{\log_7 3}=3",
     r"\sin^2 x+\cos^2 x=1", "(x+4)^2-x^2=8x+16", r"\int x\,dx=\int x\,dx", "x^2+4>0", "x^2<-4",
     "x^2=-4, y=15", "x=x+1", r"x\ge x"],
)  # fmt: skip
@pytest.mark.parametrize(
    "pred",
    [r"\varnothing", r"\mathbb{R}", r"(-\infty,\infty)", "0=0", "x=x", "y=y", "i=2", "I=-e^{t}",
     "0=1", "x=x+2", r"\sin x=2", "y^2+3=0", "x<x+1", r"y\ge y", "x^2=-9, y=15", "t^2+9>0"],
)  # fmt: skip
def test_a_relation_that_says_nothing_is_not_another_one(pred, answer):
    assert reward(pred, answer) == 0.0
