"""A batch collector whose engines and rewards a test decides."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from bapo_megatron.config.rollout import EpisodesConfig, ReplayConfig, RolloutConfig
from bapo_megatron.data.stream import PromptMixture
from bapo_megatron.environment.load import SingleTurn
from bapo_megatron.reward.base import RewardError
from bapo_megatron.rollout.batching import BatchCollector
from bapo_megatron.rollout.buffer import Episode, PendingGroup
from bapo_megatron.rollout.episodes import Interaction
from bapo_megatron.rollout.scheduling import BatchPlan, Scheduler, Selection
from bapo_megatron.types import FinishReason, Prompt, RolloutBatch, SampleText
from tests.data.prompt_sets import make_stream
from tests.fakes.fake_pool import WRITTEN, FakePool, Request

PROMPTS = [Prompt(f"p:{n}", (1, 2), f"{n}", f"prompt {n}") for n in range(50)]
TOTAL_STEPS = 10


def single_turn() -> Interaction:
    """Episodes end with their first turn; nothing is decoded."""
    return Interaction(SingleTurn(), None, EpisodesConfig())


class Renderer:
    """Its text is the list of ids; a message becomes as many tokens as its content has letters."""

    vocab_size = 4096

    def decode(self, token_ids: Sequence[int], **options: bool) -> str:
        return " ".join(map(str, token_ids))

    def calls(self, token_ids: Sequence[int]) -> tuple[()]:
        return ()

    def continuation(
        self, messages: Sequence[dict[str, str]], *, after: Sequence[int]
    ) -> tuple[int, ...]:
        letters = "".join(message["content"] for message in messages)
        if letters == "refused":
            raise ValueError("is refused by the chat template (no such role)")
        return tuple(range(WRITTEN + 500, WRITTEN + 500 + len(letters)))


class Rewards:
    """Equal rewards in the groups of ``equal``, else one right response per group."""

    num_timeouts = num_errors = 0
    sees_groups = False
    teacher = None

    def __init__(self, equal: Sequence[int]) -> None:
        self.equal = equal
        self.held: dict[int, asyncio.Event] = {}
        """Scores of these groups wait."""
        self.failing: int | None = None
        """Scoring this group fails."""
        self.asked: set[int] = set()

    async def score(self, episode: Episode, group: PendingGroup) -> None:
        sample = episode.finished()
        self.asked.add(sample.group_id)
        if sample.group_id == self.failing:
            raise RewardError("the grader is gone")
        if sample.group_id in self.held:
            await self.held[sample.group_id].wait()
        sample.reward = 0.0 if sample.group_id in self.equal else float(sample.index == 0)
        episode.texts = ("scored",)


def make_batches(
    grader: Any,
    rollout: RolloutConfig | dict[str, Any],
    *,
    interaction: Interaction | None = None,
    prompts: PromptMixture | None = None,
    replay: dict[str, Any] | None = None,
    total_steps: int = TOTAL_STEPS,
    updates: int = 1,
    top_logprobs: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> BatchCollector:
    """A batch collector that is not attached to a pool."""
    selection = Selection(
        RolloutConfig.model_validate(rollout),
        ReplayConfig.model_validate(replay or {}),
        BatchPlan(seed=0, total_steps=total_steps, updates_per_batch=updates),
    )
    prompts = prompts or make_stream(PROMPTS)
    scheduler = Scheduler(
        selection, prompts, sees_groups=grader.sees_groups, top_logprobs=top_logprobs
    )
    return BatchCollector(scheduler, interaction or single_turn(), grader, report)


class Setup:
    """Two groups of two responses per step, unless the test wants something else."""

    def __init__(
        self,
        equal: Sequence[int] = (),
        replay: dict[str, Any] | None = None,
        interaction: Interaction | None = None,
        pool: Any = None,
        grader: Any = None,
        **rollout: Any,
    ) -> None:
        sizes = {"groups_per_step": 2, "samples_per_group": 2, "max_response_tokens": 20}
        self.pool = pool or FakePool()
        self.lines: list[str] = []
        self.failure: Exception | None = None
        """What the next delivery raises."""
        self.rewards = Rewards(equal)
        self.batches = make_batches(
            grader or self.rewards,
            sizes | rollout,
            interaction=interaction,
            replay=replay,
            updates=2,
            report=self.lines.append,
        )
        self.batches.attach(self.pool)

    async def collect(self, step: int) -> asyncio.Task[RolloutBatch | None]:
        """Begin to collect a batch; its requests are in flight."""
        collecting = asyncio.create_task(self.batches.collect(step, self.hand_over))
        await settle()
        return collecting

    async def batch(self, step: int, *group_ids: int) -> RolloutBatch:
        """Collect a batch while these groups, or all open ones, get four tokens each and end."""
        collecting = await self.collect(step)
        await self.give(group_ids or self.open_groups(), 4, ends=True)
        batch = await collecting
        assert batch is not None
        return batch

    async def hand_over(self, batch: RolloutBatch, texts: Sequence[SampleText]) -> None:
        self.texts = texts
        if self.failure is not None:
            failure, self.failure = self.failure, None
            self.state_at_failure = self.batches.state()
            raise failure

    def open_groups(self) -> list[int]:
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


def ids(batch: RolloutBatch | None) -> list[int]:
    assert batch is not None
    return [group.group_id for group in batch.groups]
