"""Agents run in processes of their own, end with their owner, and fail alone."""

import asyncio
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_megatron.agent.protocol import SamplingRules
from bapo_megatron.agent.proxy import Proxy, Session, SessionLimits
from bapo_megatron.agent.runner import AgentLostError, AgentRunner, _without_proxy
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.record import Call, Record
from bapo_megatron.environment.base import EnvironmentFailedError
from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.agents import Agents
from bapo_megatron.types import FinishReason, Prompt
from tests.agent.boxes import boxed, opened, workers
from tests.agent.episodes import Policy, agent_config, make_renderer
from tests.benchmarks import hostile_agents
from tests.rollout.pool import until

AGENTS = "tests.agent.agents"
TASK = {
    "prompt_id": "p:0",
    "messages": [{"role": "user", "content": "1+1?"}],
    "answer": "2",
    "row": {},
    "seed": 1,
}
SLEEPS = "import time; time.sleep(2)"
COMMAND = [sys.executable, "-m", AGENTS, "speaks"]


def no_wait(has_to_wait: bool) -> None:
    pass


@pytest.fixture(scope="module")
def renderer(tokenizer_dir: Path) -> ChatRenderer:
    return make_renderer(tokenizer_dir)


async def play(
    runner: AgentRunner,
    proxy: Proxy,
    renderer: ChatRenderer,
    barrier: asyncio.Barrier | None = None,
) -> tuple[Any, Record]:
    policy = Policy(renderer, lambda call: "Two." if call.parent is None else "Yes.")
    limits = SessionLimits(9, 1000, 1000)

    async def sample(call: Call) -> None:
        if barrier is not None:
            await barrier.wait()
        await policy.sample(call)

    session = Session(Record(), renderer, SamplingRules(1.0), limits, sample)
    try:
        with proxy.admitted(session) as key:
            return await runner.run(TASK, key, no_wait), session.record
    finally:
        await session.close()


@pytest.mark.parametrize(
    ("agent", "returned"),
    [
        (COMMAND, {"text": "Two."}),
        (f"{AGENTS}:asks_in_a_thread", "Two."),
        (f"{AGENTS}:asks", {"last": "Yes.", "answer": "2"}),
    ],
    ids=["command", "function", "coroutine"],
)
async def test_commands_and_functions_reach_the_loopback_past_a_proxy_of_the_environment(
    renderer: ChatRenderer, agent: Any, returned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with opened(agent=agent) as (runner, proxy):
        results = await asyncio.gather(*(play(runner, proxy, renderer) for _ in range(5)))
    assert [result for result, _ in results] == [returned] * 5
    assert [len(record.sequences()) for _, record in results] == [1] * 5


@pytest.mark.parametrize(
    ("known", "hosts"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"no_proxy": "", "NO_PROXY": "example.org"}, "example.org,127.0.0.1,localhost"),
        ({"no_proxy": "a,b", "NO_PROXY": "c"}, "a,b,c,127.0.0.1,localhost"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_what_no_proxy_named_before_stays(known: dict[str, str], hosts: str) -> None:
    assert _without_proxy(known) == {"no_proxy": hosts, "NO_PROXY": hosts}


async def test_another_interpreter_needs_none_of_our_packages(renderer: ChatRenderer) -> None:
    config = {"agent": "numpy:array", "agent_python": "/usr/bin/python3"}
    with pytest.raises(RolloutError, match=r"by /usr/bin/python3: .*numpy.*agent_python"):
        async with opened(**config):
            pass
    async with opened(agent="re:sub", agent_python="/usr/bin/python3") as (runner, proxy):
        with pytest.raises(EnvironmentFailedError, match="TypeError"):
            await play(runner, proxy, renderer)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("tests.agent.agents:nothing", "cannot be started by .*: AttributeError"),
        ("nowhere:agent", "cannot be started by .*: ModuleNotFoundError"),
        ("json:loads", "cannot be started by .*: TypeError"),
        ("no-such-program --x", "no such program 'no-such-program'"),
    ],
)
async def test_an_unusable_agent_is_refused_before_anything_runs(agent: str, message: str) -> None:
    with pytest.raises(RolloutError, match=rf"^rollout\.agent: .* {message}"):
        async with opened(agent=agent):
            pass


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (f"{AGENTS}:fails", r"failed: KeyError: 'no such city' \(prompt 'p:0'\)"),
        (f"{AGENTS}:returns_no_json", "failed: TypeError"),
        (f"{AGENTS}:dies", "ended its process"),
        (f"{AGENTS}:cancels_itself", "failed: its coroutine was cancelled"),
        ("sh -c 'kill -9 $$'", "was killed: exit status -9"),
        (f"{sys.executable} -c 'print(1);exit(3)'", r"exit status 3; .*logs/collector\.log"),
        ("sh -c 'exit 255'", "failed: RuntimeError: exit status 255"),
        ("sh -c 'exit 134'", "was killed: exit status 134"),
        (f"{sys.executable} -c 'print(1,2)'", "the last line of output must be JSON, got '1 2'"),
    ],
)
async def test_an_agent_that_fails_fails_alone(
    renderer: ChatRenderer, agent: str, message: str
) -> None:
    async with opened(agent=agent) as (runner, proxy):
        for _ in range(2):
            with pytest.raises(EnvironmentFailedError, match=message):
                await play(runner, proxy, renderer)


