"""Programs that agents run neither reach other episodes nor write their agent's value.

Here a program is a child of its agent, in the agent's sandbox.
"""

import asyncio
import json
from typing import Any
from unittest import mock

import pytest

from bapo_megatron.agent.runner import AgentLostError, _GoneError, _Host
from bapo_megatron.rollout.agents import Agents
from bapo_megatron.types import Prompt
from tests.agent.boxes import boxed
from tests.agent.episodes import agent_config

SECRET = "the-answer-is-424242"
_OTHERS = f"""
import ctypes, glob, os, re, signal, sys
VALUE = '{{"printed": "", "reward": 1}}'
FORGED = f'\\n{{{{"id": 0, "result": {{VALUE}}}}}}\\n{{VALUE}}\\n'.encode()
OTHERS = [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]
AGENT = os.getppid()
C = ctypes.CDLL(None)
def opened(name, mode="rb"):
    for pid in OTHERS:
        for path in glob.glob(f"/proc/{{pid}}/{{name}}"):
            try:
                yield open(path, mode, 0)
            except OSError:
                pass
def seen(content):
    if content and ({SECRET[:-6]!r} + "424242").encode() in content:
        print("seen")
"""
WRITES = """
for file in opened("fd/1", "wb"):
    if file.seekable():
        file.seek(1 << 20)
    file.write(FORGED)
"""
WRITES_FILES = """
for file in opened("fd/[3-9]*", "wb"):
    if file.seekable():  # not the pipe in which the agent reads this program's output
        file.seek(1 << 20)
        file.write(FORGED)
"""
READS_STANDARD_INPUT = """
for file in opened("fd/0"):
    os.set_blocking(file.fileno(), False)
    seen(file.read(1 << 16))
"""
ATTACKS = {
    "writes standard output": WRITES,
    "writes every file of others": WRITES_FILES,
    "reads standard input": READS_STANDARD_INPUT,
    "reads every file of others": READS_STANDARD_INPUT.replace("fd/0", "fd/[3-9]*"),
    "reads environments": "for file in opened('environ'): seen(file.read())",
    "reads command lines": "for file in opened('cmdline'): seen(file.read())",
    "reads temporary files": """
for path in glob.glob("/tmp/**", recursive=True) + glob.glob("/dev/shm/**", recursive=True):
    if os.path.isfile(path) and os.access(path, os.W_OK):  # PYTHONPATH may be there
        seen(open(path, "rb").read())
""",
    "traces the agent": "if C.ptrace(16, AGENT, 0, 0) == 0: print('traced')",
    "takes a descriptor": """
for number in range(9):
    if C.syscall(438, C.syscall(434, AGENT, 0), number, 0) >= 0:
        print("taken")
""",
    "copies memory": """
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
here = ctypes.create_string_buffer(8)
ours, theirs = Part(ctypes.addressof(here), 8), Part(id(None), 8)
if C.process_vm_readv(AGENT, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) > 0:
    print("copied")
""",
    "calls with another key": """
from urllib.request import Request, urlopen
address, headers = os.environ["OPENAI_BASE_URL"], {"Authorization": "Bearer sk-" + "0" * 32}
try:
    print(urlopen(Request(f"{address}/models", headers=headers)).status)
except OSError as error:
    assert error.code == 401
""",
    "leaves processes behind": """
for number in range(4):
    if os.fork() == 0:
        os.closerange(0, 3)
        os.setsid()
        signal.pause()
""",
}
OF_UNDUMPABLE = {
    "reads memory": """
for file in opened("mem"):
    if "/1/" not in file.name:  # bubblewrap's, which holds nothing
        print("can read", file.name)
""",
    "writes memory": """
for file in opened("mem", "r+b"):
    if "/1/" not in file.name:
        print("can write", file.name)
""",
}
KILLS = {
    "all": "os.kill(-1, signal.SIGKILL)",
    "its agent": "os.kill(AGENT, signal.SIGKILL)",
    "with a termination": "[os.kill(int(p), signal.SIGTERM) for p in OTHERS]",
}
HONEST = {"printed": "", "reward": 0}


def task_of(program: str) -> dict[str, Any]:
    row = {"program": _OTHERS + program}
    return {"prompt_id": "p", "messages": [], "answer": SECRET, "row": row}


