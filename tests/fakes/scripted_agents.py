"""Agents in this process, which reach the real proxy and wait for as long as a test says."""

from __future__ import annotations

import contextlib
import json
import zlib
from typing import TYPE_CHECKING, Any

import aiohttp

from bapo_megatron.agent.proxy import Proxy
from bapo_megatron.environment.base import EnvironmentFailedError
from bapo_megatron.rollout.agents import Agents
from tests.agent.episodes import agent_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from bapo_megatron.data.chat import ChatRenderer

    Delay = Callable[[], Awaitable[None]]

MAX_PROMPT_TOKENS = 2000


class RefusedError(Exception):
    """The proxy refused a call."""


class Client:
    """What a scripted agent uses: one message in, one out."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str, delay: Delay) -> None:
        self._http, self._url, self._delay = http, f"{url}/chat/completions", delay
        self._headers = {"Authorization": f"Bearer {key}"}
        self.ids: list[str] = []
        """Of its responses."""

    async def __call__(
        self, messages: list[dict[str, Any]], *, trains: bool = True, **fields: Any
    ) -> dict[str, Any]:
        await self._delay()
        body = {"messages": messages, **fields}
        headers = self._headers | ({} if trains else {"X-Bapo-Train": "false"})
        async with self._http.post(self._url, json=body, headers=headers) as reply:
            content = await reply.json()
        await self._delay()
        if "error" in content:
            raise RefusedError(content["error"]["message"])
        self.ids.append(content["id"])
        message: dict[str, Any] = content["choices"][0]["message"]
        return message


class ScriptedRunner:
    """The part of ``AgentRunner`` that episodes use."""

    def __init__(self, agent: Any, http: aiohttp.ClientSession, url: str, delay: Delay) -> None:
        self._agent, self._http, self._url, self._delay = agent, http, url, delay
        self.num_started = 0

    async def run(
        self, task: Mapping[str, Any], key: str, on_wait: Any, *, is_alone: bool = False
    ) -> Any:
        on_wait(False)
        self.num_started += 1
        await self._delay()
        try:
            value = await self._agent(task, Client(self._http, self._url, key, self._delay))
        except RefusedError as error:
            raise EnvironmentFailedError(str(error), "error") from error
        return json.loads(json.dumps(value))


async def at_once() -> None:
    """No delay."""


@contextlib.asynccontextmanager
async def scripted_agents(
    agent: Any, renderer: ChatRenderer, delay: Delay = at_once, **rollout: Any
) -> AsyncIterator[Agents]:
    proxy = Proxy()
    await proxy.open(has_port=True)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        runner: Any = ScriptedRunner(agent, http, proxy.base_url, delay)
        yield Agents(runner, proxy, renderer, agent_config(**rollout), MAX_PROMPT_TOKENS)
    await proxy.close()


def drawn(*values: Any) -> int:
    """A number that depends on these values alone."""
    return zlib.crc32(json.dumps(values).encode())


async def wanders(task: dict[str, Any], ask: Client) -> Any:
    """A few turns, with branches, a subagent and a compaction, as the policy's words decide."""
    messages, number = list(task["messages"]), 0
    while True:
        turn = await ask(messages, max_tokens=20 if drawn(messages) % 5 == 0 else None)
        number += 1
        choice = drawn(task["seed"], number, turn["content"]) % 8
        if choice == 0 or number == 5:
            return {"turns": number}
        if choice == 1:
            await ask([{"role": "user", "content": f"check {turn['content'][:5]}"}])
        if choice == 2:
            await ask([*messages, {**turn, "content": turn["content"] + "!"}])
        if choice == 3:
            messages = [{"role": "user", "content": f"so far {turn['content'][:9]}"}]
            continue
        if choice == 4:
            await ask([*messages, turn, {"role": "user", "content": "dead end"}])
        if choice == 5 and drawn(number, task["seed"]) % 4 == 0:
            raise EnvironmentFailedError("it broke", "error")
        messages = [*messages, turn, {"role": "user", "content": f"go on {number}"}]
