"""Batches from several requests: oversampling, abort, resumption, versions."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bapo_megatron.config.rollout import ReplayConfig, RolloutConfig
from bapo_megatron.data.staleness import token_versions
from bapo_megatron.reward.base import Response, Score
from bapo_megatron.rollout.batching import BatchCollector
from bapo_megatron.rollout.buffer import PendingGroup
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.rollout.selection import BatchPlan
from bapo_megatron.types import FinishReason, Prompt, Sample, SampleText
from bapo_megatron.weight_sync.receive import Load, WeightReceiver
from tests.data.prompt_sets import make_stream
from tests.fakes.fake_pool import deliver, part_of
from tests.fakes.fake_sglang import FakeSglang, logprob_of, token_at
from tests.rollout.batching_setup import single_turn
from tests.rollout.pool import clients_of
from tests.rollout.saved_files import file_of, read_file

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


class Decoder:
    """A tokenizer whose text is the list of ids."""

    def decode(self, token_ids: list[int], **options: bool) -> str:
        return " ".join(map(str, token_ids))


class Rewards:
    """Rewards even lengths; each answer takes ``delay_s``."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    async def score(self, response: Response) -> Score:
        await asyncio.sleep(self.delay_s)
        is_even = len(response.text.split()) % 2 == 0
        return Score(float(is_even), answer_found=True, timed_out=response.answer == "7")


