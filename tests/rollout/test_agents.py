"""Agents' episodes: calls wait and go on, and runs with a driven engine repeat."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bapo_megatron.config.rollout import EpisodesConfig
from bapo_megatron.data.dump import decode_batch
from bapo_megatron.environment.load import SingleTurn
from bapo_megatron.rollout.episodes import Episodes, Interaction
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.rollout.saved import SavedRollout
from bapo_megatron.types import AGENT_COUNTS, EncodedBatch, FinishReason, Prompt
from tests.agent.episodes import make_renderer
from tests.data.prompt_sets import make_stream
from tests.fakes.fake_pool import deliver
from tests.fakes.scripted_agents import Client, RefusedError, scripted_agents, wanders
from tests.fakes.stepped_pool import SteppedPool, SteppedRequest
from tests.rollout.batching_setup import make_batches
from tests.rollout.episodes_setup import CountingRewards
from tests.rollout.saved_files import AT_START, file_of, read_file, without_clock
from tests.rollout.test_repeats import (
    LAG,
    NOT_PARTIAL,
    PARTIAL,
    ROUNDS,
    TOTAL_STEPS,
    UPDATES,
    Delays,
    Run,
    content_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from bapo_megatron.data.chat import ChatRenderer
    from bapo_megatron.engine.base import GenerateRequest
    from bapo_megatron.types import Sample

PROMPTS = [
    Prompt(f"p:{n}", (1, 2), "", "", row={"messages": [{"role": "user", "content": f"q{n}"}]})
    for n in range(7)
]


AHEAD = {"async_steps": 1, "local": {"decode_steps_ahead": 9}}
STALE = AHEAD | {
    "oversample_groups": 2,
    "staleness": {"max_age": 1, "measure": "mean", "action": "regenerate"},
}


@pytest.fixture(scope="module")
def renderer(tokenizer_dir: Path) -> ChatRenderer:
    return make_renderer(tokenizer_dir)


class BytePool(SteppedPool):
    """Its tokens are bytes, and it notes what each response's engine saw."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[tuple[tuple[int, ...], list[int]]] = []

    def _accept(self, asked: GenerateRequest, on_part: Any) -> SteppedRequest:
        assert max(asked.input_ids) < 300
        tokens: list[int] = []
        self.seen.append((tuple(asked.input_ids), tokens))

        def note(part: Any) -> None:
            tokens.extend(part.token_ids.tolist())
            on_part(part)

        return ByteRequest(asked, note)


class ByteRequest(SteppedRequest):
    def take(self, version: int) -> Any:
        self.tokens = [97 + token % 26 for token in self.tokens]
        return super().take(version)


class LastWord:
    """Rewards by the last letter of the last turn."""

    async def score(self, response: Any) -> Any:
        from bapo_megatron.reward.base import Score

        return Score(float(ord(response.text[-1:] or "a") % 2))


@dataclass
class Case:
    renderer: ChatRenderer
    rollout: dict[str, Any]
    is_slow: bool = False

    def play(self, delay_seed: int, state: bytes | None = None, first_step: int = 0) -> Run:
        return asyncio.run(self._play(delay_seed, state, first_step))

    async def _play(self, delay_seed: int, state: bytes | None, first_step: int) -> Run:
        delays, run, delay = random.Random(delay_seed), Run(), Delays(delay_seed)
        self.pool = BytePool(
            version=first_step * UPDATES, is_slow=self.is_slow, delay_seed=delay_seed
        )
        sizes = {"groups_per_step": 3, "samples_per_group": 2, "max_response_tokens": 150}
        setting = {"agent": "a:b", "agent_sandbox": None, **sizes, **self.rollout}
        async with scripted_agents(wanders, self.renderer, delay, **self.rollout) as agents:
            limits = EpisodesConfig(on_error="zero")
            interaction = Interaction(SingleTurn(), self.renderer, limits, agents=agents)
            batches = make_batches(
                Grader(self.renderer, LastWord()),  # type: ignore[arg-type]
                setting,
                interaction=interaction,
                prompts=make_stream(PROMPTS, shuffle=True),
                total_steps=TOTAL_STEPS,
                updates=UPDATES,
            )
            if state is not None:
                batches.restore(read_file(state))
            batches.attach(self.pool)  # type: ignore[arg-type]
            for step in range(first_step, TOTAL_STEPS):
                async with asyncio.timeout(60):
                    batch = await batches.collect(step + 1, deliver)
                await asyncio.sleep(delays.choice((0, 0.001, 0.004)))
                await batches.pause()
                assert not self.pool.requests
                self.pool.version += UPDATES
                await batches.resume()
                run.states.append(without_clock(batches.state()))
                run.batches.append(content_of(batch))
            await batches.close()
        return run


