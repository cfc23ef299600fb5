"""What the teacher says of responses reaches the batch: with rewards, restarts and checkpoints."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.data.dump import decode_batch
from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.buffer import PendingGroup
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.types import RolloutBatch
from tests.data.samples import add_branch, make_episode
from tests.engine.helpers import MakeConfig
from tests.fakes.fake_sglang import FakeSglang, logprob_of
from tests.fakes.fake_teacher import FakeTeacher, has_columns, make_teacher
from tests.fakes.stepped_pool import SteppedPool
from tests.rollout.batching_setup import PROMPTS, Renderer, settle
from tests.rollout.batching_setup import Setup as BatchSetup
from tests.rollout.calls import end
from tests.rollout.conftest import Open, changed
from tests.rollout.episodes_setup import CountingRewards
from tests.rollout.saved_files import read_file, without_clock


class Setup(BatchSetup):
    """A batch collector with a teacher whose answers can be held back."""

    def __init__(self, *, has_teacher: bool = True, top_k: int = 2, **options: Any) -> None:
        self.engine, self.teacher = FakeTeacher(), make_teacher(top_k=top_k)
        teacher = self.teacher if has_teacher else None
        rewards: Any = CountingRewards()
        grader = Grader(Renderer(), rewards, teacher=teacher)
        super().__init__(grader=grader, **options)

    async def collect(self, step: int) -> asyncio.Task[RolloutBatch | None]:
        if not self.teacher._states.engines:
            await self.teacher.start([self.engine])
        return await super().collect(step)

    async def close(self) -> None:
        await self.batches.close()
        await self.teacher.close()


async def test_a_batch_waits_for_the_teacher_whose_columns_all_its_samples_have() -> None:
    setup = Setup()
    setup.engine.held = asyncio.Event()
    collecting = await setup.collect(1)
    await setup.give([0], 4, ends=True)
    assert len(setup.engine.scored) == 2  # while the other group is generated
    await setup.give([1], 3, ends=True)
    await asyncio.sleep(0.6)
    assert not collecting.done()
    assert setup.lines[-1].endswith(", 4 responses wait for the teacher")
    setup.engine.held.set()
    batch = await collecting
    assert batch is not None
    assert all(has_columns(sample) for sample in batch.samples)
    assert {sample.columns["teacher_top_ids"].shape for sample in batch.samples} == {(4, 2), (3, 2)}
    await setup.close()


@pytest.mark.parametrize(
    ("is_driven", "rollout"),
    [(False, {}), (True, {}), (True, {"dynamic_sampling": {"enabled": True}})],
)
async def test_an_interrupted_run_does_not_wait_for_the_teacher(
    is_driven: bool, rollout: dict[str, Any]
) -> None:
    setup = Setup(pool=SteppedPool() if is_driven else None, **rollout)
    setup.engine.held = asyncio.Event()
    collecting = await setup.collect(1)
    if not is_driven:
        await setup.give([0, 1], 4, ends=True)
    await asyncio.sleep(0.3)
    assert setup.teacher.num_waiting
    assert not collecting.done()
    setup.batches.is_interrupted = True
    async with asyncio.timeout(5):
        assert await collecting is None
    buffer = read_file(without_clock(setup.batches.state())).buffer
    episodes = [episode for group in buffer for episode in group.episodes]
    assert is_driven or [episode.num_tokens for episode in episodes] == [4] * 4
    assert not any(episode.is_scored for episode in episodes)
    await setup.close()


@pytest.mark.parametrize(
    ("has_teacher", "top_k", "scored"), [(False, 3, [6, 6]), (True, 0, [6, 6]), (True, 2, [])]
)
async def test_samples_of_a_run_with_another_teacher_are_scored_again(
    has_teacher: bool, top_k: int, scored: list[int]
) -> None:
    options: dict[str, Any] = {"oversample_groups": 1, "replay": {"batches": 2}}
    before, after = Setup(has_teacher=has_teacher, **options), Setup(top_k=top_k, **options)
    collecting = await before.collect(1)
    await before.give([2], 4, ends=True)
    await before.give([0, 1], 4, ends=True)
    await collecting
    saved = read_file(without_clock(before.batches.state()))
    await before.close()
    assert [(group.group_id, group.is_scored) for group in saved.buffer] == [(2, True)]

    after.batches.restore(saved)
    [replayable] = after.batches.scheduler.buffer.earlier
    assert len(replayable) == (0 if scored else 2)
    collecting = await after.collect(2)
    assert [len(tokens) for tokens in after.engine.scored] == scored
    await after.give(after.open_groups(), 4, ends=True)
    batch = await collecting
    assert batch is not None
    assert all(has_columns(sample) for sample in batch.samples)
    assert {tuple(sample.columns) for sample in batch.samples} == {
        ("teacher_logprob", "teacher_top_ids", "teacher_top_logprobs")[: 1 + top_k]
    }
    await after.close()


async def test_an_answer_for_a_response_that_was_begun_again_is_discarded() -> None:
    engine, teacher = FakeTeacher(), make_teacher()
    await teacher.start([engine])
    engine.held = asyncio.Event()
    group = PendingGroup.start(0, PROMPTS[0], 1)
    [episode] = group.episodes
    end(episode, range(3))
    grader = Grader(Renderer(), CountingRewards(), teacher=teacher)
    grading = asyncio.create_task(grader.score(episode, group))
    await settle()
    episode.start_again()
    engine.held.set()
    await grading
    assert len(engine.scored) == 1
    assert not episode.is_finished
    assert not episode.is_scored
    await teacher.close()


async def test_an_episode_is_graded_once_and_its_sequences_are_scored_apart() -> None:
    engine, teacher, rewards = FakeTeacher(), make_teacher(), CountingRewards()
    await teacher.start([engine])
    group = PendingGroup.start(0, PROMPTS[0], 1)
    [episode] = group.episodes
    episode.sample = sample = make_episode(2, (3, 2, 1))
    add_branch(sample, (1, 1, 2), shared_tokens=3)
    await Grader(Renderer(), rewards, teacher=teacher).score(episode, group)
    await teacher.close()

    tokens = [
        [*s.prompt.token_ids.tolist(), *s.response_token_ids.tolist()] for s in sample.sequences
    ]
    assert sorted(engine.scored) == sorted(tokens)
    assert all(map(has_columns, sample.sequences))
    [response] = rewards.responses
    facts = response.sample
    assert (facts.num_tokens, facts.num_turns, facts.environment_tokens) == (6 + 4, 2 + 2, 2 + 1)
    assert [len(text.split()) for text in response.turns] == [3, 2, 1, 1, 1, 2]
    assert sample.reward == 1.0  # two tokens of the last turn
    assert sample.branches[0].reward == 0.0


@pytest.mark.slow
def test_a_run_has_its_batches_scored_and_not_its_evaluations(
    make_config: MakeConfig, open_client: Open, model_dir: Path, tmp_path: Path
) -> None:
    with FakeSglang(stop_at=40) as policy, FakeSglang() as served:
        teacher = {"engine": "sglang", "servers": [served.address], "patience_s": 1.0}
        teacher |= {"path": str(model_dir)}
        distillation = {"coefficient": 1, "loss": "top_k", "top_k": 3, "teacher": teacher}
        config = make_config(servers=(policy.address,), oversample_groups=0)
        client = open_client(changed(config, "algorithm", distillation=distillation))
        client.sync_weights(tmp_path, 1)
        encoded = client.collect(1)
        assert encoded is not None
        samples = decode_batch(encoded).samples
        assert len(samples) == len(served.requests) == 6
        for sample in samples:
            expected = [logprob_of(token, 1.0) for token in sample.response_token_ids.tolist()]
            np.testing.assert_allclose(sample.columns["teacher_logprob"], expected, rtol=1e-6)
            assert sample.columns["teacher_top_ids"].shape == (len(expected), 3)
        assert client.evaluate(0, resume=False) is not None
        assert len(served.requests) == 6
        assert {request.get("rid") for request in served.requests} == {None}
        served.crash()
        with pytest.raises(RolloutError, match=r"^no usable teacher for 1 s .*resume=true$"):
            client.collect(2)
