import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bapo_megatron.reward.base import FunctionFailedError, Response, RewardError, Score
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.runtime import workers as workers_module
from tests.reward.scoring import score_in_turn

TIMED_OUT = Score(reward=0.0, answer_found=False, timed_out=True, reason="limit")
OWN = "tests.reward.own_functions"
LENGTH = (f"{OWN}:length",)
"""For workers that grade no mathematics: those start sooner."""
SPIN = (f"{OWN}:spin",)
"""It computes for ever, but for an empty response."""
MODULES = {
    "broken_module": "1 / 0",
    "exits_at_import": "import sys; sys.exit(0)",
    "ends_at_import": "import os; os._exit(0)",
    "waits_at_import": "import time; time.sleep(1e6)",
}
"""Modules of users that cannot be imported."""


def children() -> set[int]:
    """Grader processes of this process that still run."""
    return {
        process.pid
        for process in psutil.Process().children()
        if process.status() != psutil.STATUS_ZOMBIE
        and "bapo_megatron.runtime.worker" in process.cmdline()
    }


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until(condition, limit_s=10.0):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true"
        time.sleep(0.02)


async def test_answers_are_graded_concurrently_and_closing_leaves_no_process():
    async with RewardPool(workers=2, timeout_s=10, functions=LENGTH) as pool:
        scores = await asyncio.gather(*(pool.score("x" * i) for i in range(50)))
        assert len(children()) == 2

    assert [score.reward for score in scores] == list(range(50))
    assert children() == set()


async def test_a_reply_that_came_while_the_loop_stood_still_counts():
    async with RewardPool(workers=1, timeout_s=1.0, functions=LENGTH) as pool:
        await pool.score("abc")
        before = children()
        asked = asyncio.create_task(pool.score("abc"))
        for _ in range(5):
            await asyncio.sleep(0)
        time.sleep(1.5)

        assert await asked == Score(reward=3.0)
        assert children() == before


@pytest.mark.parametrize(("starved_s", "is_scored"), [(0.0, False), (60.0, True)])
def test_waiting_for_a_processor_does_not_count(tmp_path, monkeypatch, starved_s, is_scored):
    counted = iter([0.0])
    monkeypatch.setattr(workers_module, "_starved_s", lambda _: next(counted, starved_s))

    tries = str(tmp_path / "tries")  # takes 0.5 s
    [score] = score_in_turn(tries, function=f"{OWN}:count_tries", timeout_s=0.1)
    assert score.timed_out is not is_scored


def test_two_processes_on_one_processor_starve():
    processor = min(os.sched_getaffinity(0))
    spin = f"import os\nos.sched_setaffinity(0, {{{processor}}})\nwhile True: pass"
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", spin]) for _ in range(2)]
    try:
        wait_until(lambda: all(workers_module._starved_s(one.pid) > 0.1 for one in spinning))
    finally:
        for process in spinning:
            process.kill()
            process.wait()

    assert workers_module._starved_s(spinning[0].pid) == 0.0  # it is gone


async def test_an_answer_is_not_delayed_by_one_that_hangs_elsewhere():
    async with RewardPool(workers=2, timeout_s=30, functions=SPIN) as pool:
        hanging = asyncio.create_task(pool.score("x"))
        assert [(await pool.score("")).reward for _ in range(5)] == [1.0] * 5
        assert not hanging.done()
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging

    assert children() == set()


@pytest.mark.parametrize("num_ticks", range(4))
async def test_a_cancellation_that_comes_with_the_score_is_not_lost(monkeypatch, num_ticks):
    reply = asyncio.get_running_loop().create_future()
    asked = asyncio.Event()

    async def ask(worker, request):
        asked.set()
        return await reply

    monkeypatch.setattr(workers_module, "_ask", ask)
    async with RewardPool(workers=1, timeout_s=60, functions=LENGTH) as pool:
        grading = asyncio.create_task(pool.score("", ""))
        await asked.wait()
        reply.set_result({"result": [{"reward": 1.0, "answer_found": True}]})
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        is_accepted = grading.cancel()
        await asyncio.wait([grading])
        assert grading.cancelled() == is_accepted


async def test_an_answer_whose_worker_is_killed_from_outside_is_graded_by_another(tmp_path):
    tries = tmp_path / "tries"
    tries.touch()
    async with RewardPool(1, 10, functions=(f"{OWN}:count_tries",)) as pool:
        grading = asyncio.create_task(pool.score(str(tries), ""))
        while not tries.read_text():
            await asyncio.sleep(0.01)
        os.kill(children().pop(), signal.SIGKILL)

        assert await grading == Score(reward=7.0)
    assert len(set(tries.read_text().split())) == 2