def samples_of(batch: bytes) -> list[Sample]:
    return decode_batch(EncodedBatch("a batch", bytearray(batch))).samples


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    rollout=st.one_of(PARTIAL, PARTIAL, NOT_PARTIAL, ROUNDS, LAG),
    is_slow=st.booleans(),
    stopped_after=st.integers(1, TOTAL_STEPS - 1),
)
def test_neither_an_agent_s_delays_nor_a_resumption_change_a_run(
    renderer: ChatRenderer, rollout: dict[str, Any], is_slow: bool, stopped_after: int
) -> None:
    case = Case(renderer, rollout, is_slow)
    first, second = case.play(1), case.play(2)
    assert first.batches == second.batches
    assert first.states == second.states
    resumed = case.play(3, first.states[stopped_after - 1], stopped_after)
    assert resumed.batches == first.batches[stopped_after:]
    assert resumed.states == first.states[stopped_after:]


@pytest.mark.slow
@pytest.mark.parametrize("rollout", [AHEAD, STALE], ids=["ahead", "regenerated"])
def test_what_engines_saw_is_what_trains(renderer: ChatRenderer, rollout: dict[str, Any]) -> None:
    case = Case(renderer, rollout)
    run = case.play(0)
    seen = {tokens: Counter(sampled) for tokens, sampled in case.pool.seen}
    samples = [sample for batch in run.batches for sample in samples_of(batch)]
    assert any(sample.branches for sample in samples)
    counts: Counter[str] = Counter()
    for batch in run.batches:
        stats = decode_batch(EncodedBatch("a batch", bytearray(batch))).stats
        counts.update(stats.environment_counts)  # type: ignore[arg-type]
    assert counts[AGENT_COUNTS[1]] > 0
    assert counts[AGENT_COUNTS[2]] == 0
    num_turns = 0
    for sample in samples:
        for sequence in sample.sequences:
            prompt, response = sequence.prompt.token_ids.tolist(), sequence.response_token_ids
            starts = [0, *(start + n for start, n in sequence.written)] if len(response) else []
            for start in starts:
                assert (*prompt, *response[:start].tolist()) in seen
                num_turns += 1
    if rollout is AHEAD:  # else calls of episodes that were begun again count, too
        assert num_turns == counts[AGENT_COUNTS[0]]


class Setup:
    """One episode whose engine a test drives."""

    def __init__(self, renderer: ChatRenderer, agents: Any, **limits: Any) -> None:
        from bapo_megatron.rollout.buffer import RolloutBuffer

        self.pool: Any = BytePool(version=0)
        self.pool.stop_interval = limits.pop("stop_interval", 12)
        config = EpisodesConfig.model_validate(limits)
        self.interaction = Interaction(SingleTurn(), renderer, config, agents=agents)
        grader = Grader(renderer, CountingRewards())  # type: ignore[arg-type]
        self.episodes = Episodes(self.pool, self.interaction, grader, self._request_of)
        self.buffer = RolloutBuffer()
        self.buffer.start_group(PROMPTS[0], 2)
        self.max_tokens = 200

    def _request_of(self, episode: Any) -> Any:
        from bapo_megatron.engine.base import GenerateRequest, SamplingSettings

        return GenerateRequest(
            input_ids=(1, 2),
            sampling=SamplingSettings(1.0, self.max_tokens, seed=100 + episode.index),
            label=f"sample {episode.index}",
            order=episode.key,
        )

    @property
    def group(self) -> list[Any]:
        [group] = self.buffer
        return group.episodes

    async def play(self) -> None:
        self.episodes.advance(self.buffer)
        async with asyncio.timeout(20):
            while not all(episode.is_scored for episode in self.group):
                await self.episodes.wait_for_change()


