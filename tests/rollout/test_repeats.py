"""With an engine that is driven a run repeats: same batches, however long graders, environments,
decode steps and the trainer take, and also where it is stopped and continued in between.

Random settings; graders and environments answer after random real delays, so in random order.
"""

import asyncio
import contextlib
import random
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bapo_megatron.config.rollout import EpisodesConfig
from bapo_megatron.data.dump import decode_batch, encode_batch
from bapo_megatron.environment.base import EnvironmentFailedError, Step, Task, Turn
from bapo_megatron.reward.base import Response, Score
from bapo_megatron.rollout.batching import BatchCollector
from bapo_megatron.rollout.episodes import Interaction
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.types import EncodedBatch, Prompt, RolloutBatch
from tests.data.prompt_sets import make_stream
from tests.fakes.fake_pool import assert_likeliest, deliver
from tests.fakes.fake_teacher import FakeTeacher, has_columns, make_teacher
from tests.fakes.scripted_environment import ScriptedEnvironment
from tests.fakes.stepped_pool import SteppedPool
from tests.rollout.batching_setup import Renderer, make_batches
from tests.rollout.saved_files import read_file, without_clock

pytestmark = pytest.mark.slow

TOTAL_STEPS, UPDATES = 5, 2
SIZES = {"groups_per_step": 4, "samples_per_group": 2, "max_response_tokens": 40}
PROMPTS = [Prompt(f"p:{number}", (1, 2), "", "") for number in range(7)]


class Delays:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def __call__(self) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)
        await asyncio.sleep(self._random.choice((0, 0.0001, 0.0007)))


class SlowRewards:
    """Rewards by the last token; in a group, one more for the longest last turn."""

    def __init__(self, delay: Callable[[], Awaitable[None]]) -> None:
        self._delay = delay

    async def score(self, response: Response) -> Score:
        await self._delay()
        token_ids = response.text.split()  # none, where the environment failed to begin
        return Score(float(int(token_ids[-1]) % 2 if token_ids else 0))

    async def score_group(
        self, responses: Sequence[Response], scores: Sequence[Score]
    ) -> list[Score]:
        await self._delay()
        lengths = [len(response.text.split()) for response in responses]
        return [
            Score(score.reward + (length == max(lengths)))
            for length, score in zip(lengths, scores, strict=True)
        ]


class SlowEnvironment(ScriptedEnvironment):
    """Writes up to seven tokens, ends, or fails, as state and turn say."""

    def __init__(self, delay: Callable[[], Awaitable[None]]) -> None:
        super().__init__(self._step, self._first)
        self._delay = delay

    async def _wait(self) -> None:
        await self._delay()

    @staticmethod
    def _first(task: Task) -> Any:
        if task.seed % 16 == 0:
            raise EnvironmentFailedError("it cannot begin", "timeout")
        return [task.seed % 1000]

    @staticmethod
    def _step(state: list[int], turn: Turn) -> Step:
        drawn = zlib.crc32(repr((state, turn)).encode())
        if drawn % 16 == 0:
            raise EnvironmentFailedError("it is broken", "error")
        state = [*state, drawn]
        if drawn % 4 == 1:
            return Step(state, is_done=True)
        return Step(state, token_ids=[(drawn >> n) % 4096 for n in range(1 + drawn % 7)])


@dataclass
class Run:
    """What a trainer saw, and its state after each step."""

    batches: list[bytes] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)


