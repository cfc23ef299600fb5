"""Batches from several requests: oversampling, abort, resumption, versions."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.staleness import token_versions
from bapo_megatron.reward.base import Response, Score
from bapo_megatron.rollout.batching import BatchCollector
from bapo_megatron.rollout.buffer import PendingGroup
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.types import FinishReason, Prompt, Sample, SampleText
from bapo_megatron.weight_sync.receive import Load, WeightReceiver
from tests.data.prompt_sets import make_stream
from tests.fakes.fake_pool import part_of
from tests.fakes.fake_sglang import FakeSglang, logprob_of, token_at
from tests.rollout.batching_setup import Renderer, make_batches
from tests.rollout.calls import give
from tests.rollout.pool import clients_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from bapo_megatron.types import RolloutBatch

TEMPERATURE = 0.5
LENGTHS = (1, 10, 19, 28, 1, 10, 19, 28)
# Prompts of different lengths, so that with ``stop_at`` responses have different lengths.
PROMPTS = [
    Prompt(f"p:{number}", tuple(range(1, 1 + length)), f"{number}", f"prompt {number}")
    for number, length in enumerate(LENGTHS)
]
STALLS = {1: 5, 10: 7}
"""Groups 0 and 1 stay unfinished until they are resumed."""


class Rewards:
    """Rewards even lengths; each answer takes ``delay_s``."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    async def score(self, response: Response) -> Score:
        await asyncio.sleep(self.delay_s)
        is_even = len(response.text.split()) % 2 == 0
        return Score(float(is_even), answer_found=True, timed_out=response.answer == "7")


class Setup:
    def __init__(self, fakes: Sequence[FakeSglang], delay_s: float = 0.0, **rollout: Any) -> None:
        self.config = RolloutConfig.model_validate(
            {
                "groups_per_step": 2,
                "samples_per_group": 2,
                "temperature": TEMPERATURE,
                "max_response_tokens": 60,
                "oversample_groups": 2,
                **rollout,
            }
        )
        self.lines: list[str] = []
        clients = clients_of([fake.address for fake in fakes], self.config)
        self.pool = EnginePool(clients, self.config, version=0)
        self.collector = self.new_collector(delay_s)

    def new_collector(self, delay_s: float = 0.0) -> BatchCollector:
        collector = make_batches(
            Grader(Renderer(), Rewards(delay_s)),
            self.config,
            prompts=make_stream(PROMPTS),
            report=self.lines.append,
        )
        collector.attach(self.pool)
        return collector

    async def collect(self, step: int) -> RolloutBatch:
        async def hand_over(batch: RolloutBatch, texts: Sequence[SampleText]) -> None:
            self.texts = texts

        batch = await asyncio.wait_for(self.collector.collect(step, hand_over), 30)
        assert batch is not None
        for sample, text in zip(batch.samples, self.texts, strict=True):
            assert (text.group_id, text.index) == (sample.group_id, sample.index)
            assert text.response_text.split() == [str(i) for i in sample.response_token_ids]
        return batch


@contextlib.asynccontextmanager
async def _setup(*fakes: FakeSglang, **options: Any) -> AsyncIterator[Setup]:
    with contextlib.ExitStack() as running:
        for fake in fakes:
            running.enter_context(fake)
        setup = Setup(fakes, **options)
        try:
            yield setup
        finally:
            await setup.pool.states.close()


def _assert_intact(sample: Sample) -> None:
    """The tokens are those of their positions, and everything belongs to its token."""
    start, length = len(sample.prompt.token_ids), len(sample.response_token_ids)
    assert length > 0
    assert sample.response_token_ids.tolist() == [token_at(start + i) for i in range(length)]
    expected = [logprob_of(token_id, TEMPERATURE) for token_id in sample.response_token_ids]
    np.testing.assert_allclose(sample.behaviour_logprobs, expected, rtol=1e-6)
    versions = token_versions(sample.versions)
    assert len(versions) == length
    assert (np.diff(versions) >= 0).all()


async def test_a_batch_has_complete_scored_groups_in_order() -> None:
    fake = FakeSglang(stop_at=40)
    async with _setup(fake, oversample_groups=0) as setup:
        batch = await setup.collect(1)
    # With --enable-deterministic-inference requests without a seed have the same one.
    assert len({body["sampling_params"]["sampling_seed"] for body in fake.requests}) == 4
    assert [group.group_id for group in batch.groups] == [0, 1]
    assert [sample.index for sample in batch.samples] == [0, 1, 0, 1]
    for sample in batch.samples:
        _assert_intact(sample)
        assert sample.finish_reason is FinishReason.STOP
        # 41 positions less the prompt: 40 tokens after 1, 31 after 10.
        assert len(sample.response_token_ids) == {"p:0": 40, "p:1": 31}[sample.prompt.prompt_id]
    assert [sample.reward for sample in batch.samples] == [1.0, 1.0, 0.0, 0.0]
    assert [text.prompt_text for text in setup.texts] == ["prompt 0"] * 2 + ["prompt 1"] * 2
    assert [text.answer for text in setup.texts] == ["0", "0", "1", "1"]
    assert batch.stats.generated_tokens == 2 * 40 + 2 * 31
    assert batch.stats.unfinished_samples == 0
    assert batch.stats.resumed_samples == 0
    assert setup.lines[0] == "rollout 1: 0/2 groups"


