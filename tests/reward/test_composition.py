import pytest

from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.reward.base import (
    FunctionFailedError,
    Response,
    RewardError,
    SampleFacts,
    Score,
)
from bapo_megatron.reward.composition import Rewards, Shaping
from bapo_megatron.rollout.buffer import PendingGroup
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.types import Prompt
from tests.reward.scoring import score
from tests.rollout.calls import end

OWN = "tests.reward.own_functions"
GROUPS = f"{OWN}:OfGroups"
LENGTH = {"name": "length", "function": f"{OWN}:length"}


def section(*functions, **others):
    return {"functions": functions, **others}


def test_the_default_is_the_math_answer_alone():
    assert RewardConfig().functions[0].model_dump(include={"name", "weight", "function"}) == {
        "name": "math",
        "weight": 1.0,
        "function": "math",
    }
    [[total], _] = score({}, Response(r"\boxed{2}", "2"))
    assert total == Score(1.0, extracted="2", reason="equal_text", components={"math": 1.0})


def test_functions_are_added_up_with_their_weights_and_every_one_is_reported():
    functions = section(
        {"name": "math", "function": "math", "weight": 2.0},
        {"name": "length", "function": f"{OWN}:length", "weight": -0.5},
        {"name": "facts", "function": f"{OWN}:everything"},
    )

    [[total], _] = score(functions, Response(r"\boxed{2}", "2", row={"level": 4}))

    assert total.reward == 2.0 - 0.5 * 9 + 0.25
    assert total.components == {"math": 1.0, "length": 9.0, "facts": 0.25}
    assert total.metrics == {"facts/level": 4.0, "facts/tokens": 0.0}
    assert (total.extracted, total.reason, total.answer_found) == ("2", "equal_text", True)


def test_functions_that_fail_end_the_run_or_score_zero_and_the_first_is_logged(caplog):
    bad, worse = ({"name": name, "function": f"{OWN}:raises"} for name in ("bad", "worse"))
    math = {"name": "math", "function": "math"}
    response = Response(r"\boxed{2}", "2")

    with pytest.raises(FunctionFailedError, match=r"set reward.on_error=zero"):
        score(section(bad, math), response)
    [[total], _] = score(section(bad, worse, math, on_error="zero"), response)

    assert (total.reward, total.failed, total.timed_out) == (1.0, True, False)
    assert total.components == {"bad": 0.0, "worse": 0.0, "math": 1.0}
    assert caplog.text.count("cannot score") == 1


async def test_evaluations_need_a_function_of_one_response():
    rank = {"name": "rank", "function": f"{OWN}:OfGroups.rank"}
    async with Rewards(RewardConfig(functions=(rank, LENGTH), workers=1)) as rewards:
        await rewards.start()
        rewards.require_single()
    async with Rewards(RewardConfig(functions=(rank,), workers=1)) as rewards:
        await rewards.start()
        with pytest.raises(RewardError, match=r"^eval\.functions: .* got rank"):
            rewards.require_single()


class Decoder:
    """A tokenizer whose text is the list of ids, in a box."""

    def decode(self, token_ids, **options):
        return rf"\boxed{{{' '.join(map(str, token_ids))}}}"


