"""A batch collector whose engines and rewards a test decides."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.rollout import EpisodesConfig, ReplayConfig, RolloutConfig
from bapo_megatron.environment.load import SingleTurn
from bapo_megatron.rollout.batching import BatchCollector
from bapo_megatron.rollout.episodes import Interaction
from bapo_megatron.rollout.selection import BatchPlan
from bapo_megatron.types import FinishReason, Prompt, SampleText
from tests.data.prompt_sets import make_stream
from tests.fakes.fake_pool import FakePool, Request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bapo_megatron.rollout.buffer import PendingGroup, PendingSample
    from bapo_megatron.types import RolloutBatch

PROMPTS = [Prompt(f"p:{number}", (1, 2), "", "") for number in range(50)]
TOTAL_STEPS = 10


def single_turn() -> Interaction:
    """Episodes end with their first turn; nothing is decoded."""
    return Interaction(SingleTurn(), None, EpisodesConfig())


class Rewards:
    """Equal rewards in the groups of ``equal``, else one right response per group."""

    num_timeouts = num_errors = 0
    sees_groups = False

    def __init__(self, equal: Sequence[int]) -> None:
        self.equal = equal
        self.held: dict[int, asyncio.Event] = {}
        """Scores of these groups wait."""

    async def score(self, pending: PendingSample, group: PendingGroup) -> None:
        sample = pending.sample
        if sample.group_id in self.held:
            await self.held[sample.group_id].wait()
        sample.reward = 0.0 if sample.group_id in self.equal else float(sample.index == 0)
        pending.texts = ("scored",)


class Setup:
    """Two groups of two responses per step, unless the test wants something else."""

    def __init__(
        self,
        equal: Sequence[int] = (),
        replay: dict[str, Any] | None = None,
        interaction: Interaction | None = None,
        **rollout: Any,
    ) -> None:
        config = {
            "groups_per_step": 2,
            "samples_per_group": 2,
            "max_response_tokens": 20,
            **rollout,
        }
        self.pool = FakePool()
        self.failure: Exception | None = None
        """What the next delivery raises."""
        self.rewards = Rewards(equal)
        self.batches = BatchCollector(
            interaction or single_turn(),
            self.rewards,
            make_stream(PROMPTS),
            RolloutConfig.model_validate(config),
            ReplayConfig.model_validate(replay or {}),
            BatchPlan(seed=0, total_steps=TOTAL_STEPS, updates_per_batch=2),
            lambda line: None,
        )
        self.batches.attach(self.pool)

    def collect(self, step: int) -> asyncio.Task[RolloutBatch | None]:
        return asyncio.create_task(self.batches.collect(step, self.hand_over))

    async def hand_over(self, batch: RolloutBatch, texts: Sequence[SampleText]) -> None:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            self.state_at_failure = self.batches.state()
            raise failure

    def open_groups(self) -> list[int]:
        """Groups with a request in flight."""
        return sorted({group_of(request) for request in self.pool.requests})

    async def give(self, group_ids: Sequence[int], count: int, *, ends: bool = False) -> None:
        """Let every request of these groups receive tokens."""
        reason = FinishReason.STOP if ends else FinishReason.ABORT
        for request in [r for r in self.pool.requests if group_of(r) in group_ids]:
            self.pool.give(request, count, reason)
        await settle()

    async def sync(self, version: int) -> None:
        await self.batches.pause()
        self.pool.version = version
        await self.batches.resume()
        await settle()


def group_of(request: Request) -> int:
    return int(request.label.split("group ")[1].split(",")[0])


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await scene()

    asyncio.run(run())


def ids(batch: RolloutBatch | None) -> list[int]:
    assert batch is not None
    return [group.group_id for group in batch.groups]