@dataclass
class Case:
    rollout: dict[str, Any]
    replay: dict[str, Any] = field(default_factory=dict)
    is_slow: bool = False
    has_environment: bool = False
    sees_groups: bool = False
    has_teacher: bool = False
    top_logprobs: int = 0

    def play(self, delay_seed: int, state: bytes | None = None, first_step: int = 0) -> Run:
        """A whole run, or the steps after a state."""
        return asyncio.run(self._play(delay_seed, state, first_step))

    async def _play(self, delay_seed: int, state: bytes | None, first_step: int) -> Run:
        delays, run = random.Random(delay_seed), Run()
        self.pool: Any = self.make_pool(
            first_step * UPDATES, is_slow=self.is_slow, delay_seed=delay_seed
        )
        async with self.opened(Delays(delay_seed)) as batches:
            if state is not None:
                batches.restore(read_file(state))
            batches.attach(self.pool)
            for step in range(first_step, TOTAL_STEPS):
                async with asyncio.timeout(60):
                    batch = await batches.collect(step + 1, deliver)
                await asyncio.sleep(delays.choice((0, 0.001, 0.004)))  # the trainer trains
                await batches.pause()
                assert not self.pool.requests
                self.pool.version += UPDATES
                await batches.resume()
                run.states.append(without_clock(batches.state()))
                run.batches.append(content_of(batch))
            await batches.close()
        return run

    make_pool: ClassVar[type[SteppedPool]] = SteppedPool

    @contextlib.asynccontextmanager
    async def opened(self, delay: Delays) -> AsyncIterator[BatchCollector]:
        renderer: Any = Renderer()
        limits = EpisodesConfig(max_turns=3, on_error="zero")
        interaction = Interaction(SlowEnvironment(delay), renderer, limits)
        teacher = make_teacher(top_k=2) if self.has_teacher else None
        if teacher is not None:
            await teacher.start([FakeTeacher(delay), FakeTeacher(delay)])
        rewards: Any = SlowRewards(delay)
        yield make_batches(
            Grader(renderer, rewards, sees_groups=self.sees_groups, teacher=teacher),
            {**SIZES, **self.rollout},
            interaction=interaction if self.has_environment else None,
            prompts=make_stream(PROMPTS, shuffle=True),
            replay=self.replay,
            total_steps=TOTAL_STEPS,
            updates=UPDATES,
            top_logprobs=self.top_logprobs,
        )
        if teacher is not None:
            await teacher.close()

    def check(self, stopped_after: int) -> Run:
        """Neither delays nor a resumption change the run, which is returned."""
        run = self.play(1)
        assert self.play(2) == run
        resumed = self.play(3, run.states[stopped_after - 1], stopped_after)
        assert resumed == Run(run.batches[stopped_after:], run.states[stopped_after:])
        return run


def content_of(batch: RolloutBatch | None) -> bytes:
    """All of a batch but its times."""
    assert batch is not None
    return encode_batch(
        replace(batch, stats=replace(batch.stats, generation_s=0.0, loop_lag_s=0.0))
    )


def decoded(content: bytes) -> RolloutBatch:
    return decode_batch(EncodedBatch("a batch", bytearray(content)))


AHEAD = st.sampled_from(
    [
        {},
        {"async_steps": 1},
        {"async_steps": 1, "local": {"decode_steps_ahead": 3}},
        {"async_steps": 2, "local": {"decode_steps_ahead": 30}},
    ]
)
RULES = st.fixed_dictionaries(
    {
        "oversample_groups": st.integers(0, 3),
        "tokens_per_step": st.sampled_from([None, None, 90]),
        "max_carries": st.sampled_from([None, 1]),
        "dynamic_sampling": st.fixed_dictionaries(
            {"enabled": st.booleans(), "max_groups_ratio": st.sampled_from([1.0, 2.0])}
        ),
        "staleness": st.sampled_from(
            [
                {},
                {"max_age": 0, "action": "drop"},
                {"max_age": 2, "action": "regenerate"},
                {"max_age": 1, "measure": "mean", "action": "regenerate"},
                {"max_age": 1, "measure": "mean", "action": "drop"},
                {"max_age": 1, "measure": "token", "action": "mask"},
            ]
        ),
    }
)
PARTIAL = st.tuples(AHEAD, RULES).map(lambda parts: {**parts[0], **parts[1]})
NOT_PARTIAL = RULES.map(
    lambda rules: {**rules, "tokens_per_step": None, "max_carries": None, "partial": False}
)
ROUNDS = st.tuples(st.sampled_from([7, 16]), RULES).map(
    lambda parts: {
        **parts[1],
        "partial_tokens": parts[0],
        "oversample_groups": 0,
        "tokens_per_step": None,
    }
)
LAG = st.sampled_from([{"fixed_lag": 1}, {"fixed_lag": 2}])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    rollout=st.one_of(PARTIAL, PARTIAL, PARTIAL, NOT_PARTIAL, ROUNDS, LAG),
    replay=st.sampled_from([{}, {"batches": 2}]),
    is_slow=st.booleans(),
    has_environment=st.booleans(),
    sees_groups=st.booleans(),
    has_teacher=st.booleans(),
    top_logprobs=st.sampled_from([0, 2]),
    stopped_after=st.integers(1, TOTAL_STEPS - 1),
)
def test_neither_delays_nor_a_resumption_change_a_run(
    rollout: dict[str, Any],
    replay: dict[str, Any],
    is_slow: bool,
    has_environment: bool,
    sees_groups: bool,
    has_teacher: bool,
    top_logprobs: int,
    stopped_after: int,
) -> None:
    replay = {} if "fixed_lag" in rollout else replay
    if has_environment:
        rollout = {**rollout, "environment": "mine:Mine"}
    case = Case(rollout, replay, is_slow, has_environment, sees_groups, has_teacher, top_logprobs)
    for batch in map(decoded, case.check(stopped_after).batches):
        assert all(has_columns(sample) is has_teacher for sample in batch.samples)
        assert_likeliest(batch.samples, top_logprobs)