async def test_what_is_unfinished_is_resumed_with_its_tokens_logprobs_and_versions(
    tmp_path: Path,
) -> None:
    async with _setup(FakeSglang(stop_at=40, stalls=STALLS)) as setup:
        first = await setup.collect(1)
        assert [group.group_id for group in first.groups] == [2, 3]
        assert first.stats.unfinished_samples == 4
        kept = setup.collector.state().buffer
        assert [group.group_id for group in kept] == [0, 1]
        weights = WeightReceiver(setup.pool.states, setup.config, setup.collector)
        await weights.load(Load(model_dir=tmp_path, version=5))
        await weights.resume(())
        second = await setup.collect(2)
    assert [group.group_id for group in second.groups] == [0, 1]
    assert second.version == 5
    assert second.stats.resumed_samples == 4
    for batch in (first, second):
        for sample in batch.samples:
            _assert_intact(sample)
    for sample in first.samples:
        assert [span.version for span in sample.versions] == [0]
    for sample in second.samples:
        assert [span.version for span in sample.versions] == [0, 5]
        assert len(sample.response_token_ids) == 41 - len(sample.prompt.token_ids)
    # Every token was generated once, and once only.
    new_tokens = sum(sample.versions[1].num_tokens for sample in second.samples)
    in_flight = sum(len(s.response_token_ids) for s in second.samples) - new_tokens
    finished = sum(len(s.response_token_ids) for s in first.samples)
    assert first.stats.generated_tokens == finished + in_flight


async def test_without_partial_what_is_unfinished_is_discarded() -> None:
    async with _setup(FakeSglang(stop_at=40, stalls=STALLS), partial=False) as setup:
        first, second = [await setup.collect(step) for step in (1, 2)]
    assert [group.group_id for group in first.groups] == [2, 3]
    assert first.stats.unfinished_samples == 0
    assert min(group.group_id for group in second.groups) >= 4
    assert second.stats.resumed_samples == 0


async def test_the_time_of_a_batch_goes_on_where_its_tokens_do() -> None:
    """Tokens from before a stop count for the batch, so the seconds in which they came do, too."""
    async with _setup(FakeSglang(stop_at=40, stalls=STALLS)) as setup:
        state = setup.collector.state()
        state = replace(state, about=replace(state.about, generation_s=100.0))
        setup.collector.restore(state)
        assert 100 < (await setup.collect(1)).stats.generation_s < 130
        assert setup.collector.state().about.generation_s == 0
        assert (await setup.collect(2)).stats.generation_s < 30


@pytest.mark.slow
async def test_grading_does_not_hold_up_generation() -> None:
    # One connection for 4 samples: each request waits for the one before, not its grading.
    fake = FakeSglang(stop_at=40)
    async with _setup(fake, oversample_groups=0, max_connections=1, delay_s=3.0) as setup:
        batch = await setup.collect(1)
    assert len(fake.requests) == 4
    assert batch.stats.generation_s < 2.9


async def test_graders_that_ran_out_of_time_are_counted() -> None:
    async with _setup(FakeSglang(stop_at=40), groups_per_step=8, oversample_groups=0) as setup:
        assert (await setup.collect(1)).stats.reward_timeouts == 2  # both of prompt 7


async def test_a_score_of_a_response_that_was_begun_again_is_not_that_of_the_new_one() -> None:
    group = PendingGroup.start(0, PROMPTS[0], 1)
    [episode] = group.episodes
    give(episode, part_of(0, 3, 0, FinishReason.STOP))
    grading = asyncio.create_task(Grader(Renderer(), Rewards(0.01)).score(episode, group))
    await asyncio.sleep(0)
    episode.start_again()
    await grading
    assert not episode.is_scored
    assert episode.texts is None


async def test_what_a_function_says_can_be_stored_whatever_it_is() -> None:
    class SaysHalfAPair(Rewards):
        async def score(self, response: Response) -> Score:
            return Score(1.0, extracted="\ud800 7", reason="a\udfffb")

    group = PendingGroup.start(0, PROMPTS[0], 1)
    [episode] = group.episodes
    give(episode, part_of(0, 3, 0, FinishReason.STOP))
    await Grader(Renderer(), SaysHalfAPair(0.0)).score(episode, group)
    assert (episode.text().extracted, episode.text().reason) == ("? 7", "a?b")
