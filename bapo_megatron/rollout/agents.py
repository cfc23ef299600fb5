"""Agents' episodes: each is a session of the proxy and one run of the agent (``rollout.agent``)."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bapo_megatron.agent.protocol import SamplingRules
from bapo_megatron.agent.proxy import Proxy, Session, SessionLimits
from bapo_megatron.agent.runner import AgentLostError, AgentRunner, OnWait
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.record import Call, Record
from bapo_megatron.engine.base import SamplingSettings
from bapo_megatron.environment.base import EnvironmentFailedError
from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.types import FinishReason, Prompt

_MAX_REWARD = 1_000_000
"""Of a call."""


@dataclass(frozen=True)
class Agents:
    """Plays episodes, any number at a time; the owner of runner and proxy closes them."""

    runner: AgentRunner
    proxy: Proxy
    renderer: ChatRenderer
    config: RolloutConfig
    max_prompt_tokens: int
    """Limit of a conversation that begins anew."""

    def session(
        self,
        record: Record,
        sampling: SamplingSettings,
        sample: Callable[[Call], Awaitable[None]],
        *,
        is_serial: bool,
    ) -> Session:
        """Return the session of an episode that is sampled by these settings."""
        rules = SamplingRules(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            overrides=self.config.agent_sampling == "override",
        )
        max_calls = self.config.agent_limits.max_calls
        limits = SessionLimits(max_calls, sampling.max_new_tokens, self.max_prompt_tokens)
        return Session(record, self.renderer, rules, limits, sample, is_serial=is_serial)

    async def play(
        self, session: Session, prompt: Prompt, seed: int, on_wait: OnWait
    ) -> tuple[FinishReason, Any]:
        """Run the agent to its end; return why the episode ended, and the agent's value.

        Raises:
            EnvironmentFailedError: The agent failed, before it met a limit of calls or tokens.
            RolloutError: A call could not be sampled.
        """
        with self.proxy.admitted(session) as key:
            task = _task(prompt, seed)
            playing = asyncio.create_task(self._run(session, task, key, on_wait))
            timing = asyncio.create_task(self._time_out(session))
            try:
                await asyncio.wait(
                    [playing, timing, session.failure], return_when=asyncio.FIRST_COMPLETED
                )
                if session.failure.done():
                    session.failure.result()
                value = playing.result() if playing.done() else timing.result()
                calls = [call for call in session.record.calls if call.is_trained]
                if not any(call.is_finished and call.num_tokens for call in calls):
                    raise EnvironmentFailedError(
                        f"rollout.agent: made no call that trains (prompt '{prompt.prompt_id}'); "
                        "let it call the policy, unmarked, by OPENAI_BASE_URL and OPENAI_API_KEY",
                        "error",
                    )
                _give_rewards(calls, value, prompt)
            except EnvironmentFailedError as error:
                if session.ended_by is None and session.last_refusal:
                    told = f"{error} (its last refused call got {session.last_refusal})"
                    raise EnvironmentFailedError(told, error.kind) from error
                if session.ended_by is None:
                    raise
                value = None  # it was refused a call, and did not expect that
            finally:
                playing.cancel()
                timing.cancel()
                await asyncio.gather(playing, timing, return_exceptions=True)
                await session.close()
        return session.ended_by or FinishReason.STOP, value

    async def _run(self, session: Session, task: dict[str, Any], key: str, on_wait: OnWait) -> Any:
        try:
            return await self.runner.run(task, key, on_wait)
        except AgentLostError:  # perhaps for another episode's reason
            await session.restart()
            return await self.runner.run(task, key, on_wait)

    async def _time_out(self, session: Session) -> None:
        limit_s = self.config.agent_limits.timeout_s
        while (left_s := limit_s - session.own_s) > 0:
            await asyncio.sleep(left_s)
        raise EnvironmentFailedError(
            f"rollout.agent: exceeded rollout.agent_limits.timeout_s = {limit_s:g} s; correct it, "
            "raise the limit, or set rollout.episodes.on_error=zero",
            "timeout",
        )


def _give_rewards(calls: Sequence[Call], value: Any, prompt: Prompt) -> None:
    """Set the calls' rewards that an agent's value holds, by the ids of their responses."""
    rewards = value.get("call_rewards", {}) if isinstance(value, dict) else {}
    by_name = {call.name: call for call in calls}
    for key, reward in rewards.items() if isinstance(rewards, dict) else [(None, rewards)]:
        call = by_name.get(re.split("[-_]", str(key))[-1])
        is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
        if call is None or not is_number or abs(reward) > _MAX_REWARD:
            raise EnvironmentFailedError(
                "rollout.agent: call_rewards must map ids of responses that train to numbers of at "
                f"most {_MAX_REWARD:,}, got "
                f"{shown_value(rewards if key is None else {key: reward})} (prompt "
                f"'{prompt.prompt_id}'); correct it",
                "error",
            )
        call.reward = float(reward)


def _task(prompt: Prompt, seed: int) -> dict[str, Any]:
    row = dict(prompt.row)
    return {
        "prompt_id": prompt.prompt_id,
        "source": prompt.source,
        "messages": row.pop("messages"),
        "answer": prompt.answer,
        "row": row,
        "seed": seed,
    }
