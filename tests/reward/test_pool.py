from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bapo_megatron.reward import pool as pool_module
from bapo_megatron.reward.base import RewardError, Score
from bapo_megatron.reward.pool import RewardPool

HANGING = r"\boxed{9^{9^{9^{9}}}}"
"""math-verify evaluates this power, which no machine ends."""


def children() -> set[int]:
    """Grader processes of this process that still run."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and b"reward.worker" in command:
            found.add(int(stat.parent.name))
    return found


def wait_until(condition, limit_s=10.0):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true"
        time.sleep(0.02)


def test_answers_are_graded_concurrently_and_closing_leaves_no_process():
    async def grade():
        async with RewardPool(workers=2, timeout_s=10) as pool:
            asked = [pool.score(rf"\boxed{{{i}}}", str(i - i % 2)) for i in range(50)]
            scores = await asyncio.gather(*asked)
            assert len(children()) == 2
        return scores

    scores = asyncio.run(grade())

    assert [score.reward for score in scores] == [1.0, 0.0] * 25
    assert scores[7] == Score(reward=0.0, answer_found=True, extracted="7", timed_out=False)
    assert children() == set()


def test_a_hanging_answer_scores_zero_and_its_worker_is_replaced():
    async def grade():
        async with RewardPool(workers=1, timeout_s=0.5) as pool:
            first = await pool.score(r"\boxed{1}", "1")
            before = children()
            hanging = await pool.score(HANGING, "1")
            after = children()
            again = await pool.score(r"\boxed{1}", "1")
            return first, hanging, again, before, after, children()

    first, hanging, again, before, after, replaced = asyncio.run(grade())

    assert first.reward == again.reward == 1.0
    assert hanging == Score(reward=0.0, answer_found=False, timed_out=True)
    assert after == set()
    assert len(before) == len(replaced) == 1
    assert before != replaced


def test_an_answer_is_not_delayed_by_one_that_hangs_elsewhere():
    async def grade():
        async with RewardPool(workers=2, timeout_s=30) as pool:
            hanging = asyncio.create_task(pool.score(HANGING, "1"))
            scores = [await pool.score(r"\boxed{1}", "1") for _ in range(5)]
            assert not hanging.done()
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging
            return scores

    assert [score.reward for score in asyncio.run(grade())] == [1.0] * 5
    assert children() == set()


@pytest.mark.parametrize("num_ticks", range(4))
def test_a_cancellation_that_comes_with_the_score_is_not_lost(monkeypatch, num_ticks):
    async def grade():
        reply = asyncio.get_running_loop().create_future()
        asked = asyncio.Event()

        async def ask(worker, request):
            asked.set()
            return await reply

        monkeypatch.setattr(pool_module, "_ask", ask)
        async with RewardPool(workers=1, timeout_s=60) as pool:
            grading = asyncio.create_task(pool.score("", ""))
            await asked.wait()
            reply.set_result({"reward": 1.0, "answer_found": True})
            for _ in range(num_ticks):
                await asyncio.sleep(0)
            is_accepted = grading.cancel()
            await asyncio.wait([grading])
            assert grading.cancelled() == is_accepted

    asyncio.run(grade())


def test_an_answer_that_needs_too_much_memory_does_not_break_the_pool(monkeypatch):
    monkeypatch.setattr(pool_module, "MEMORY_LIMIT_BYTES", 256 << 20)

    async def grade():
        async with RewardPool(workers=1, timeout_s=60) as pool:
            # Each open brace is remembered: some 400 MB.
            greedy = await pool.score("{" * 4_000_000, "1")
            return greedy, await pool.score(r"\boxed{1}", "1")

    greedy, after = asyncio.run(grade())

    assert greedy == Score(reward=0.0, answer_found=False, timed_out=True)
    assert after.reward == 1.0


def test_a_worker_that_is_killed_between_answers_is_replaced():
    async def grade():
        async with RewardPool(workers=1, timeout_s=10) as pool:
            await pool.score(r"\boxed{1}", "1")
            os.kill(children().pop(), signal.SIGKILL)
            await asyncio.sleep(0.2)
            return await pool.score(r"\boxed{1}", "1")

    assert asyncio.run(grade()) == Score(reward=1.0, answer_found=True, extracted="1")


def test_text_that_no_pipe_likes_arrives_whole():
    async def grade():
        async with RewardPool(workers=1, timeout_s=10) as pool:
            odd = "\x00\n\r\u2028 \ud800 naïve " + "x" * 2_000_000 + r"\boxed{π}"
            return await pool.score(odd, "π")

    assert asyncio.run(grade()) == Score(reward=1.0, answer_found=True, extracted="π")


def test_a_faulty_reward_function_is_an_error_not_a_zero():
    async def grade():
        async with RewardPool(workers=1, timeout_s=10) as pool:
            with pytest.raises(RewardError, match="reward function 'math' failed: TypeError"):
                await pool.score(None, "1")
            return await pool.score(r"\boxed{1}", "1")

    assert asyncio.run(grade()).reward == 1.0


def test_a_worker_that_cannot_start_is_an_error():
    async def grade():
        async with RewardPool(workers=1, timeout_s=10, function="no such function") as pool:
            await pool.score("", "")

    with pytest.raises(RewardError, match=r"a reward worker ended while it started.*exit code 1"):
        asyncio.run(grade())


def test_a_closed_pool_refuses_answers_and_ends_those_in_progress():
    async def grade():
        pool = RewardPool(workers=2, timeout_s=60)
        await pool.score(r"\boxed{1}", "1")
        # One finds its worker running, the other is still waiting for its own to start.
        tasks = [asyncio.create_task(pool.score(HANGING, "1")) for _ in range(2)]
        while len(children()) < 2:
            await asyncio.sleep(0.01)
        await pool.close()
        await pool.close()
        for task in (*tasks, asyncio.create_task(pool.score("", ""))):
            with pytest.raises(RewardError, match="the reward pool is closed"):
                await task

    asyncio.run(grade())

    assert children() == set()


def test_workers_die_with_a_killed_parent_even_while_they_hang():
    program = (
        "import asyncio\n"
        "from bapo_megatron.reward.pool import RewardPool\n"
        "async def main():\n"
        "    pool = RewardPool(1, 600)\n"
        "    await pool.score('', '')\n"
        "    print(next(iter(pool._running)).pid, flush=True)\n"
        f"    await pool.score({HANGING!r}, '1')\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    worker = Path("/proc") / parent.stdout.readline().decode().strip()
    # It computes, so its input's end alone would not be seen.
    wait_until(lambda: "R" in (worker / "stat").read_text().rpartition(")")[2].split()[0])

    parent.kill()
    parent.wait()
    parent.stdout.close()

    wait_until(lambda: not worker.exists())


def test_workers_import_no_torch():
    program = (
        "import sys, bapo_megatron.reward.worker, bapo_megatron.reward.registry\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"
