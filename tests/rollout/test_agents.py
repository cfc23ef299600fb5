"""Agents' episodes: calls wait and go on, and runs with a driven engine repeat."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bapo_megatron.agent import proxy
from bapo_megatron.config.rollout import EpisodesConfig
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.engine.base import GenerateRequest
from bapo_megatron.environment.base import EnvironmentFailedError
from bapo_megatron.environment.load import SingleTurn
from bapo_megatron.reward.base import Response, Score
from bapo_megatron.rollout.agents import Agents
from bapo_megatron.rollout.batching import BatchCollector
from bapo_megatron.rollout.episodes import Interaction
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.types import FinishReason, Prompt, Sample
from tests.agent.episodes import make_renderer
from tests.data.prompt_sets import make_stream
from tests.fakes.fake_pool import assert_likeliest
from tests.fakes.scripted_agents import Client, RefusedError, scripted_agents, wanders
from tests.fakes.stepped_pool import SteppedPool, SteppedRequest
from tests.rollout.batching_setup import make_batches
from tests.rollout.episodes_setup import Setup, script
from tests.rollout.test_repeats import (
    LAG,
    NOT_PARTIAL,
    PARTIAL,
    ROUNDS,
    TOTAL_STEPS,
    UPDATES,
    Case,
    Delays,
    decoded,
)

PROMPTS = [
    Prompt(f"p:{n}", (1, 2), "", "", row={"messages": [{"role": "user", "content": f"q{n}"}]})
    for n in range(7)
]


@pytest.fixture(scope="module")
def renderer(tokenizer_dir: Path) -> ChatRenderer:
    return make_renderer(tokenizer_dir)


class BytePool(SteppedPool):
    """Its tokens are bytes."""

    def _accept(self, asked: GenerateRequest, on_part: Any) -> SteppedRequest:
        assert max(asked.input_ids) < 300
        return ByteRequest(asked, on_part)


class ByteRequest(SteppedRequest):
    first = 97

    def take(self, version: int) -> Any:
        self.tokens = [self.first + token % 26 for token in self.tokens]
        return super().take(version)


class LastWord:
    """Rewards by the last letter of the last turn."""

    async def score(self, response: Response) -> Score:
        return Score(float(ord(response.text[-1:] or "a") % 2))


@dataclass(kw_only=True)
class AgentCase(Case):
    renderer: ChatRenderer
    make_pool = BytePool

    @contextlib.asynccontextmanager
    async def opened(self, delay: Delays) -> AsyncIterator[BatchCollector]:
        sizes = {"groups_per_step": 3, "samples_per_group": 2, "max_response_tokens": 150}
        async with scripted_agents(wanders, self.renderer, delay, **self.rollout) as agents:
            limits = EpisodesConfig(on_error="zero")
            yield make_batches(
                Grader(self.renderer, LastWord()),  # type: ignore[arg-type]
                {"agent": "a:b", "agent_sandbox": None, **sizes, **self.rollout},
                interaction=Interaction(SingleTurn(), self.renderer, limits, agents=agents),
                prompts=make_stream(PROMPTS, shuffle=True),
                total_steps=TOTAL_STEPS,
                updates=UPDATES,
                top_logprobs=self.top_logprobs,
            )


@pytest.mark.exhaustive
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
    case = AgentCase(rollout, is_slow=is_slow, renderer=renderer, top_logprobs=3)
    for batch in map(decoded, case.check(stopped_after).batches):
        assert_likeliest(batch.samples, 3)


class AgentSetup(Setup):
    """A group of two episodes whose engine a test drives."""

    def __init__(self, renderer: ChatRenderer, agents: Agents, **options: Any) -> None:
        options = {"max_tokens": 200, "num_samples": 2, **options}
        super().__init__(
            script(),
            prompt=PROMPTS[0],
            renderer=renderer,
            agents=agents,
            pool=BytePool(),
            **options,
        )

    @property
    def samples(self) -> list[Sample]:
        return [episode.finished() for episode in self.group.episodes]

    async def play(self) -> None:
        self.episodes.advance(self.buffer)
        async with asyncio.timeout(20):
            while not all(episode.is_scored for episode in self.group.episodes):
                await self.episodes.wait_for_change()


async def test_an_agent_waits_while_its_call_is_continued_by_new_weights(
    renderer: ChatRenderer,
) -> None:
    async def once(task: dict[str, Any], ask: Client) -> Any:
        return (await ask(task["messages"]))["content"]

    async with scripted_agents(once, renderer) as agents:
        setup = AgentSetup(renderer, agents, max_tokens=40)
        setup.pool.stop_interval = 10**9
        setup.episodes.advance(setup.buffer)
        await setup.episodes.drive(16)
        await setup.episodes.stop()
        await setup.episodes.settle()
        assert [episode.num_tokens for episode in setup.group.episodes] == [16, 16]
        saved = setup.saved()
        setup.pool.version = 3
        await setup.play()
        assert agents.runner.num_started == 2  # type: ignore[attr-defined]
        for episode in setup.group.episodes:
            sample = episode.finished()
            assert [tuple(span) for span in sample.versions] == [(0, 16), (3, 24)]
            assert sample.finish_reason is FinishReason.LENGTH
            assert episode.state == renderer.decode(sample.response_token_ids.tolist())
            assert episode.texts == (episode.state,)
        # After a kill the agent starts again, and its call goes on where it was.
        later = AgentSetup(renderer, agents, max_tokens=40, state=saved)
        later.pool.stop_interval, later.pool.version = 10**9, 3
        await later.play()
        assert agents.runner.num_started == 4  # type: ignore[attr-defined]
        assert later.saved() == setup.saved()


async def fails(task: dict[str, Any], ask: Client) -> Any:
    await ask(task["messages"])
    await ask([])


async def makes_no_call(task: dict[str, Any], ask: Client) -> Any:
    return 1


async def has_no_turn(task: dict[str, Any], ask: Client) -> Any:
    with contextlib.suppress(RefusedError):
        await ask([])


async def only_judges(task: dict[str, Any], ask: Client) -> Any:
    await ask(task["messages"], trains=False)


async def rewards_another(task: dict[str, Any], ask: Client) -> Any:
    await ask(task["messages"])
    await ask(task["messages"], trains=False)
    return {"call_rewards": {ask.ids[1]: 1}}


async def rewards_two(task: dict[str, Any], ask: Client) -> Any:
    question = task["messages"]
    turn = await ask(question)
    history = [*question, turn, {"role": "user", "content": "probe"}]
    probe = await ask(history, trains=False)
    await ask([*history, probe, {"role": "user", "content": "on"}])
    await ask([{"role": "user", "content": "else"}])
    return {"call_rewards": {ask.ids[0]: 0.5, ask.ids[3]: -2}}


async def test_rewards_of_calls_reach_the_turns_of_the_sample_and_survive_a_restart(
    renderer: ChatRenderer,
) -> None:
    async with scripted_agents(rewards_two, renderer) as agents:
        setup = AgentSetup(renderer, agents)
        await setup.play()
        later = AgentSetup(renderer, agents, state=setup.saved())
        for sample in (*setup.samples, *later.samples):
            assert [s.call_rewards for s in sample.sequences] == [(0.5, 0.0), (-2.0,)]
            assert sample.episode_turns == 3
        assert setup.interaction.counts["agent_untrained_calls"] == 2


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (fails, "^the body: 'messages' must have"),
        (makes_no_call, r"made no call .*, or its client answers from a cache .*without a cache$"),
        (only_judges, r"made no call that trains.*unmarked"),
        (rewards_another, r"call_rewards must have .* in 'u\w+\.0' \(prompt 'p:\d'\)$"),
        (
            has_no_turn,
            r"had every call refused, 1 in all .*\(.* got HTTP 400: the body: 'messages' ",
        ),
    ],
)
async def test_agents_that_fail_end_their_episodes_as_environments_do(
    renderer: ChatRenderer, agent: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_agents(agent, renderer) as agents:
        setup = AgentSetup(renderer, agents, on_error="zero")
        await setup.play()
        for sample in setup.samples:
            assert sample.finish_reason is FinishReason.ENVIRONMENT
            assert (sample.num_sampled > 0) is (agent in (fails, rewards_another))
        assert setup.interaction.errors == {"error": 2}
        num_refused = 2 if agent in (fails, has_no_turn) else 0
        assert setup.interaction.counts["agent_refusals"] == num_refused
        assert caplog.text.count("a call got HTTP 400: the body: 'messages'") == min(num_refused, 1)
        setup = AgentSetup(renderer, agents)
        with pytest.raises(EnvironmentFailedError, match=message):
            await setup.play()
        await setup.episodes.close()


async def test_an_agent_that_works_too_long_or_calls_too_often_is_ended(
    renderer: ChatRenderer,
) -> None:
    async def hangs(task: dict[str, Any], ask: Client) -> Any:
        await ask(task["messages"])
        await asyncio.sleep(3600)

    async with scripted_agents(hangs, renderer, agent_limits={"timeout_s": 0.3}) as agents:
        setup = AgentSetup(renderer, agents, on_error="zero")
        await setup.play()
        assert setup.interaction.errors == {"timeout": 2}

    async def never_ends(task: dict[str, Any], ask: Client) -> Any:
        while True:
            await ask(task["messages"])

    async with scripted_agents(never_ends, renderer, agent_limits={"max_calls": 3}) as agents:
        setup = AgentSetup(renderer, agents)
        await setup.play()
        for sample in setup.samples:
            assert sample.finish_reason is FinishReason.TURNS
            assert len(sample.sequences) == 3
            assert sample.reward == 0.5
        assert setup.interaction.counts["agent_refusals"] == 0  # a limit is no refusal


async def test_an_agent_that_is_refused_for_a_limit_and_goes_on_asking_is_ended(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_INSISTS_S", 0.2)

    async def insists(task: dict[str, Any], ask: Client) -> Any:
        while True:
            with contextlib.suppress(RefusedError):
                await ask(task["messages"])
            await asyncio.sleep(0.05)

    async def grades(task: dict[str, Any], ask: Client) -> Any:
        with contextlib.suppress(RefusedError):
            while True:
                await ask(task["messages"])
        await asyncio.sleep(1)
        return 7

    for agent, value in ((insists, None), (grades, 7)):
        async with scripted_agents(agent, renderer, agent_limits={"max_calls": 2}) as agents:
            setup = AgentSetup(renderer, agents)
            await setup.play()
            assert [episode.state for episode in setup.group.episodes] == [value] * 2
            for sample in setup.samples:
                assert sample.finish_reason is FinishReason.TURNS


@pytest.mark.parametrize(("kind", "ends"), [("lost", False), ("timeout", False), ("error", True)])
def test_what_a_program_can_do_to_its_agent_ends_no_run_unless_all_agents_end_so(
    renderer: ChatRenderer, kind: Any, ends: bool
) -> None:
    agents: Any = object()
    error = EnvironmentFailedError("it failed", kind)
    interaction = Interaction(SingleTurn(), renderer, EpisodesConfig(), agents=agents)
    if ends:
        with pytest.raises(EnvironmentFailedError):
            interaction.count_failure(error)
        return
    for _ in range(1023):
        interaction.count_failure(error)
    assert interaction.errors == {kind: 1023}
    with pytest.raises(EnvironmentFailedError):
        interaction.count_failure(error)


@pytest.mark.parametrize("is_interrupted", [False, True])
async def test_a_stop_string_ends_a_call_across_pieces_and_requests(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    stop: list[str] = []
    [[letter]] = renderer.token_ids(["a"])
    monkeypatch.setattr(ByteRequest, "first", letter)

    async def twice(task: dict[str, Any], ask: Client) -> Any:
        first = await ask(task["messages"], stop=stop, max_tokens=40)
        more = [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": "?"},
        ]
        if first["content"] and stop:
            with contextlib.suppress(RefusedError):
                await ask([*task["messages"], *more], max_tokens=5)
        return first["content"]

    async with scripted_agents(twice, renderer) as agents:
        plain = AgentSetup(renderer, agents)
        plain.pool.stop_interval = 10**9
        await plain.play()
        whole = plain.group.episodes[0].state
        assert len(whole) == 40
        stop.append(whole[13:19])  # a burst has 16 steps
        setup = AgentSetup(renderer, agents)
        setup.pool.stop_interval = 10**9
        setup.episodes.advance(setup.buffer)
        if is_interrupted:
            await setup.episodes.drive(16)
            await setup.episodes.stop()
        await setup.play()
        first, second = setup.group.episodes
        assert first.state == whole[:13]
        # Up to the burst after which the first one is no longer in the batch.
        assert second.state[:32] == plain.group.episodes[1].state[:32]
        sample = first.finished()
        text = renderer.decode(sample.response_token_ids.tolist())
        between = "<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
        assert text[:-5] == whole[:19] + between
        assert sample.num_sampled == 19 + 5
        assert setup.episodes.generated_tokens == (19 + 5) + (40 + 5)
