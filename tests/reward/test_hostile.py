from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from bapo_megatron.reward.pool import RewardPool
from tests.reward.hostile import HOSTILE, code

TIMEOUT_S = 4.0
MEMORY_LIMIT_MB = 768


@pytest.fixture(scope="module")
def outcomes():
    """Every hostile response once, with the time it took, and the workers' peaks of memory."""

    async def grade():
        found, peaks_kb = {}, []
        async with RewardPool(2, TIMEOUT_S, memory_limit_mb=MEMORY_LIMIT_MB) as pool:
            await asyncio.gather(pool.start(), pool.start())

            async def grade_one(name, response):
                start_s = time.monotonic()
                score = await pool.score(response, "42")
                peaks_kb.extend(filter(None, map(peak_of, list(pool._workers._running))))
                return name, (score, time.monotonic() - start_s)

            # Two at a time, so that the time of one is its own and that of a worker's start.
            names = list(HOSTILE)
            for first in range(0, len(names), 2):
                pairs = [(name, HOSTILE[name]) for name in names[first : first + 2]]
                found |= dict(await asyncio.gather(*(grade_one(*pair) for pair in pairs)))
            good = await pool.score(r"\boxed{42}", "42")
        return found, max(peaks_kb) / 1024, good

    return asyncio.run(grade())


def peak_of(worker):
    try:
        status = Path(f"/proc/{worker.pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"VmPeak:\s+(\d+) kB", status)
    return int(found[1]) if found else None


def test_no_hostile_answer_earns_anything(outcomes):
    scores = {name: score for name, (score, _) in outcomes[0].items()}

    assert {name: score for name, score in scores.items() if score.reward != 0.0} == {}


def test_every_hostile_answer_takes_a_bounded_time(outcomes):
    start_limit_s = 20.0  # a worker that was killed is started again, on a busy machine

    slow = {name: s for name, (_, s) in outcomes[0].items() if s > TIMEOUT_S + start_limit_s}

    assert slow == {}


def test_few_hostile_answers_need_the_hard_limit(outcomes):
    killed = [name for name, (score, _) in outcomes[0].items() if score.timed_out]

    assert len(killed) <= 8, killed


def test_workers_keep_to_their_memory(outcomes):
    assert outcomes[1] <= MEMORY_LIMIT_MB


def test_grading_goes_on_afterwards(outcomes):
    assert outcomes[2].reward == 1.0


@pytest.mark.parametrize("side", ["response", "answer"])
def test_no_code_is_run(tmp_path, side):
    canary = tmp_path / "canary"
    answers = code(str(canary))

    async def grade():
        async with RewardPool(2, 5.0) as pool:
            if side == "response":
                asked = [pool.score(text, "42") for text in answers]
            else:
                asked = [pool.score(r"\boxed{42}", text) for text in answers]
            return await asyncio.gather(*asked)

    scores = asyncio.run(grade())

    assert not canary.exists()
    assert [score.reward for score in scores] == [0.0] * len(answers)
