"""Episodes whose tokens and answers a test decides, one by one."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from bapo_megatron.config.rollout import EpisodesConfig
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings
from bapo_megatron.environment.base import Step, Task, Turn
from bapo_megatron.reward.base import Response, Score
from bapo_megatron.rollout.agents import Agents
from bapo_megatron.rollout.buffer import Episode, RolloutBuffer
from bapo_megatron.rollout.episodes import Episodes, Interaction
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.rollout.saved import SavedRollout
from bapo_megatron.types import FinishReason, Prompt
from tests.fakes.fake_pool import FakePool
from tests.fakes.scripted_environment import ScriptedEnvironment
from tests.rollout.batching_setup import Renderer, settle
from tests.rollout.saved_files import AT_START, file_of, read_file

PROMPT = Prompt("p:0", (1, 2), "7", "What?", "p", {"level": 3})
MAX_TOKENS = 40


class CountingRewards:
    """Half a point for each token of the last turn; with a group, one more for the best."""

    def __init__(self) -> None:
        self.responses: list[Response] = []
        self.groups: list[list[Response]] = []
        self.held: asyncio.Event | None = None
        """Groups wait for it."""

    async def score(self, response: Response) -> Score:
        self.responses.append(response)
        if response.sample.finish_reason == "environment":
            return Score(0.0, answer_found=False)
        return Score(len(response.text.split()) / 2, components={"length": 1.0})

    async def score_group(
        self, responses: Sequence[Response], scores: Sequence[Score]
    ) -> list[Score]:
        self.groups.append(list(responses))
        if self.held is not None:
            await self.held.wait()
        best = max(score.reward for score in scores)
        return [
            Score(score.reward + (score.reward == best), answer_found=score.answer_found)
            for score in scores
        ]


class Setup:
    """A group of episodes, each with an environment that follows a script."""

    def __init__(
        self,
        answer: Callable[[Any, Turn], Step],
        *,
        begin: Callable[[Task], Any] = lambda task: [],
        num_samples: int = 1,
        max_tokens: int = MAX_TOKENS,
        state: bytes | None = None,
        version: int = 0,
        sees_groups: bool = False,
        shaping: Any = None,
        pool: EnginePool | None = None,
        prompt: Prompt = PROMPT,
        renderer: Any = None,
        agents: Agents | None = None,
        **episodes: Any,
    ) -> None:
        self.environment = ScriptedEnvironment(answer, begin)
        self.environment.waits = True
        self.pool: Any = FakePool(version) if pool is None else pool
        self.rewards = CountingRewards()
        self.max_tokens = max_tokens
        config, renderer = EpisodesConfig.model_validate(episodes), renderer or Renderer()
        self.interaction = Interaction(self.environment, renderer, config, agents=agents)
        grader = Grader(renderer, self.rewards, shaping, sees_groups=sees_groups)
        self.episodes = Episodes(self.pool, self.interaction, grader, self.request_of)
        if state is None:
            self.buffer = RolloutBuffer()
            self.buffer.start_group(prompt, num_samples)
        else:
            self.buffer = read_file(state).buffer
        [self.group] = self.buffer

    def request_of(self, episode: Episode) -> GenerateRequest:
        return GenerateRequest(
            input_ids=episode.prompt.token_ids,
            sampling=SamplingSettings(0.5, self.max_tokens, seed=100 + episode.index),
            label=f"sample {episode.index}",
            order=episode.key,
        )

    @property
    def episode(self) -> Episode:
        return self.group.episodes[0]

    async def advance(self) -> None:
        self.episodes.advance(self.buffer)
        await settle()

    async def begin(self) -> None:
        await self.advance()
        await self.answer()

    async def answer(self, count: int | None = None) -> None:
        self.environment.let_answer(count)
        await settle()

    async def tokens(self, count: int, *, ends: bool = False, index: int = 0) -> None:
        """Let a sample receive tokens; with ``ends`` the last one ends its turn."""
        [request] = [r for r in self.pool.requests if r.label == f"sample {index}"]
        self.pool.give(request, count, FinishReason.STOP if ends else FinishReason.ABORT)
        await settle()

    async def turn(self, count: int) -> None:
        """The policy takes a turn of so many tokens, which the environment answers."""
        await self.tokens(count, ends=True)
        await self.answer()

    async def restart(self, index: int = 0, *, sees_groups: bool = False) -> None:
        """Begin a response again, as one that is too old."""
        episode = self.group.episodes[index]
        self.episodes.cancel(episode)
        self.group.start_again([episode], sees_groups=sees_groups)
        await self.advance()

    async def stop(self) -> None:
        await self.episodes.stop()
        await settle()

    async def push(self, version: int) -> None:
        """Sync weights with ``in_flight: abort``."""
        await self.episodes.stop()
        self.pool.version = version
        await self.advance()

    def saved(self) -> bytes:
        return file_of(SavedRollout(AT_START, self.buffer.snapshot()))


def script(*steps: Step) -> Callable[[Any, Turn], Step]:
    """The answers to the turns, in order; the state counts what was heard."""

    def answer(state: list[str], turn: Turn) -> Step:
        step = steps[turn.number]
        return Step([*state, turn.text], step.messages, step.token_ids, step.is_done)

    return answer


THREE_TURNS = script(
    Step(None, token_ids=[1100, 1101]),
    Step(None, messages=[{"role": "user", "content": "m"}]),
    Step(None, is_done=True),
)