async def values(kind: str, name: str, programs: list[str]) -> list[Any]:
    """What agents return beside these programs, all at once."""
    limits = {"isolation": "episode"}
    settings = {"agent_limits": limits, "agent_gets_answer": True}
    async with boxed(kind, name, **settings) as (runner, _), asyncio.timeout(120):
        plays = [runner.run(task_of(p), "key", lambda _: None) for p in programs]
        return await asyncio.gather(*plays, return_exceptions=True)


@pytest.mark.parametrize("kind", ["function", "command"])
async def test_a_program_neither_learns_the_answer_nor_writes_the_value(kind: str) -> None:
    found = dict(zip(ATTACKS, await values(kind, "runs", list(ATTACKS.values())), strict=True))
    if isinstance(found["writes standard output"], AgentLostError):
        # Unless root starts it, bubblewrap's first process has a pipe that others can open.
        found["writes standard output"] = HONEST
    assert found == dict.fromkeys(ATTACKS, HONEST)


@pytest.mark.parametrize(("kind", "name"), [("function", "runs"), ("command", "runs_undumpable")])
async def test_a_program_cannot_open_the_memory_of_an_undumpable_agent(
    kind: str, name: str
) -> None:
    assert await values(kind, name, list(OF_UNDUMPABLE.values())) == [HONEST] * 2


@pytest.mark.parametrize("kind", ["function", "command"])
async def test_a_program_that_kills_ends_its_own_episode_alone(kind: str) -> None:
    found = await values(kind, "runs", [*KILLS.values(), "", "import time; time.sleep(2)"])
    assert [type(error) for error in found[:3]] == [AgentLostError] * 3
    assert found[3:] == [HONEST] * 2


async def test_the_attacks_work_where_nothing_holds_them() -> None:
    """A command that is dumpable has memory that its programs can open: docs/security.md."""
    found = await values("command", "runs", list(OF_UNDUMPABLE.values()))
    assert ["can " in value["printed"] for value in found] == [True, True]


@pytest.mark.parametrize(
    "forged",
    [
        b'{"id": 0, "result": {"reward": 1}}\n',
        b'{"id": 0, "result": {"reward": 1}, "secret": "guessed"}\n',
        b"[" * 100_000 + b"\n",
        b"no JSON\n",
    ],
)
async def test_a_reply_without_the_worker_s_secret_is_no_reply(forged: bytes) -> None:
    reader, sent = asyncio.StreamReader(), list[dict[str, Any]]()

    async def end() -> None:
        pass

    host = _Host(reader, lambda line: sent.append(json.loads(line)), end)
    starting = asyncio.create_task(host.start({}))
    await asyncio.sleep(0)
    ready = {"ready": True, "secret": sent[0]["secret"]}
    reader.feed_data(json.dumps(ready).encode() + b"\n")
    assert await starting == ""
    playing = asyncio.create_task(host.play({}, "key"))
    await asyncio.sleep(0)
    reader.feed_data(forged)
    with pytest.raises(_GoneError):
        await playing
    await host.close()


@pytest.mark.parametrize(
    ("agent", "gets_answer", "has_answer"),
    [("a:b", None, True), ("./a", None, False), ("./a", True, True), ("a:b", False, False)],
)
def test_a_command_gets_the_answer_only_if_it_is_asked_for(
    agent: str, gets_answer: bool | None, has_answer: bool
) -> None:
    config = agent_config(agent=agent, agent_gets_answer=gets_answer)
    prompt = Prompt("p", (1,), answer="42", text="", row={"messages": []})
    task = Agents(mock.Mock(), mock.Mock(), mock.Mock(), config, 0)._task(prompt, seed=0)
    assert task.get("answer") == ("42" if has_answer else None)


async def test_episodes_that_restart_alone_wait_for_a_worker_of_their_own() -> None:
    waits = list[bool]()
    async with boxed("function", "runs", agent_limits={"commands": 1}) as (runner, _):
        plays = [runner.run(task_of(""), "key", waits.append, is_alone=True) for _ in range(3)]
        assert await asyncio.gather(*plays) == [HONEST] * 3
    assert waits == [False, True, True, False, False]
