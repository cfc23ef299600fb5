"""Plays an environment of openenv-core 0.3 in the worker's process, in an interpreter of its own.

A row's answer, a number, is the seed, so that a group's episodes hide one digit::

    python3.12 -m venv /opt/openenv && /opt/openenv/bin/pip install openenv-core==0.3.0 openai
    bapo-megatron train config.yaml rollout.agent=examples.agents.openenv_digits:play \
        rollout.agent_python=/opt/openenv/bin/python rollout.agent_sandbox=null \
        "reward.functions=[{name: openenv, function: 'examples.agents.verifiers_reward:score'}]"
"""

from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

HTTP = DefaultAsyncHttpxClient()  # one for all episodes: making one takes 0.1 s
MAX_TURNS = 4


class Guess(Action):
    """A turn of the policy."""

    text: str


class Hint(Observation):
    """What the policy is told."""

    text: str


class Digits(Environment[Guess, Hint, State]):
    """Hides a digit, and says whether a guess is too small or too large."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        """Hide the last digit of the seed."""
        self._state, self._goal = State(episode_id=episode_id, step_count=0), (seed or 0) % 10
        return Hint(text="Which digit?")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        """Compare a guess with the digit."""
        self._state.step_count += 1
        guess = next((int(char) for char in reversed(action.text) if char.isdecimal()), None)
        if guess is None or guess == self._goal:
            return Hint(text="", done=True, reward=float(guess == self._goal))
        text = "larger" if guess < self._goal else "smaller"
        return Hint(text=text, done=self._state.step_count == MAX_TURNS, reward=0.0)

    @property
    def state(self) -> State:
        """The number of turns so far."""
        return self._state


async def play(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Play one episode; return its reward."""
    environment = Digits()
    hint = environment.reset(seed=int(task["answer"]), episode_id=task["prompt_id"])
    messages: list[Any] = [{"role": "user", "content": hint.text}]
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    while not hint.done:
        completion = await client.chat.completions.create(model="policy", messages=messages)
        turn = completion.choices[0].message.content or ""
        hint = environment.step(Guess(text=turn))
        messages.append({"role": "assistant", "content": turn})
        messages.append({"role": "user", "content": hint.text})
    return {"reward": float(hint.reward or 0)}