async def test_an_agent_waits_while_its_call_is_continued_by_new_weights(
    renderer: ChatRenderer,
) -> None:
    async def once(task: dict[str, Any], ask: Client) -> Any:
        return (await ask(task["messages"]))["content"]

    async with scripted_agents(once, renderer) as agents:
        setup = Setup(renderer, agents, stop_interval=10**9)
        setup.max_tokens = 40
        setup.episodes.advance(setup.buffer)
        await setup.episodes.drive(16)
        await setup.episodes.stop()
        await setup.episodes.settle()
        assert [episode.num_tokens for episode in setup.group] == [16, 16]
        saved = file_of(SavedRollout(AT_START, setup.buffer.snapshot()))
        setup.pool.version = 3
        await setup.play()
        assert agents.runner.num_started == 2  # type: ignore[attr-defined]
        for episode in setup.group:
            sample = episode.sample
            assert [tuple(span) for span in sample.versions] == [(0, 16), (3, 24)]
            assert sample.finish_reason is FinishReason.LENGTH
            assert episode.state == renderer.decode(sample.response_token_ids.tolist())
            assert episode.texts == (episode.state,)
        # After a kill the agent starts again, and its call goes on where it was.
        later = Setup(renderer, agents, stop_interval=10**9)
        later.max_tokens = 40
        later.buffer = read_file(saved).buffer
        later.pool.version = 3
        await later.play()
        assert agents.runner.num_started == 4  # type: ignore[attr-defined]
        for episode, other in zip(setup.group, later.group, strict=True):
            assert episode.sample.response_token_ids.tolist() == (
                other.sample.response_token_ids.tolist()
            )
            assert other.sample.versions == episode.sample.versions


async def test_agents_that_fail_end_their_episodes_as_environments_do(
    renderer: ChatRenderer,
) -> None:
    async def fails(task: dict[str, Any], ask: Client) -> Any:
        await ask(task["messages"])
        await ask([])

    async def makes_no_call(task: dict[str, Any], ask: Client) -> Any:
        return 1

    for agent in (fails, makes_no_call):
        async with scripted_agents(agent, renderer) as agents:
            setup = Setup(renderer, agents, on_error="zero")
            await setup.play()
            for episode in setup.group:
                assert episode.sample.finish_reason is FinishReason.ENVIRONMENT
                assert (episode.sample.num_sampled > 0) is (agent is fails)
            assert setup.interaction.errors == {"error": 2}
            setup = Setup(renderer, agents)
            with pytest.raises(Exception, match=r"'messages' must have|made no call"):
                await setup.play()
            await setup.episodes.close()


async def test_what_an_agent_was_last_told_is_in_its_error(renderer: ChatRenderer) -> None:
    async def swallows(task: dict[str, Any], ask: Client) -> Any:
        with contextlib.suppress(RefusedError):
            await ask([])

    async with scripted_agents(swallows, renderer) as agents:
        setup = Setup(renderer, agents)
        with pytest.raises(
            Exception, match=r"made no call .*\(.* got HTTP 400: the body: 'messages' "
        ):
            await setup.play()
        await setup.episodes.close()


async def test_an_agent_that_works_too_long_or_calls_too_often_is_ended(
    renderer: ChatRenderer,
) -> None:
    async def hangs(task: dict[str, Any], ask: Client) -> Any:
        await ask(task["messages"])
        await asyncio.sleep(3600)

    async with scripted_agents(hangs, renderer, agent_limits={"timeout_s": 0.3}) as agents:
        setup = Setup(renderer, agents, on_error="zero")
        await setup.play()
        assert setup.interaction.errors == {"timeout": 2}

    async def never_ends(task: dict[str, Any], ask: Client) -> Any:
        while True:
            await ask(task["messages"])

    async with scripted_agents(never_ends, renderer, agent_limits={"max_calls": 3}) as agents:
        setup = Setup(renderer, agents)
        await setup.play()
        for episode in setup.group:
            assert episode.sample.finish_reason is FinishReason.TURNS
            assert len(episode.sample.sequences) == 3
            assert episode.sample.reward == 0.5