class Setup:
    """A collector on fake servers."""

    def __init__(self, fakes: list[FakeSglang], delay_s: float = 0.0, **rollout: Any) -> None:
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
        grader = Grader(Decoder(), Rewards(delay_s))
        stream = make_stream(PROMPTS)
        plan = BatchPlan(seed=0, total_steps=100, updates_per_batch=1)
        collector = BatchCollector(
            single_turn(),
            grader,
            stream,
            self.config,
            ReplayConfig(),
            plan,
            self.lines.append,
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
    setup = Setup(list(fakes), **options)
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


def test_a_batch_has_complete_scored_groups_in_order() -> None:
    async def run() -> None:
        with FakeSglang(stop_at=40) as fake:
            async with _setup(fake, oversample_groups=0) as setup:
                batch = await setup.collect(1)
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

    asyncio.run(run())


def test_what_is_unfinished_is_resumed_with_its_tokens_logprobs_and_versions(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        with FakeSglang(stop_at=40, stalls=STALLS) as fake:
            async with _setup(fake) as setup:
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

    asyncio.run(run())


def test_the_length_limit_counts_over_all_resumptions() -> None:
    async def run() -> None:
        with FakeSglang(stop_at=30, stalls=STALLS) as fake:
            async with _setup(fake, max_response_tokens=25) as setup:
                batches = [await setup.collect(step) for step in (1, 2, 3)]
        samples = [sample for batch in batches for sample in batch.samples]
        assert sum(batch.stats.resumed_samples for batch in batches) > 0
        for sample in samples:
            _assert_intact(sample)
            length = min(25, 31 - len(sample.prompt.token_ids))
            assert len(sample.response_token_ids) == length
            assert (sample.finish_reason is FinishReason.LENGTH) == (length == 25)

    asyncio.run(run())


def test_without_partial_what_is_unfinished_is_discarded() -> None:
    async def run() -> None:
        with FakeSglang(stop_at=40, stalls=STALLS) as fake:
            async with _setup(fake, partial=False) as setup:
                first, second = [await setup.collect(step) for step in (1, 2)]
        assert [group.group_id for group in first.groups] == [2, 3]
        assert first.stats.unfinished_samples == 0
        assert min(group.group_id for group in second.groups) >= 4
        assert second.stats.resumed_samples == 0

    asyncio.run(run())


def test_a_new_process_continues_from_the_saved_state_as_the_old_one_would() -> None:
    async def run() -> None:
        with FakeSglang(stop_at=40, stalls=STALLS) as fake:
            async with _setup(fake) as setup:
                await setup.collect(1)
                state = file_of(setup.collector.state())
                setup.collector = setup.new_collector()
                setup.collector.restore(read_file(state))
                assert file_of(setup.collector.state()) == state
                batch = await setup.collect(2)
                assert batch.stats.resumed_samples == 4
                assert [group.group_id for group in batch.groups] == [0, 1]
                for sample in batch.samples:
                    _assert_intact(sample)

    asyncio.run(run())


def test_the_time_of_a_batch_goes_on_where_its_tokens_do() -> None:
    """Tokens from before a stop count for the batch, so the seconds in which they came do, too."""

    async def run() -> None:
        with FakeSglang(stop_at=40, stalls=STALLS) as fake:
            async with _setup(fake) as setup:
                state = setup.collector.state()
                state = replace(state, about=replace(state.about, generation_s=100.0))
                setup.collector.restore(state)
                assert 100 < (await setup.collect(1)).stats.generation_s < 130
                assert setup.collector.state().about.generation_s == 0
                assert (await setup.collect(2)).stats.generation_s < 30

    asyncio.run(run())


def test_a_state_with_other_group_sizes_or_longer_samples_is_refused() -> None:
    async def run() -> None:
        with FakeSglang(stop_at=40, stalls=STALLS) as fake:
            async with _setup(fake) as setup:
                await setup.collect(1)
                state = setup.collector.state()
            async with _setup(fake, samples_per_group=3) as setup:
                with pytest.raises(ValueError, match=r"samples_per_group: was 2 .* is 3 now"):
                    setup.collector.restore(state)
            async with _setup(fake, max_response_tokens=1) as setup:
                with pytest.raises(ValueError, match=r"max_response_tokens: must be at least the"):
                    setup.collector.restore(state)

    asyncio.run(run())


@pytest.mark.slow
def test_grading_does_not_hold_up_generation() -> None:
    async def run() -> None:
        with FakeSglang(stop_at=40) as fake:
            # One connection for 4 samples: each request waits for the one before, not its grading.
            async with _setup(fake, oversample_groups=0, max_connections=1, delay_s=3.0) as setup:
                batch = await setup.collect(1)
        assert len(fake.requests) == 4
        assert batch.stats.generation_s < 2.9

    asyncio.run(run())


def test_requests_in_flight_are_limited_over_all_servers() -> None:
    async def run() -> None:
        with FakeSglang(stop_at=40, token_interval_s=0.002) as one, FakeSglang(stop_at=40) as two:
            async with _setup(one, two, groups_per_step=4, max_connections=3) as setup:
                await setup.collect(1)
            assert one.max_concurrent + two.most_concurrent <= 6
            assert one.max_concurrent <= 3
            assert one.requests
            assert two.requests
            # With --enable-deterministic-inference requests without a seed have the same one.
            sent = [*one.requests, *two.requests]
            assert len({body["sampling_params"]["sampling_seed"] for body in sent}) == len(sent)

    asyncio.run(run())


def test_graders_that_ran_out_of_time_are_counted() -> None:
    async def run() -> None:
        with FakeSglang(stop_at=40) as fake:
            async with _setup(fake, groups_per_step=8, oversample_groups=0) as setup:
                assert (await setup.collect(1)).stats.reward_timeouts == 2  # both of prompt 7

    asyncio.run(run())


def test_a_score_of_a_response_that_was_begun_again_is_not_that_of_the_new_one() -> None:
    async def run() -> None:
        group = PendingGroup.start(0, PROMPTS[0], 1)
        [pending] = group.samples
        pending.append(part_of(0, 3, 0, FinishReason.STOP), 8)
        grading = asyncio.create_task(Grader(Decoder(), Rewards(0.01)).score(pending, group))
        await asyncio.sleep(0)
        pending.start_again()
        await grading
        assert not pending.is_scored
        assert pending.texts is None

    asyncio.run(run())


def test_what_a_function_says_can_be_stored_whatever_it_is() -> None:
    class SaysHalfAPair(Rewards):
        async def score(self, response: Response) -> Score:
            return Score(1.0, extracted="\ud800 7", reason="a\udfffb")

    async def run() -> None:
        group = PendingGroup.start(0, PROMPTS[0], 1)
        [pending] = group.samples
        pending.append(part_of(0, 3, 0, FinishReason.STOP), 8)
        await Grader(Decoder(), SaysHalfAPair(0.0)).score(pending, group)
        assert (pending.text().extracted, pending.text().reason) == ("? 7", "a?b")

    asyncio.run(run())


def test_an_answer_from_other_weights_is_not_used_and_the_weights_are_asked_for() -> None:
    async def run() -> None:
        with FakeSglang(stop_at=40, version="9") as fake:
            async with _setup(fake) as setup:
                assert await asyncio.wait_for(setup.collector.collect(1, deliver), 30) is None
                groups = setup.collector.state().buffer
                assert all(s.num_tokens == 0 for group in groups for s in group.samples)
                await setup.collector.close()

    asyncio.run(run())
