"""Agents' episodes: each is a session of the proxy and one run of the agent (``rollout.agent``)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bapo_megatron.agent.protocol import SamplingRules
from bapo_megatron.agent.proxy import Proxy, Session, SessionLimits
from bapo_megatron.agent.runner import AgentLostError, AgentRunner, OnWait
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.record import Call, Record, call_rewards
from bapo_megatron.engine.base import SamplingSettings
from bapo_megatron.environment.base import EnvironmentFailedError
from bapo_megatron.types import FinishReason, Prompt


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
        overrides = self.config.agent_sampling == "override"
        rules = SamplingRules(sampling.temperature, sampling.top_p, sampling.top_k, overrides)
        max_calls = self.config.agent_limits.max_calls
        limits = SessionLimits(max_calls, sampling.max_new_tokens, self.max_prompt_tokens)
        return Session(record, self.renderer, rules, limits, sample, is_serial=is_serial)

    async def play(
        self, session: Session, prompt: Prompt, seed: int, on_wait: OnWait
    ) -> tuple[FinishReason, Any]:
        """Run the agent to its end; return why the episode ended, and the agent's value.

        Raises:
            EnvironmentFailedError: The agent failed, before it met a limit of calls or tokens.
                Its kind is "lost" if its worker ended twice, the second time without others.
            RolloutError: A call could not be sampled.
        """
        with self.proxy.admitted(session) as key:
            task = self._task(prompt, seed)
            playing = asyncio.create_task(self._run(session, task, key, on_wait))
            timing = asyncio.create_task(self._time_out(session))
            try:
                ends = [session.end, playing, timing]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                value = next(end for end in ends if end.done()).result()
                finished = [call for call in session.record.calls if call.is_finished]
                calls = [call for call in finished if call.is_trained and call.num_tokens]
                if not calls:
                    told = "made no call that trains, or its client answers from a cache"
                    if session.num_refusals and not finished:
                        told = f"had every call refused, {session.num_refusals} in all"
                    raise EnvironmentFailedError(
                        f"rollout.agent: {told} (prompt '{prompt.prompt_id}'); let it call the "
                        "policy, unmarked, by OPENAI_BASE_URL and OPENAI_API_KEY, without a cache",
                        "error",
                    )
                if unknown := call_rewards(value).keys() - {call.name for call in calls}:
                    raise EnvironmentFailedError(
                        "rollout.agent: call_rewards must have the ids of responses that train, "
                        f"none of which ends in '{min(unknown)}' (prompt '{prompt.prompt_id}')",
                        "error",
                    )
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
            return await self.runner.run(task, key, on_wait, is_alone=True)

    async def _time_out(self, session: Session) -> None:
        limit_s = self.config.agent_limits.timeout_s
        while (left_s := limit_s - session.own_s) > 0:
            await asyncio.sleep(left_s)
        raise EnvironmentFailedError(
            f"rollout.agent: exceeded rollout.agent_limits.timeout_s = {limit_s:g} s; correct it, "
            "raise the limit, or set rollout.episodes.on_error=zero",
            "timeout",
        )

    def _task(self, prompt: Prompt, seed: int) -> dict[str, Any]:
        row = dict(prompt.row)
        return {
            "prompt_id": prompt.prompt_id,
            "source": prompt.source,
            "messages": row.pop("messages"),
            **({"answer": prompt.answer} if self.config.agent_has_answer else {}),
            "row": row,
            "seed": seed,
        }
