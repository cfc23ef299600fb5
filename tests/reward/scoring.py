"""Scores of responses by a reward section, or by one function in one worker."""

import asyncio

from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.reward.composition import Rewards
from bapo_megatron.reward.pool import RewardPool


def score(section, *responses):
    """What each response gets: from functions of one response, and in all."""

    async def ask():
        config = RewardConfig.model_validate({"workers": 1, **section})
        async with Rewards(config) as rewards:
            await rewards.start()
            alone = [await rewards.score(response) for response in responses]
            return alone, await rewards.score_group(responses, alone)

    return asyncio.run(ask())


def score_in_turn(*responses, function, timeout_s=20.0):
    """The scores of one worker."""

    async def grade():
        async with RewardPool(1, timeout_s, (function,)) as pool:
            return [await pool.score(response) for response in responses]

    return asyncio.run(grade())
