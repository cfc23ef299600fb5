"""Agents that tests run in processes of their own."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


async def asks(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """A coroutine with the SDK: two turns."""
    import openai  # takes seconds, which other agents need not wait for

    sys.stdout.write("not a message\n")
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = list(task["messages"])
        for _ in range(2):
            completion = await client.chat.completions.create(model="policy", messages=messages)
            message = completion.choices[0].message
            messages += [message.model_dump(), {"role": "user", "content": "and?"}]
    return {"last": message.content, "answer": task["answer"]}


def asks_in_a_thread(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    completion = client.chat.completions.create(model="policy", messages=task["messages"])
    return completion.choices[0].message.content


def wanders(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Two turns and a subagent with the standard library, after random delays."""
    delays = random.Random()

    def ask(messages: list[Any]) -> str:
        time.sleep(delays.choice((0, 0.01, 0.1)))
        return plain_turn(messages, base_url, api_key)

    messages = list(task["messages"])
    first = ask(messages)
    aside = ask([{"role": "user", "content": f"check {first[:3]}"}])
    turn = {"role": "assistant", "content": first}
    last = ask([*messages, turn, {"role": "user", "content": f"so {len(aside)}?"}])
    return {"lengths": [len(first), len(aside), len(last)]}


def even(state: Any) -> float:
    """Reward half of the episodes."""
    return float(sum(state["lengths"]) % 2 == 0) if state else 0.0


def plain_turn(messages: list[Any], base_url: str, api_key: str) -> str:
    from urllib.request import Request, urlopen

    body = json.dumps({"messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}"}
    with urlopen(Request(f"{base_url}/chat/completions", body, headers)) as reply:
        text: str = json.load(reply)["choices"][0]["message"]["content"]
    return text


async def sleeps(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    await asyncio.sleep(task["row"].get("seconds", 3600))
    return os.getpid()


def spawns(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Leaves a process behind, then hangs."""
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    time.sleep(3600)


def fails(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    raise KeyError("no such city")


def returns_no_json(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    return {1, 2}


def dies(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    os._exit(3)


def dies_once(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Two turns, between which the process dies the first time."""
    messages = list(task["messages"])
    turn = {"role": "assistant", "content": plain_turn(messages, base_url, api_key)}
    died = Path(task["row"]["file"])
    if not died.exists():
        died.touch()
        os._exit(3)
    return plain_turn([*messages, turn, {"role": "user", "content": "and?"}], base_url, api_key)


async def cancels_itself(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    raise asyncio.CancelledError


def speaks(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    return {"text": plain_turn(task["messages"], base_url, api_key)}


def runs(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Run a program, and tell what it printed; no program is to change the rest."""
    command = [sys.executable, "-c", task["row"]["program"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return {"printed": done.stdout, "reward": 0}


def runs_undumpable(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    import ctypes

    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE
    return runs(task, base_url, api_key)


def speaks_and_runs(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    return {**speaks(task, base_url, api_key), **runs(task, base_url, api_key)}


def value(state: Any) -> float:
    """Reward what an agent says that its episode is worth."""
    return float(state["reward"]) if state else 0.0


def looks_around(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Speaks, and tells what else it can reach and see."""
    try:
        socket.create_connection(("10.255.255.1", 80), 1)
        reaches = True
    except OSError:
        reaches = False
    sees = Path("/etc/passwd").exists()
    return {**speaks(task, base_url, api_key), "reaches": reaches, "sees": sees}


def main(name: str) -> None:
    """One of these functions as a command, with the standard library alone."""
    task = json.loads(sys.stdin.readline())
    base_url, api_key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == base_url
    assert os.environ["ANTHROPIC_API_KEY"] == api_key
    result = globals()[name](task, base_url, api_key)
    sys.stdout.write("some output\n")
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