async def test_shaping_acts_on_training_samples_and_not_on_evaluations():
    config = RewardConfig(
        functions=(
            {"name": "math", "function": "math"},
            {"name": "facts", "function": f"{OWN}:everything"},
        ),
        workers=1,
        truncated="zero",
        format={"reward": 0.5},
        overlong={"buffer_tokens": 2},
    )
    prompt = Prompt("p:0", (1,), "7", "What?", "set", {"level": 9})

    graded = []
    async with Rewards(config) as rewards:
        for shaping in (Shaping(config, 2, rewards.pool), None):
            group = PendingGroup.start(0, prompt, 1)
            [episode] = group.episodes
            end(episode, [7])
            await Grader(Decoder(), rewards, shaping).score(episode, group)
            graded.append(episode)

    episode, evaluation = graded
    _, evaluated = evaluation.graded

    assert episode.texts == (r"\boxed{7}",)
    assert (episode.text().extracted, episode.text().reason) == ("7", "equal_text")
    assert evaluation.sample.reward == evaluated.reward == 1.25
    assert evaluated.components == {"math": 1.0, "facts": 0.25}
    assert episode.is_scored
    assert episode.sample.reward == 0.5 - 0.5
    assert episode.sample.reward_components == {
        "math": 1.0,
        "facts": 0.25,
        "facts/level": 9.0,
        "facts/tokens": 1.0,
        "truncated": -1.25,
        "format": 0.5,
        "overlong": -0.5,
    }


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([{"name": "a", "function": "math"}] * 2, "'a'"),
        ([{"name": "mean", "function": "math"}], "'mean'"),
        ([{"name": "a"}], "function or url"),
        ([{"name": "a", "function": "math", "url": "http://x"}], "function or url"),
        ([{"name": "a", "function": "module.function"}], "colon"),
        ([{"name": "a", "url": "ftp://x"}], "url"),
        ([{"name": "a", "url": "http://me:secret@x"}], "password"),
        (
            [{"name": "a", "url": "http://far.example", "http": {"token_variable": "T"}}],
            "https",
        ),
        ([], "at least 1 item"),
    ],
)
def test_functions_that_cannot_be_are_refused(functions, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig.model_validate({"functions": functions})


# --- functions of groups and of episodes ---

RESPONSES = [
    Response("four", "42", SampleFacts(num_tokens=40), {"size": 3}, state=0.5),
    Response("x", "42", SampleFacts(num_tokens=10), {"size": 3}, state=0.25),
    Response("seven !", "42", SampleFacts(num_tokens=70), {"size": 3}, state=0),
]


def score_group(*functions, responses=RESPONSES, **others):
    return score(section(*functions, **others), *responses)


def test_an_episode_whose_environment_failed_has_nothing_of_any_function():
    rank = {"name": "rank", "function": f"{GROUPS}.rank"}
    failed = Response("seven !", "42", SampleFacts(finish_reason="environment"), state=None)

    alone, together = score_group(LENGTH, rank, responses=[RESPONSES[0], failed])

    assert alone[1] == Score(
        0.0, answer_found=False, reason="environment", components={"length": 0.0}
    )
    assert together[1] == Score(
        0.0, answer_found=False, reason="environment", components={"length": 0.0, "rank": 0.0}
    )
    assert together[0].components.keys() == {"length", "rank"}


def test_a_group_function_adds_to_the_rewards_of_each_response_in_order():
    rank = {"name": "rank", "function": f"{GROUPS}.rank", "weight": 0.5}

    alone, together = score_group(LENGTH, rank)

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

    _, together = score_group(above, {**LENGTH, "weight": 2.0})

    # 2 · (4, 1, 7) has the mean 8.
    assert [item.components["above"] for item in together] == [
        0.0 + 40 + 0.5,
        -6.0 + 10 + 0.25,
        6.0 + 70 + 0.0,
    ]
    assert [item.reward for item in together] == [8 + 40.5, 2 + 4.25, 14 + 76.0]


def test_without_functions_of_one_response_the_answer_is_that_of_the_first_group_function():
    alone, together = score_group({"name": "rank", "function": f"{GROUPS}.rank"})

    assert alone == [Score(reward=0.0)] * 3
    assert [(item.reward, item.reason) for item in together] == [
        (1.0, "42"),
        (0.0, "42"),
        (2.0, "42"),
    ]


def test_a_group_function_that_fails_or_hangs_ends_the_run_or_scores_zero(caplog):
    bad = {"name": "bad", "function": f"{GROUPS}.raises"}
    slow = {"name": "slow", "function": f"{GROUPS}.hang"}

    failed = (
        rf"^reward function '{GROUPS}\.raises' failed: .*cannot score 3 .*reward\.on_error=zero"
    )
    with pytest.raises(FunctionFailedError, match=failed):
        score_group(bad, LENGTH)
    alone, together = score_group(bad, slow, LENGTH, on_error="zero", timeout_s=0.7)

    assert not any(item.timed_out or item.failed for item in alone)
    assert [(item.reward, item.timed_out, item.failed) for item in together] == [
        (4.0, True, True),
        (1.0, True, True),
        (7.0, True, True),
    ]
    assert together[0].components == {"length": 4.0, "bad": 0.0, "slow": 0.0}
    assert together[0].answer_found
    assert caplog.text.count("scored 0 and counted") == 1


def test_functions_may_ask_for_the_turns_and_the_state_of_an_episode():
    turns = ("first", "wrong, again", "second")
    facts = SampleFacts(num_turns=2, environment_tokens=5)
    episodes = [Response("second", "", facts, turns=turns, state={"left": 0}), Response("only", "")]

    alone, _ = score_group({"name": "episode", "function": f"{OWN}:episode"}, responses=episodes)

    assert alone[0].reward == 3.0
    assert (alone[0].reason, alone[0].extracted) == ("first | wrong, again | second", "{'left': 0}")
    assert alone[0].metrics == {"episode/turns": 2.0, "episode/written": 5.0}
    assert (alone[1].reward, alone[1].reason, alone[1].extracted) == (1.0, "only", "None")