@pytest.mark.parametrize(
    ("agent", "limits"),
    [("sleep 3600", {"commands": 2}), (f"{AGENTS}:sleeps", {"workers": 2, "episodes": 1})],
    ids=["commands", "functions"],
)
async def test_only_so_many_run_at_a_time_and_the_next_starts_at_once(
    renderer: ChatRenderer, agent: str, limits: dict[str, int]
) -> None:
    started: list[int] = []
    async with opened(agent=agent, agent_limits=limits) as (runner, _):

        def note(number: int, has_to_wait: bool) -> None:
            started.extend([] if has_to_wait else [number])

        tasks = [asyncio.create_task(runner.run(TASK, "key", partial(note, n))) for n in range(4)]
        await until(lambda: len(started) == 2)
        await asyncio.sleep(0.5)
        assert started == [0, 1]
        tasks[2].cancel()
        tasks[0].cancel()
        await until(lambda: len(started) == 3)
        assert started == [0, 1, 3]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not any(worker.children() for worker in workers()))


async def test_an_agent_whose_worker_died_starts_again_from_its_record(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    policy = Policy(renderer, lambda call: "Two." if call.parent is None else "Yes.")
    row = {"messages": TASK["messages"], "file": str(tmp_path / "died")}
    async with opened(agent=f"{AGENTS}:dies_once") as (runner, proxy):
        limits = SessionLimits(9, 1000, 1000)
        session = Session(Record(), renderer, SamplingRules(1.0), limits, policy.sample)
        agents = Agents(runner, proxy, renderer, agent_config(), max_prompt_tokens=1000)
        end = await agents.play(session, Prompt("p:0", (1,), "", "2", row=row), 1, no_wait)
    assert end == (FinishReason.STOP, "Yes.")
    assert len(policy.calls) == 2


async def test_while_an_agent_waits_to_restart_its_clock_stands_still(
    renderer: ChatRenderer,
) -> None:
    policy, limits = Policy(renderer, lambda call: "Two."), SessionLimits(9, 1000, 1000)
    session = Session(Record(), renderer, SamplingRules(1.0), limits, policy.sample)
    session.begin()
    session.ended_by = FinishReason.TURNS
    await session.restart()
    own_s = session.own_s
    await asyncio.sleep(0.01)
    assert session.own_s == own_s
    assert session.ended_by is None


async def test_after_a_worker_s_death_its_episodes_go_on_without_the_one_that_caused_it(
    renderer: ChatRenderer,
) -> None:
    """Also where all share a worker, whose processes a program can kill."""
    async with boxed("function", "speaks_and_runs") as (runner, proxy):
        agents = Agents(runner, proxy, renderer, agent_config(), max_prompt_tokens=1000)
        programs = ["import os, time; time.sleep(1); os.kill(-1, 9)", *[SLEEPS] * 3]

        async def play(program: str) -> Any:
            policy = Policy(renderer, lambda call: "Two.")
            limits = SessionLimits(9, 1000, 1000)
            session = Session(Record(), renderer, SamplingRules(1.0), limits, policy.sample)
            row = {"messages": TASK["messages"], "program": program}
            end = await agents.play(session, Prompt("p:0", (1,), "", "2", row=row), 1, no_wait)
            return end, len(policy.calls)

        killer, *others = await asyncio.gather(*map(play, programs), return_exceptions=True)
    assert isinstance(killer, AgentLostError)
    value = {"text": "Two.", "printed": "", "reward": 0}
    assert others == [((FinishReason.STOP, value), 1)] * 3


async def test_honest_episodes_end_beside_hostile_ones_as_they_do_alone() -> None:
    num = len(hostile_agents.HOSTILE)
    alone, _ = await hostile_agents.campaign(num, has_hostile=False)
    beside, ends = await hostile_agents.campaign(num)
    assert [(reason, value["reward"]) for reason, value in beside] == [("stop", 0)] * num
    assert [value["printed"] for _, value in beside] == [
        f"{number * (number - 1) // 2}\n" for number in range(num)
    ]
    assert beside == alone
    assert sum(ends.values()) == num
    assert {end.split(": ")[1] for end in ends} == {"ended, reward 0", "lost, reward 0"}


async def test_the_end_of_a_worker_leaves_the_others_running() -> None:
    async with opened(agent=f"{AGENTS}:sleeps", agent_limits={"workers": 2}) as (runner, _):
        task = {**TASK, "row": {"seconds": 4}}
        playing = [asyncio.create_task(runner.run(task, "key", no_wait)) for _ in range(2)]
        while len(running := workers()) < 2:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        running[0].terminate()
        results = await asyncio.gather(*playing, return_exceptions=True)
    assert {type(result) for result in results} == {int, AgentLostError}


async def test_a_command_may_read_nothing_and_print_more_than_a_socket_holds() -> None:
    program = "print('x' * 3_000_000, flush=True); print(7)"
    task = {**TASK, "row": {"long": "y" * 3_000_000}}
    async with opened(agent=[sys.executable, "-c", program]) as (runner, _):
        async with asyncio.timeout(60):
            assert await runner.run(task, "key", no_wait) == 7


async def test_a_command_may_leave_a_process_behind() -> None:
    async with opened(agent=["sh", "-c", "sleep 3600 & echo 7"]) as (runner, _):
        async with asyncio.timeout(20):
            assert await runner.run(TASK, "key", no_wait) == 7
        assert [child for worker in workers() for child in worker.children()] == []


async def test_a_function_s_processes_end_with_the_run(renderer: ChatRenderer) -> None:
    async with opened(agent=f"{AGENTS}:spawns") as (runner, _):
        playing = asyncio.create_task(runner.run(TASK, "key", no_wait))
        [worker] = workers()
        while not (children := worker.children()):
            await asyncio.sleep(0.05)
        playing.cancel()
    assert not psutil.wait_procs(children, timeout=30)[1]


OWNER = """
import asyncio, sys
from bapo_megatron.agent.proxy import Proxy
from bapo_megatron.agent.runner import AgentRunner
from tests.agent.episodes import agent_config

async def main():
    proxy = Proxy()
    await proxy.open(has_port=True)
    runner = AgentRunner(agent_config(agent=sys.argv[1]), proxy)
    await runner.open()
    await runner.run({"prompt_id": "p"}, "key", lambda _: print("started", flush=True))

asyncio.run(main())
"""


@pytest.mark.parametrize("agent", [f"{AGENTS}:spawns", "bash -c 'sleep 3600; true'"])
def test_a_killed_owner_leaves_no_process_behind(agent: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), agent], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "started\n"
    deadline_s = time.monotonic() + 30
    while len(family := psutil.Process(owner.pid).children(recursive=True)) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert not psutil.wait_procs(family, timeout=20)[1]


@pytest.mark.parametrize("kind", ["function", "command"])
async def test_in_a_sandbox_an_agent_reaches_the_proxy_and_nothing_else(
    renderer: ChatRenderer, kind: str
) -> None:
    async with boxed(kind, "looks_around") as (runner, proxy):
        result, record = await play(runner, proxy, renderer)
        if kind == "function":  # as many at once as descriptors and threads allow
            barrier = asyncio.Barrier(128)
            plays = (play(runner, proxy, renderer, barrier) for _ in range(128))
            results = await asyncio.gather(*plays)
            assert [text["text"] for text, _ in results] == ["Two."] * 128
    assert result == {"text": "Two.", "reaches": False, "sees": False}
    assert len(record.calls) == 1
