"""Functions whose process forks: no reward or state is another request's."""

import asyncio

import pytest

from bapo_megatron.config.rollout import EpisodesConfig
from bapo_megatron.environment.base import Task, Turn
from bapo_megatron.environment.load import WorkerEnvironment
from bapo_megatron.reward.base import FunctionFailedError
from bapo_megatron.reward.pool import RewardPool
from tests.reward.test_pool import children

FORKING = "tests.reward.forking"
ENDED = "{}: a process that it forked came back from the call and was ended"


@pytest.mark.parametrize("kind", ["at_once", "by_an_error", "in_c", "in_a_coroutine"])
async def test_rewards_are_those_of_the_process_that_was_asked(kind, capfd):
    name = f"{FORKING}:{kind}"

    async with RewardPool(workers=2, timeout_s=20, functions=(name,)) as pool:
        scores = await asyncio.gather(*(pool.score(str(number)) for number in range(200)))

    assert [score.reward for score in scores] == list(range(200))
    assert children() == set()
    written = capfd.readouterr().err
    assert ENDED.format(f"reward function '{name}'") in written
    assert ("RuntimeError: the program was not found" in written) == (kind == "by_an_error")


async def test_states_of_an_environment_are_those_of_the_process_that_was_asked(capfd):
    name = f"{FORKING}:Episodes"

    async def episode(environment, number):
        state = await environment.start(Task(str(number), "set", "", str(number), {}, seed=0))
        turn = Turn(0, str(number + 1), (), remaining_tokens=9, prompt_id=str(number))
        return (await environment.step(state, lambda: turn)).state

    environment = WorkerEnvironment(name, EpisodesConfig(workers=2))
    try:
        await environment.open()
        states = await asyncio.gather(*(episode(environment, n) for n in range(100)))
    finally:
        await environment.close()

    assert states == [[str(n), str(n + 1)] for n in range(100)]
    written = capfd.readouterr().err
    for method in ("start", "step"):
        assert ENDED.format(f"rollout.environment: {name}.{method}") in written


@pytest.mark.parametrize("kind", ["uses_a_thread", "daemon"])
async def test_a_forked_child_may_exit_and_the_worker_goes_on(kind, capfd):
    async with RewardPool(1, timeout_s=20, functions=(f"{FORKING}:{kind}",)) as pool:
        await pool.score("0")
        before = children()
        assert [(await pool.score(str(n))).reward for n in range(20)] == list(range(20))
        assert children() == before
    assert "came back" not in capfd.readouterr().err


@pytest.mark.parametrize("forged", ["this_id", "next_id", "no_json", "no_object"])
async def test_a_reply_that_the_function_writes_itself_is_not_used(forged):
    name = f"{FORKING}:forge_{forged}"

    async with RewardPool(1, timeout_s=20, functions=(name, f"{FORKING}:at_once")) as pool:
        if forged != "this_id":
            with pytest.raises(FunctionFailedError, match=f"'{name}' failed: it ended two pro"):
                await pool.score("1", function=name)
        else:  # nobody can tell it from the worker's, but what follows is not taken for another
            await pool.score("1", function=name)
        asked = (pool.score(str(n), function=f"{FORKING}:at_once") for n in range(1, 5))
        assert [score.reward for score in await asyncio.gather(*asked)] == [1.0, 2.0, 3.0, 4.0]
