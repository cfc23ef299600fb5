import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.config.reward import OverlongConfig, RewardConfig
from bapo_megatron.reward.base import Response, SampleFacts, Score
from bapo_megatron.reward.composition import Shaping, overlong_penalty, repeated_share


@pytest.mark.parametrize(
    ("num_tokens", "wanted"),
    [(0, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1), (20481, -1), (99999, -1)],
)
def test_the_overlong_penalty_is_equation_13_with_the_lengths_of_the_paper(num_tokens, wanted):
    assert overlong_penalty(num_tokens, 20480, OverlongConfig(buffer_tokens=4096)) == wanted
    tripled = OverlongConfig(buffer_tokens=4096, penalty=3)
    assert overlong_penalty(num_tokens, 20480, tripled) == 3 * wanted


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 9))
def test_the_repeated_share_is_that_of_sets_of_tuples(tokens, n):
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    wanted = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0

    assert repeated_share(np.array(tokens, dtype=np.int64), n) == pytest.approx(wanted, abs=1e-12)


class Pool:
    """Finds patterns at once; ``slow`` exceeds the limit."""

    async def matches(self, pattern, text):
        return None if pattern == "slow" else (pattern or "boxed") in text


def apply(config, text="text", num_tokens=8, finish_reason="stop", reward=1.0):
    shaping = Shaping(RewardConfig.model_validate(config), 10, Pool())
    response = Response(text, "", SampleFacts(finish_reason=finish_reason, num_tokens=num_tokens))
    tokens = np.arange(num_tokens) % 4
    return asyncio.run(shaping.apply(Score(reward), response, tokens))


def test_every_term_is_added_and_reported():
    shaped = apply(
        {
            "truncated": "zero",
            "overlong": {"buffer_tokens": 4, "penalty": 1.0},
            "format": {"pattern": "te", "reward": 0.25},
            "repetition": {"ngram_tokens": 2, "penalty": 0.7},
        }
    )

    # 2-grams of 0 1 2 3 0 1 2 3: 01 12 23 30 01 12 23.
    assert shaped.terms == {
        "truncated": 0.0,
        "overlong": -0.5,
        "format": 0.25,
        "repetition": pytest.approx(-0.7 * 3 / 7),
    }
    assert shaped.reward == pytest.approx(1 + sum(shaped.terms.values()))


@pytest.mark.parametrize(("setting", "wanted"), [("score", 1.0), ("zero", 0.0)])
def test_a_truncated_response_is_scored_as_configured(setting, wanted):
    assert apply({"truncated": setting}, finish_reason="length").reward == wanted
    assert apply({"truncated": setting}, finish_reason="stop").reward == 1.0


def test_a_pattern_that_takes_too_long_earns_nothing_and_is_counted():
    shaped = apply({"format": {"pattern": "slow", "reward": 0.5}})

    assert (shaped.reward, shaped.terms, shaped.timed_out) == (1.0, {"format": 0.0}, True)


def test_a_long_response_is_searched_for_repetitions_in_a_moment():
    tokens = np.random.default_rng(0).integers(0, 150_000, 65_536)

    assert repeated_share(tokens, 40) == 0.0
    assert repeated_share(np.tile(tokens[:1000], 65), 40) == pytest.approx(1 - 1000 / 64961)
