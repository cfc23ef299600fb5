from __future__ import annotations

import asyncio

import numpy as np
import pytest

from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.reward.base import FunctionFailedError, Response, RewardError, Score
from bapo_megatron.reward.composition import Rewards
from bapo_megatron.reward.shaping import Shaping
from bapo_megatron.rollout.buffer import PendingGroup
from bapo_megatron.rollout.episodes import Grader
from bapo_megatron.types import FinishReason, Prompt

OWN = "tests.reward.own_functions"


def config_of(*functions, **others):
    return RewardConfig.model_validate({"functions": functions, "workers": 1, **others})


def score(config, response):
    async def ask():
        async with Rewards(config) as rewards:
            await rewards.start()
            return await rewards.score(response)

    return asyncio.run(ask())


def test_the_default_is_the_math_answer_alone():
    assert RewardConfig().functions[0].model_dump(include={"name", "weight", "function"}) == {
        "name": "math",
        "weight": 1.0,
        "function": "math",
    }
    total = score(RewardConfig(workers=1), Response(r"\boxed{2}", "2"))
    assert total == Score(
        1.0, extracted="2", reason="equal_text", components={"math": 1.0}, metrics={}
    )


def test_functions_are_added_up_with_their_weights_and_every_one_is_reported():
    config = config_of(
        {"name": "math", "function": "math", "weight": 2.0},
        {"name": "length", "function": f"{OWN}:length", "weight": -0.5},
        {"name": "facts", "function": f"{OWN}:everything"},
    )

    total = score(config, Response(r"\boxed{2}", "2", row={"level": 4}))

    assert total.reward == 2.0 - 0.5 * 9 + 0.25
    assert total.components == {"math": 1.0, "length": 9.0, "facts": 0.25}
    assert total.metrics == {"facts/level": 4.0, "facts/tokens": 0.0}
    assert (total.extracted, total.reason, total.answer_found) == ("2", "equal_text", True)


def test_a_function_that_fails_ends_the_run_or_scores_zero_and_is_counted(caplog):
    functions = ({"name": "bad", "function": f"{OWN}:raises"}, {"name": "math", "function": "math"})
    response = Response(r"\boxed{2}", "2")

    with pytest.raises(FunctionFailedError, match=r"set reward.on_error=zero"):
        score(config_of(*functions), response)
    total = score(config_of(*functions, on_error="zero"), response)

    assert (total.reward, total.failed, total.timed_out) == (1.0, True, False)
    assert total.components == {"bad": 0.0, "math": 1.0}
    assert "cannot score" in caplog.text


def test_only_the_first_failure_of_a_run_is_logged(caplog):
    functions = ({"name": name, "function": f"{OWN}:raises"} for name in ("bad", "worse"))

    total = score(config_of(*functions, on_error="zero"), Response("x", "2"))

    assert (total.components, total.failed) == ({"bad": 0.0, "worse": 0.0}, True)
    assert caplog.text.count("cannot score x") == 1


def test_evaluations_need_a_function_of_one_response():
    def require(*functions):
        async def ask():
            async with Rewards(config_of(*functions)) as rewards:
                await rewards.start()
                rewards.require_single()

        asyncio.run(ask())

    rank = {"name": "rank", "function": f"{OWN}:OfGroups.rank"}
    require(rank, {"name": "length", "function": f"{OWN}:length"})
    with pytest.raises(RewardError, match=r"^eval\.functions: .* got rank"):
        require(rank)


class Decoder:
    """A tokenizer whose text is the list of ids, in a box."""

    def decode(self, token_ids, **options):
        return rf"\boxed{{{' '.join(map(str, token_ids))}}}"


def test_shaping_acts_on_training_samples_and_not_on_evaluations():
    config = config_of(
        {"name": "math", "function": "math"},
        {"name": "facts", "function": f"{OWN}:everything"},
        truncated="zero",
        format={"reward": 0.5},
        overlong={"buffer_tokens": 2},
    )
    prompt = Prompt("p:0", (1,), "7", "What?", "set", {"level": 9})

    async def grade():
        async with Rewards(config) as rewards:
            graded = []
            for shaping in (Shaping(config, 2, rewards.pool), None):
                group = PendingGroup.start(0, prompt, 1)
                [pending] = group.samples
                pending.sample.response_token_ids = np.array([7])
                pending.sample.finish_reason = FinishReason.LENGTH
                await Grader(Decoder(), rewards, shaping).score(pending, group)
                graded.append(pending)
            return graded

    pending, evaluation = asyncio.run(grade())
    _, evaluated = evaluation.graded

    assert pending.texts == (r"\boxed{7}",)
    assert (pending.text().extracted, pending.text().reason) == ("7", "equal_text")
    assert evaluation.sample.reward == evaluated.reward == 1.25
    assert evaluated.components == {"math": 1.0, "facts": 0.25}
    assert pending.is_scored
    assert pending.sample.reward == 0.5 - 0.5
    assert pending.sample.reward_components == {
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


def test_a_format_must_be_a_regular_expression():
    with pytest.raises(ValueError, match="is no regular expression"):
        RewardConfig.model_validate({"format": {"pattern": "(", "reward": 1}})
