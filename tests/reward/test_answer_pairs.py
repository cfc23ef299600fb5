"""The hand-labelled pairs of answer_pairs.jsonl: each is graded right, or is a known limit.

``equal`` says what is true of the two answers, whatever the grader says. A pair with
``known_limit`` is graded wrong, for the reason it gives; when it no longer is, the list is wrong.
"""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def scores():
    async def grade():
        async with RewardPool(workers=1, timeout_s=20) as pool:
            asked = [pool.score(pair["response"], pair["answer"]) for pair in PAIRS]
            return await asyncio.gather(*asked)

    return asyncio.run(grade())


def test_the_set_is_large_and_varied():
    pairs = {(pair["response"], pair["answer"]) for pair in PAIRS}
    assert len(pairs) == len(PAIRS) >= 300
    assert min(Counter(pair["equal"] for pair in PAIRS).values()) >= 150
    assert len({pair["category"] for pair in PAIRS}) >= 25


@pytest.mark.slow
def test_every_pair_is_graded_right_or_is_a_known_limit(scores):
    wrong = [
        (pair["category"], pair["answer"], pair["response"], score.reason)
        for pair, score in zip(PAIRS, scores, strict=True)
        if "known_limit" not in pair and score.reward != float(pair["equal"])
    ]

    assert wrong == []


@pytest.mark.slow
def test_every_known_limit_still_is_one(scores):
    limits = [
        (pair, score) for pair, score in zip(PAIRS, scores, strict=True) if "known_limit" in pair
    ]
    assert all(len(pair["known_limit"]) > 20 for pair, _ in limits)

    gone = [pair["answer"] for pair, score in limits if score.reward == float(pair["equal"])]

    assert gone == []


@pytest.mark.slow
def test_no_known_limit_gives_a_reward_for_a_wrong_answer(scores):
    undeserved = [
        pair["answer"]
        for pair, score in zip(PAIRS, scores, strict=True)
        if score.reward > 0 and not pair["equal"]
    ]

    assert undeserved == []


@pytest.mark.slow
def test_no_pair_needs_the_limits_of_the_workers(scores):
    assert [pair["answer"] for pair, s in zip(PAIRS, scores, strict=True) if s.timed_out] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in REPORTED}))
def test_reported_pairs_of_a_kind_are_graded_right(kind):
    """Pairs of public reports, others like them, and wrong ones written before the code."""
    pairs = [pair for pair in REPORTED if pair["kind"] == kind]
    assert sum(not pair["equal"] for pair in pairs) >= 10

    wrong = [
        (pair["pred"], pair["answer"])
        for pair in pairs
        if grade_math_answer(rf"\boxed{{{pair['pred']}}}", pair["answer"]).reward != pair["equal"]
    ]

    assert wrong == []
