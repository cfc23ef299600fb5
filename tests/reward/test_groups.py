"""Reward functions that see the responses to a prompt together, and those that see its turns."""

from __future__ import annotations

import asyncio

import pytest

from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.reward.base import (
    FunctionFailedError,
    Response,
    SampleFacts,
    Score,
)
from bapo_megatron.reward.composition import Rewards

OWN = "tests.reward.own_functions"
GROUPS = f"{OWN}:OfGroups"
LENGTH = {"name": "length", "function": f"{OWN}:length"}
RESPONSES = [
    Response("four", "42", SampleFacts(num_tokens=40), {"size": 3}, state=0.5),
    Response("x", "42", SampleFacts(num_tokens=10), {"size": 3}, state=0.25),
    Response("seven !", "42", SampleFacts(num_tokens=70), {"size": 3}, state=0),
]


def score(*functions, responses=RESPONSES, **others):
    """What each response gets: from functions of one response, and in all."""
    section = {"functions": functions, "workers": 1, **others}

    async def ask():
        async with Rewards(RewardConfig.model_validate(section)) as rewards:
            await rewards.start()
            alone = [await rewards.score(response) for response in responses]
            return bool(rewards.group_names), alone, await rewards.score_group(responses, alone)

    return asyncio.run(ask())


def test_an_episode_whose_environment_failed_has_nothing_of_any_function():
    rank = {"name": "rank", "function": f"{GROUPS}.rank"}
    failed = Response("seven !", "42", SampleFacts(finish_reason="environment"), state=None)

    _, alone, together = score(LENGTH, rank, responses=[RESPONSES[0], failed])

    assert alone[1] == Score(
        0.0, answer_found=False, reason="environment", components={"length": 0.0}
    )
    assert together[1] == Score(
        0.0, answer_found=False, reason="environment", components={"length": 0.0, "rank": 0.0}
    )
    assert together[0].components.keys() == {"length", "rank"}


def test_a_group_function_adds_to_the_rewards_of_each_response_in_order():
    rank = {"name": "rank", "function": f"{GROUPS}.rank", "weight": 0.5}

    sees_groups, alone, together = score(LENGTH, rank)

    assert sees_groups
    assert [item.reward for item in alone] == [4.0, 1.0, 7.0]
    assert [item.components for item in alone] == [
        {"length": 4.0},
        {"length": 1.0},
        {"length": 7.0},
    ]
    assert [item.reward for item in together] == [4.5, 1.0, 8.0]
    assert together[2] == Score(
        reward=8.0, components={"length": 7.0, "rank": 2.0}, metrics={"rank/size": 3.0}
    )


def test_a_group_function_sees_weighted_rewards_samples_and_states():
    above = {"name": "above", "function": f"{GROUPS}.above_mean"}

    _, _, together = score(above, {**LENGTH, "weight": 2.0})

    # 2 · (4, 1, 7) has the mean 8.
    assert [item.components["above"] for item in together] == [
        0.0 + 40 + 0.5,
        -6.0 + 10 + 0.25,
        6.0 + 70 + 0.0,
    ]
    assert [item.reward for item in together] == [8 + 40.5, 2 + 4.25, 14 + 76.0]


def test_without_functions_of_one_response_the_answer_is_that_of_the_first_group_function():
    _, alone, together = score({"name": "rank", "function": f"{GROUPS}.rank"})

    assert alone == [Score(reward=0.0)] * 3
    assert [(item.reward, item.reason) for item in together] == [
        (1.0, "42"),
        (0.0, "42"),
        (2.0, "42"),
    ]


def test_without_group_functions_the_scores_of_a_group_stay():
    sees_groups, alone, together = score(LENGTH)

    assert not sees_groups
    assert together == alone


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_too_few", "each of 3 responses, got 2"),
        ("words", "'reward' must be a number"),
        ("raises", r"RuntimeError: cannot score 3 \(.*own_functions.py:\d+\)"),
    ],
)
def test_a_group_function_that_fails_ends_the_run_or_scores_zero(caplog, name, message):
    functions = ({"name": "bad", "function": f"{GROUPS}.{name}"}, LENGTH)

    failed = rf"^reward function '{GROUPS}\.{name}' failed: .*{message}.* set reward\.on_error=zero"
    with pytest.raises(FunctionFailedError, match=failed):
        score(*functions)
    _, _, together = score(*functions, on_error="zero")

    assert [(item.reward, item.failed) for item in together] == [
        (4.0, True),
        (1.0, True),
        (7.0, True),
    ]
    assert together[0].components == {"length": 4.0, "bad": 0.0}
    assert together[0].answer_found
    assert caplog.text.count("scored 0 and counted") == 1


def test_a_group_function_that_hangs_scores_zero_and_is_counted_for_each_response():
    functions = ({"name": "slow", "function": f"{GROUPS}.hang"}, LENGTH)

    _, alone, together = score(*functions, timeout_s=0.7)

    assert not any(item.timed_out for item in alone)
    assert [(item.reward, item.timed_out, item.failed) for item in together] == [
        (4.0, True, False),
        (1.0, True, False),
        (7.0, True, False),
    ]


def test_functions_may_ask_for_the_turns_and_the_state_of_an_episode():
    turns = ("first", "wrong, again", "second")
    facts = SampleFacts(num_turns=2, environment_tokens=5)
    episodes = [Response("second", "", facts, turns=turns, state={"left": 0}), Response("only", "")]

    _, alone, _ = score({"name": "episode", "function": f"{OWN}:episode"}, responses=episodes)

    assert alone[0].reward == 3.0
    assert (alone[0].reason, alone[0].extracted) == ("first | wrong, again | second", "{'left': 0}")
    assert alone[0].metrics == {"episode/turns": 2.0, "episode/written": 5.0}
    assert (alone[1].reward, alone[1].reason, alone[1].extracted) == (1.0, "only", "None")
