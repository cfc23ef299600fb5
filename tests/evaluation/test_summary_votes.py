from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from bapo_megatron.evaluation.estimators import NO_VOTE
from bapo_megatron.evaluation.summary import count_votes
from bapo_megatron.reward.pool import RewardPool
from tests.evaluation.results import TextEquality


def votes_of(*answers: str, pool: TextEquality | None = None) -> tuple[tuple[int, ...], int]:
    (votes,) = asyncio.run(count_votes([answers], pool or TextEquality()))
    return votes


def test_equal_answers_share_a_cluster_and_none_is_no_vote():
    votes = votes_of("7", "", "12", " 7", "12", "")
    assert votes == ((0, NO_VOTE, 1, 0, 1, NO_VOTE), 0)


def test_equal_texts_are_compared_once():
    pool = TextEquality()
    votes_of(*["7"] * 8, *["12"] * 8, pool=pool)
    assert pool.num_calls == 1


def test_a_problem_with_hostile_answers_stops_comparing_after_three_time_outs():
    pool = TextEquality()
    votes = votes_of("slow 1", "a", "b", "c", "a ", "c", pool=pool)
    # "slow 1" against a, b and c; then "a " is compared with nothing, and equals none by its text.
    assert votes == ((0, 1, 2, 3, 4, 3), 3)
    assert pool.num_calls == 1 + 2 + 3 - 2


def test_a_problem_whose_comparisons_are_slow_stops_comparing(monkeypatch: pytest.MonkeyPatch):
    pool = TextEquality()
    clock = SimpleNamespace(monotonic=lambda: 6.0 * pool.num_calls)
    monkeypatch.setattr("bapo_megatron.evaluation.summary.time", clock)
    counted = votes_of("1", "2", "3", "4", " 1", "2", pool=pool)
    # 2-1, 3-1, 3-2, 4-1: 24 s; then " 1" is compared with nothing.
    assert counted == ((0, 1, 2, 3, 4, 1), 1)
    assert pool.num_calls == 4


@pytest.mark.slow
def test_the_math_reward_s_own_workers_find_equal_values_of_several_problems():
    async def count() -> list[tuple[tuple[int, ...], int]]:
        async with RewardPool(workers=1, timeout_s=20) as pool:
            return await count_votes(
                [
                    (r"\frac{1}{2}", "0.5", "1/2", "0.25"),
                    ("1,000", "1000", "", r"\sqrt{2}", r"2^{1/2}"),
                ],
                pool,
            )

    assert [clusters for clusters, _ in asyncio.run(count())] == [
        (0, 0, 0, 1),
        (0, 0, NO_VOTE, 1, 1),
    ]
