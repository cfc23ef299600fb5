import asyncio
import math
import os
import re
import time
from pathlib import Path

import pytest

from bapo_megatron.reward.pool import RewardPool
from tests.reward.hostile import HOSTILE, code

TIMEOUT_S = 2.0
MEMORY_LIMIT_MB = 768


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    """A file that answers would make if they were run."""
    return tmp_path_factory.mktemp("hostile") / "canary"


@pytest.fixture(scope="module")
def outcomes(canary):
    """Every hostile response once, with the time and the processor time that it took.

    Also the largest memory of a worker, a good answer's score, and those of code as the response
    and as the reference.
    """

    async def grade():
        outcomes, peaks_kb = {}, []
        async with pool_of(TIMEOUT_S) as pool:
            for name, response in HOSTILE.items():
                start_s = time.monotonic()
                score, cpu_s = await measured(pool, response)
                peaks_kb.extend(filter(None, map(peak_of, pool._workers._running)))
                outcomes[name] = score, time.monotonic() - start_s, cpu_s
            good = await pool.score(r"\boxed{42}", "42")
            answers = code(str(canary))
            asked = [pool.score(text, "42") for text in answers]
            asked += [pool.score(r"\boxed{42}", text) for text in answers]
            return outcomes, max(peaks_kb) / 1024, good, await asyncio.gather(*asked)

    return asyncio.run(grade())


def pool_of(timeout_s):
    """A pool of one worker."""
    return RewardPool(1, timeout_s, memory_limit_mb=MEMORY_LIMIT_MB)


async def measured(pool, response, max_cpu_s=math.inf):
    """The score, and the processor time that the pool's worker used for it.

    Grading is ended at ``max_cpu_s``, without a score.
    """
    await pool.start()
    [worker] = [worker for worker in pool._workers._running if worker.returncode is None]
    before_s, used_s = cpu_s_of(worker), 0.0
    grading = asyncio.create_task(pool.score(response, "42"))
    while not (await asyncio.wait([grading], timeout=0.05))[0]:
        used_s = max(used_s, cpu_s_of(worker) - before_s)
        if used_s >= max_cpu_s:
            grading.cancel()
            await asyncio.wait([grading])
            return None, used_s
    return grading.result(), used_s


def cpu_s_of(worker):
    try:
        stat = Path(f"/proc/{worker.pid}/stat").read_text()
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def peak_of(worker):
    try:
        status = Path(f"/proc/{worker.pid}/status").read_text()
    except OSError:
        return None
    match = re.search(r"VmPeak:\s+(\d+) kB", status)
    return int(match[1]) if match else None


@pytest.mark.slow
def test_hostile_answers_earn_nothing_within_time_and_memory_and_grading_goes_on(outcomes):
    by_name, peak_mb, good, _ = outcomes
    start_limit_s = 20.0  # a worker that was killed is started again, on a busy machine

    assert {name: score for name, (score, _, _) in by_name.items() if score.reward != 0.0} == {}
    assert {n: s for n, (_, s, _) in by_name.items() if s > TIMEOUT_S + start_limit_s} == {}
    assert peak_mb <= MEMORY_LIMIT_MB
    assert good.reward == 1.0


@pytest.mark.slow
def test_few_hostile_answers_need_the_hard_limit(outcomes):
    killed = {name: cpu_s for name, (score, _, cpu_s) in outcomes[0].items() if score.timed_out}
    # A worker that had to share its processor was killed too early: it may use as much as it would
    # have had alone.
    starved = [name for name, cpu_s in killed.items() if cpu_s < 0.9 * TIMEOUT_S]

    async def grade_again():
        async with pool_of(100 * TIMEOUT_S) as pool:
            return [(await measured(pool, HOSTILE[name], TIMEOUT_S))[0] for name in starved]

    scores = dict(zip(starved, asyncio.run(grade_again()), strict=True))
    harmless = [name for name, score in scores.items() if score and not score.timed_out]
    needing = killed.keys() - harmless

    assert len(needing) <= 8, needing


@pytest.mark.slow
def test_no_code_is_run(outcomes, canary):
    *_, scores = outcomes

    assert not canary.exists()
    assert [score.reward for score in scores] == [0.0] * 20