def test_a_worker_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with pytest.raises(RewardError, match=r"^reward function 'math': .* \(exit status 1\)"):
        score_in_turn("", function="math")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module_here:grade", "cannot import no_such_module_here: ModuleNotFoundError"),
        (f"{OWN}:missing", f"module {OWN} has no 'missing'"),
        ("broken_module:grade", r"ZeroDivisionError: .* \(/.*/broken_module\.py:1\)"),
        ("exits_at_import:grade", r"SystemExit: 0 \(/.*/exits_at_import\.py:1\)"),
        ("ends_at_import:grade", r"ended before it was ready \(exit status 0\)"),
        ("waits_at_import:grade", "was not ready within 2 s"),
        ("torch:is_tensor", r"raise reward\.memory_limit_mb"),
    ],
)
async def test_a_function_that_cannot_be_used_is_one_line_before_any_answer(
    monkeypatch, tmp_path, function, message
):
    for module, source in MODULES.items():
        (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if "waits" in function:
        monkeypatch.setattr(workers_module, "_START_TIMEOUT_S", 2.0)
    pool = RewardPool(1, 10, (function,), memory_limit_mb=300 if "torch" in function else 2048)

    with pytest.raises(RewardError, match=rf"^reward function '{function}'.*{message}") as raised:
        await pool.start()
    assert children() == set()
    assert "\n" not in str(raised.value)


async def test_memory_that_earlier_answers_took_costs_none_its_reward():
    functions = (f"{OWN}:keep_memory",)
    async with RewardPool(1, 10, functions, memory_limit_mb=1000) as pool:
        scores = [await pool.score("", "")]
        first = children()
        scores += [await pool.score("", "") for _ in range(19)]
        assert children() != first

    assert scores == [Score(1.0)] * 20


@pytest.mark.parametrize(
    ("function", "score"),
    [("start_a_session", Score(1.0)), ("start_a_process_and_hang", TIMED_OUT)],
)
def test_the_processes_that_a_function_started_end_with_their_worker(tmp_path, function, score):
    started = str(tmp_path / "pid")
    assert score_in_turn(started, function=f"{OWN}:{function}", timeout_s=2) == [score]
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: is_gone(pid))


async def test_a_worker_that_ends_by_itself_takes_what_its_function_started_with_it(tmp_path):
    functions = (f"{OWN}:fork", f"{OWN}:length")
    async with RewardPool(workers=1, timeout_s=1.5, functions=functions) as pool:
        with pytest.raises(FunctionFailedError, match="it ended two processes"):
            await pool.score(str(tmp_path / "crashed"), "crash")
        assert await pool.score(str(tmp_path / "idle")) == Score(reward=1.0)
        os.kill(children().pop(), signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert (await pool.score("abc", function=f"{OWN}:length")).reward == 3.0
        for name in ("crashed", "idle"):
            pid = int((tmp_path / name).read_text())
            wait_until(lambda pid=pid: is_gone(pid))


def test_what_a_function_prints_reads_or_replaces_does_not_disturb_the_messages(capfd):
    asked = [Response("text", str(number)) for number in range(3)]
    scores = score_in_turn(*asked, function=f"{OWN}:print_and_read")

    assert [score.reward for score in scores] == [0.0, 1.0, 2.0]
    assert "printed by a function" in capfd.readouterr().err
    scores = score_in_turn("abc", "abc", function=f"{OWN}:replaces_json")
    assert [score.reward for score in scores] == [3.0, 3.0]
    odd = Response("\x00\n\r\u2028 \ud800 naïve " + "x" * 2_000_000 + r"\boxed{π}", "π")
    [score] = score_in_turn(odd, function="math")
    assert (score.reward, score.extracted) == (1.0, "π")


async def test_a_pattern_that_never_ends_or_is_none_leaves_the_pool_at_work():
    async with RewardPool(workers=1, timeout_s=1, functions=LENGTH) as pool:
        assert await pool.matches(r"^(a+)+$", "a" * 40 + "!") is None
        with pytest.raises(RewardError, match=r"^reward\.format\.pattern failed: .* missing \)"):
            await pool.matches("(", "a")
        assert await pool.matches(r"\d+", "a1") is True
        assert await pool.matches(r"\d", "a") is False


async def test_a_closed_pool_refuses_answers_and_ends_those_in_progress():
    pool = RewardPool(workers=2, timeout_s=60, functions=SPIN)
    await pool.score("")
    # One finds its worker running, the other is still waiting for its own to start.
    tasks = [asyncio.create_task(pool.score("x")) for _ in range(2)]
    while len(children()) < 2:
        await asyncio.sleep(0.01)
    await pool.close()
    await pool.close()
    for task in (*tasks, asyncio.create_task(pool.score("", ""))):
        with pytest.raises(RewardError, match="the pool of workers is closed"):
            await task
    assert children() == set()


def test_workers_die_with_a_killed_parent_even_while_they_hang():
    program = (
        "import asyncio\n"
        "from bapo_megatron.reward.pool import RewardPool\n"
        "async def main():\n"
        f"    pool = RewardPool(1, 600, {SPIN})\n"
        "    await pool.score('')\n"
        "    print(next(iter(pool._workers._running)).pid, flush=True)\n"
        "    await pool.score('x')\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    worker = Path("/proc") / parent.stdout.readline().decode().strip()

    def state() -> str:
        return (worker / "stat").read_text().rpartition(")")[2].split()[0]

    # It computes, so its input's end alone would not be seen.
    wait_until(lambda: state() == "R")

    parent.kill()
    parent.wait()
    parent.stdout.close()

    # A process that opened a sandbox gets orphans, and leaves them as zombies.
    wait_until(lambda: not worker.exists() or state() == "Z")


def test_workers_import_no_torch():
    program = (
        "import sys, bapo_megatron.runtime.worker, bapo_megatron.reward.functions\n"
        "import bapo_megatron.reward.math_answer\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"
