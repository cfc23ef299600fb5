import asyncio
import time

import pytest

from bapo_megatron.reward.pool import RewardPool
from tests.reward.hostile import HOSTILE, code

TIMEOUT_S = 2.0
MEMORY_LIMIT_MB = 768
START_LIMIT_S = 20.0
"""A worker that was killed is started again, on a busy machine."""


@pytest.mark.slow
async def test_hostile_answers_earn_nothing_within_the_limits_and_grading_goes_on():
    scores, took_s = {}, {}
    async with RewardPool(1, TIMEOUT_S, memory_limit_mb=MEMORY_LIMIT_MB) as pool:
        for name, response in HOSTILE.items():
            start_s = time.monotonic()
            scores[name] = await pool.score(response, "42")
            took_s[name] = time.monotonic() - start_s
        good = await pool.score(r"\boxed{42}", "42")

    assert {name: score for name, score in scores.items() if score.reward != 0.0} == {}
    assert {name: s for name, s in took_s.items() if s > TIMEOUT_S + START_LIMIT_S} == {}
    needing = [name for name, score in scores.items() if score.timed_out]
    assert len(needing) <= 8, needing
    assert not [name for name in needing if "megabyte" in name]  # all is linear in the length
    assert good.reward == 1.0


@pytest.mark.slow
async def test_no_code_is_run(tmp_path):
    answers = code(str(tmp_path / "canary"))
    async with RewardPool(1, TIMEOUT_S, memory_limit_mb=MEMORY_LIMIT_MB) as pool:
        asked = [pool.score(text, "42") for text in answers]
        asked += [pool.score(r"\boxed{42}", text) for text in answers]
        scores = await asyncio.gather(*asked)

    assert list(tmp_path.iterdir()) == []
    assert [score.reward for score in scores] == [0.0] * 20
