"""Runs the episodes of training and evaluation: each is sampled until it ends, then scored.

    begin → the policy's turn → the environment's answer → … → the end → a score

``Interaction`` begins episodes and answers turns, ``Grader`` scores, ``Episodes`` runs one task per
sample. A task lives as long as requests may be in flight: with ``rollout.async_steps`` beyond the
step that started it. Received tokens are in the sample at once, so a task can be cancelled at any
time, and a new one continues where it stopped.

With an ``engine.base.Stepper``, decisions are made only between bursts of decode steps, once
everything has *settled*: every request waits inside the engine and, if decisions depend on scores,
no score is outstanding. Such a state depends neither on the clock nor on the order in which graders
answer, so two runs with one seed decide alike (docs/rollout.md).
"""

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from bapo_megatron.agent.record import Call, Record
from bapo_megatron.config.rollout import EpisodesConfig
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.engine.base import (
    Completion,
    GenerateRequest,
    SamplingSettings,
    sample_seed,
)
from bapo_megatron.environment.base import Environment, EnvironmentFailedError, Step, Task, Turn
from bapo_megatron.reward.base import Response, SampleFacts, Score
from bapo_megatron.reward.composition import Rewards
from bapo_megatron.reward.shaping import ShapedReward, Shaping
from bapo_megatron.rollout.agents import Agents
from bapo_megatron.rollout.buffer import PendingGroup, PendingSample
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.rollout.scoring import TeacherPool
from bapo_megatron.types import AGENT_COUNTS, FinishReason, Sample

BURST = 16
"""Decode steps between two decisions. Responses that end within a burst are graded and replaced
after it: with more steps, rows stay empty; with fewer, the engine waits for graders more often.
Not a setting, because a run's samples depend on it."""
_MAX_LOOP_TURNS = 8
"""Iterations of the event loop; one suffices for a new task, or one whose environment answered, to
reach the engine."""
_MAX_WAIT_S = 0.5
_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Interaction:
    """Begins episodes and answers turns; the environment's owner closes it."""

    environment: Environment
    renderer: ChatRenderer
    config: EpisodesConfig
    errors: Counter[str] = field(default_factory=Counter)
    """Episodes that ended because the environment failed, by kind."""
    counts: Counter[str] = field(default_factory=Counter)
    """Sums of ``Step.counts``, and counts of agents."""
    agents: Agents | None = None
    """Plays episodes instead of the environment."""

    async def respond(self, pending: PendingSample, sampling: SamplingSettings) -> None:
        """Begin an episode, or answer the turn that has ended; change the sample only at the end.

        ``sampling`` is for the whole response: its limit includes the environment's tokens.

        Raises:
            EnvironmentFailedError: The environment failed, with ``on_error: raise``.
        """
        assert sampling.seed is not None, "episodes have a seed"
        prompt = pending.prompt
        try:
            if not pending.has_begun:
                task = Task(
                    prompt_id=prompt.prompt_id,
                    source=prompt.source,
                    prompt=prompt.text,
                    answer=prompt.answer,
                    row=prompt.row,
                    seed=sampling.seed,
                )
                pending.state = await self.environment.start(task)
                pending.has_begun = True
            else:
                await self._answer(pending, sampling.max_new_tokens)
        except EnvironmentFailedError as error:
            self.count_failure(error)
            pending.finish(FinishReason.ENVIRONMENT)

    def count_failure(self, error: EnvironmentFailedError) -> None:
        """Count an episode that ends because its environment failed; raise if it ends the run."""
        if self.config.on_error == "raise":
            raise error
        if not self.errors[error.kind]:
            _LOG.warning("%s; the episode ends and is counted, as later ones will be", error)
        self.errors[error.kind] += 1

    def finish_agent(self, pending: PendingSample, reason: FinishReason, state: Any) -> None:
        """End an agent's episode, and count what it did."""
        record = pending.record
        assert record is not None, "agents have a record"
        pending.finish_agent(reason, state)
        num_forks = sum(call.is_fork for call in record.calls)
        counts = len(record.calls), num_forks, record.num_divergences
        for name, count in zip(AGENT_COUNTS, counts, strict=True):
            self.counts[name] += float(count)  # type: ignore[assignment]  # as after a resume

    async def _answer(self, pending: PendingSample, max_response_tokens: int) -> None:
        pending.settle()
        sample = pending.sample
        remaining = max_response_tokens - pending.num_tokens

        def turn() -> Turn:
            token_ids = sample.segments()[-1].tolist()
            return Turn(
                number=sample.num_turns - 1,
                text=self.renderer.decode(token_ids, skips_special=True),
                token_ids=tuple(token_ids),
                remaining_tokens=remaining,
                prompt_id=pending.prompt.prompt_id,
                calls=self.renderer.calls(token_ids),
            )

        step = await self.environment.step(pending.state, turn)
        for name, value in step.counts.items():
            self.counts[name] += value  # type: ignore[assignment]  # a Counter of floats
        token_ids = () if step.is_done else self._token_ids(step, pending)
        pending.state = step.state
        if step.is_done:
            pending.finish(FinishReason.STOP)
        elif sample.num_turns >= self.config.max_turns:
            pending.finish(FinishReason.TURNS)
        elif len(token_ids) >= remaining:
            pending.finish(FinishReason.LENGTH)
        else:
            pending.write(token_ids)

    def _token_ids(self, step: Step, pending: PendingSample) -> Sequence[int]:
        """Return the environment's tokens; check that they are in the vocabulary."""
        try:
            if step.messages:
                turn_token_ids = pending.sample.segments()[-1].tolist()
                return self.renderer.continuation(step.messages, after=turn_token_ids)
            largest = self.renderer.vocab_size - 1
            if unknown := [token for token in step.token_ids if not 0 <= token <= largest]:
                raise ValueError(f"must have tokens from 0 to {largest}, got {unknown[0]}")
            return step.token_ids
        except ValueError as error:
            turn = pending.sample.num_turns - 1
            raise EnvironmentFailedError(
                f"rollout.environment: its answer to turn {turn} of {pending.prompt.prompt_id} "
                f"{error}; correct the environment, or set rollout.episodes.on_error=zero",
                "tokens",
            ) from error


@dataclass(eq=False)
class Grader:
    """Decodes and scores responses; the caller starts and closes ``rewards``."""

    renderer: ChatRenderer
    rewards: Rewards
    shaping: Shaping | None = None
    """Added to rewards in training; None in evaluations."""
    sees_groups: bool = field(default=False, kw_only=True)
    """Whether rewards depend on the whole group."""
    teacher: TeacherPool | None = field(default=None, kw_only=True)
    """Scores each response while it is graded."""
    num_timeouts: int = 0
    """Samples scored 0 because grading them took too long."""
    num_errors: int = 0
    """Samples scored 0 because a reward function failed."""

    async def score(self, pending: PendingSample, group: PendingGroup) -> None:
        """Set texts, reward and columns of a finished sample, unless it was restarted meanwhile.

        With ``sees_groups`` the whole ``group`` gets its rewards once its last sample is graded.

        Raises:
            RewardError: A reward function failed.
            RolloutError: The teacher failed.
        """
        sample, prompt = pending.sample, pending.prompt
        texts = tuple(
            self.renderer.decode(token_ids.tolist(), skips_special=True)
            for sequence in sample.sequences
            for token_ids in sequence.segments()
        )
        facts = SampleFacts(
            prompt_id=prompt.prompt_id,
            source=prompt.source,
            prompt=prompt.text,
            finish_reason=sample.finish_reason.value,
            num_tokens=sample.episode_tokens,
            num_turns=sum(sequence.num_turns for sequence in sample.sequences),
            environment_tokens=sample.episode_tokens - sample.episode_sampled,
        )
        turns = texts if len(texts) > 1 else ()
        response = Response(texts[-1], prompt.answer, facts, prompt.row, turns, pending.state)
        score, *columns = await asyncio.gather(
            self.rewards.score(response), *map(self._teacher_columns, sample.sequences)
        )
        if pending.sample is not sample:
            return
        for sequence, values in zip(sample.sequences, columns, strict=True):
            sequence.columns = values
        pending.graded = response, score
        members = group.samples if self.sees_groups else [pending]
        if all(member.graded is not None for member in members):
            await self._reward(members)

    async def _teacher_columns(self, sequence: Sample) -> dict[str, np.ndarray]:
        if self.teacher is None or self.teacher.has_scored(sequence):
            return sequence.columns
        return await self.teacher.score(sequence)

    async def _reward(self, members: Sequence[PendingSample]) -> None:
        """Set the rewards of graded samples together, unless one is restarted meanwhile."""
        samples = [member.sample for member in members]
        graded = [member.graded for member in members if member.graded is not None]
        responses = [response for response, _ in graded]
        scores = [score for _, score in graded]
        if self.sees_groups:
            scores = await self.rewards.score_group(responses, scores)
        shaped = await asyncio.gather(*map(self._shape, samples, responses, scores))
        if any(member.sample is not s for member, s in zip(members, samples, strict=True)):
            return
        for pending, response, score, final in zip(members, responses, scores, shaped, strict=True):
            self.num_timeouts += score.timed_out or final.timed_out
            self.num_errors += score.failed
            sample = pending.sample
            sample.reward = final.reward
            sample.reward_components = {**score.components, **score.metrics, **final.terms}
            sample.answer_found = score.answer_found
            pending.texts = response.turns or (response.text,)
            pending.extracted, pending.reason = map(_storable, (score.extracted, score.reason))

    async def _shape(self, sample: Sample, response: Response, score: Score) -> ShapedReward:
        if self.shaping is None or sample.finish_reason is FinishReason.ENVIRONMENT:
            return ShapedReward(score.reward, {})
        token_ids_Q = np.concatenate([s.sampled_token_ids for s in sample.sequences])
        return await self.shaping.apply(score, response, token_ids_Q)


def _storable(text: str) -> str:
    """Replace lone surrogates, which no file can hold, by ``?``."""
    return text.encode("utf-8", "replace").decode()


class _Segment(NamedTuple):
    """What a task has, or will have, in the engine."""

    owner: asyncio.Task[None]
    """The episode's task: itself, unless an agent makes calls."""
    leaves: Callable[[], bool]
    """Whether it is about to leave the engine."""


@dataclass(eq=False)
class Episodes:
    """The tasks of samples in progress, and their counters.

    ``raise_failure`` and the methods that wait raise the failure of a task, once.
    """

    pool: EnginePool
    interaction: Interaction
    grader: Grader
    plan: Callable[[PendingSample], GenerateRequest]
    """The request for a sample's whole response."""
    on_score: Callable[[PendingSample], Awaitable[None]] | None = None
    """Awaited with each sample once it is scored."""
    awaits_scores: bool = False
    """Whether every burst of decode steps waits for all scores."""
    gives_up: Callable[[], bool] = lambda: False
    """Whether ``settle`` no longer waits for scores."""
    is_running: bool = False
    """Whether requests may be in flight."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a turn is answered, a sample is finished or scored, or a task fails."""
    generated_tokens: int = 0
    resumed_samples: int = 0
    """Requests so far that resumed a turn."""
    _tasks: dict[tuple[int, int], asyncio.Task[None]] = field(default_factory=dict)
    _sampling: dict[asyncio.Task[Any], _Segment] = field(default_factory=dict)
    """Tasks, and calls of agents, whose policy has the turn."""
    _asking: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that wait for their environment, or whose agent works."""
    _held: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks whose agent waits for a turn that is not sampled at present."""
    _queued: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks whose agent waits for others to end."""
    _advanced: asyncio.Event = field(default_factory=asyncio.Event)
    """Wakes calls that are held."""
    _failure: BaseException | None = None

    def advance(self, groups: Iterable[PendingGroup]) -> None:
        """Start a task for every sample that needs one; running tasks continue."""
        if not self.is_running:
            self.pool.reopen()
            self.is_running = True
        self._asking |= self._held  # until each call has looked whether it goes on
        self._held.clear()
        self._advanced.set()
        self._advanced.clear()
        for group in groups:
            for pending in group.samples:
                key = (group.group_id, pending.sample.index)
                is_idle = pending.is_scored or pending.graded is not None or pending.is_resting
                if is_idle or (key in self._tasks and not self._tasks[key].done()):
                    continue
                self._tasks[key] = task = asyncio.create_task(self._run_episode(pending, group))
                if not pending.is_finished and self.interaction.agents is not None:
                    self._asking.add(task)
                elif not pending.is_finished:
                    self._sampling[task] = _segment_of(task, pending)
                task.add_done_callback(functools.partial(self._end, key))

    async def stop(self) -> None:
        """Abort every request; samples keep their tokens. Agents and graders continue."""
        if not self.is_running:
            return
        self.is_running = False
        await self.pool.drain()
        while self._sampling:
            await asyncio.sleep(0)  # their requests have ended

    def cancel(self, pending: PendingSample) -> None:
        """Cancel the task of a sample that is dropped or restarted."""
        task = self._tasks.pop((pending.sample.group_id, pending.sample.index), None)
        if task is not None:
            task.cancel()

    def raise_failure(self) -> None:
        """Raise the error of the first task that failed, if any."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    async def wait_for_change(self) -> None:
        """Drive a burst, or wait for news for at most ``_MAX_WAIT_S``."""
        if not await self.drive(BURST):
            await self._wait_for_news()
            self.raise_failure()

    async def drive(self, max_steps: int) -> int:
        """Settle, take at most ``max_steps`` decode steps, settle again; return how many."""
        stepper = self.pool.stepper
        if stepper is None or not await self.settle(scored=self.awaits_scores):
            return 0
        num_steps = await stepper.decode(max_steps)
        await self.settle(scored=self.awaits_scores)
        return num_steps

    async def settle(self, *, scored: bool = True) -> bool:
        """Wait until nothing changes before the next decode step; with ``scored``, for every score.

        Returns False if no engine holds the weights, or if it gives up. Without a stepper, does
        nothing.
        """
        while self.pool.stepper is not None:
            for _ in range(_MAX_LOOP_TURNS):
                await asyncio.sleep(0)
                if self._is_settled(scored):
                    return True
            await self._wait_for_news()
            if self.pool.states.needs_weights or self.gives_up():
                return self._is_settled(scored)
        return True

    async def close(self) -> None:
        """Cancel every task."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_settled(self, scored: bool) -> bool:
        """Whether every sampling task waits inside the engine for its next tokens.

        None is on its way there, about to end or waiting for its environment; with ``scored``, none
        is grading either.
        """
        self.raise_failure()
        if self._asking or len(self._sampling) != self.pool.num_in_flight:
            return False
        if any(segment.leaves() for segment in self._sampling.values()):
            return False
        owners = {segment.owner for segment in self._sampling.values()}
        wanted = set(self._tasks.values()) - ((self._held | self._queued) - owners)
        return owners == wanted if scored else owners <= wanted

    async def _wait_for_news(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.news.wait(), _MAX_WAIT_S)
        self.news.clear()

    def _end(self, key: tuple[int, int], task: asyncio.Task[None]) -> None:
        self._sampling.pop(task, None)
        for tasks in (self._asking, self._held, self._queued):
            tasks.discard(task)
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self.news.set()

    async def _run_episode(self, pending: PendingSample, group: PendingGroup) -> None:
        """Run turns until the episode ends, rests or is aborted; score it if it has ended."""
        task, request, had_ended = asyncio.current_task(), self.plan(pending), pending.is_finished
        assert task is not None
        if self.interaction.agents is not None and not had_ended:
            await self._run_agent(task, pending, request, self.interaction.agents)
        while not pending.is_finished:
            if pending.awaits_answer or not pending.has_begun:
                await self._ask_environment(task, pending, request.sampling)
            else:
                goes_on = self.is_running and not pending.is_resting
                if not (goes_on and await self._sample(pending, request)):
                    return
        if not had_ended:
            self._sampling.pop(task, None)  # ``stop`` does not wait for the score
            self.news.set()
        await self.grader.score(pending, group)
        if self.on_score is not None:
            await self.on_score(pending)

    async def _ask_environment(
        self, task: asyncio.Task[None], pending: PendingSample, sampling: SamplingSettings
    ) -> None:
        """Have the environment begin the episode, or answer a turn."""
        self._sampling.pop(task, None)  # ``stop`` does not wait for the environment
        self._asking.add(task)
        try:
            await self.interaction.respond(pending, sampling)
        finally:
            self._asking.discard(task)
        if self.is_running and not pending.is_finished:
            self._sampling[task] = _segment_of(task, pending)
        self.news.set()

    async def _run_agent(
        self,
        task: asyncio.Task[None],
        pending: PendingSample,
        request: GenerateRequest,
        agents: Agents,
    ) -> None:
        """Run an episode's agent, from its task, to its end; calls of earlier runs are recorded."""
        earlier = pending.record or Record()
        pending.record = record = earlier.restarted()
        num_calls = 0

        async def sample(call: Call) -> None:
            nonlocal num_calls
            num_calls += 1
            try:
                await self._sample_call(task, pending, call, request)
            finally:
                num_calls -= 1
                self._held.discard(task)
                if not num_calls:
                    self._asking.add(task)
                self.news.set()

        assert request.sampling.seed is not None, "episodes have a seed"
        is_serial = self.pool.stepper is not None
        session = agents.session(record, request.sampling, sample, is_serial=is_serial)
        state, seed = None, request.sampling.seed

        def note_wait(has_to_wait: bool) -> None:
            if has_to_wait:
                self._asking.discard(task)
                self._queued.add(task)
                self.news.set()
            else:
                self._queued.discard(task)
                self._asking.add(task)
                session.begin()

        try:
            reason, state = await agents.play(session, pending.prompt, seed, note_wait)
        except EnvironmentFailedError as error:
            self.interaction.count_failure(error)
            reason = FinishReason.ENVIRONMENT
        finally:
            for tasks in (self._asking, self._held, self._queued):
                tasks.discard(task)
        self.interaction.finish_agent(pending, reason, state)

    async def _sample_call(
        self,
        task: asyncio.Task[None],
        pending: PendingSample,
        call: Call,
        request: GenerateRequest,
    ) -> None:
        """Sample an agent's call to its end, in as many requests as that takes."""
        here = asyncio.current_task()
        assert here is not None

        segment = _Segment(task, lambda: call.is_finished or pending.is_resting)
        while not call.is_finished:
            self._asking.discard(task)
            if not self.is_running or pending.is_resting:
                self._held.add(task)
                self.news.set()
                await self._advanced.wait()
                continue
            self._sampling[here] = segment
            self.news.set()
            try:
                await self._request_call(pending, call, request)
            finally:
                del self._sampling[here]

    async def _request_call(
        self, pending: PendingSample, call: Call, request: GenerateRequest
    ) -> None:
        """Continue an agent's call until it ends, rests or is aborted."""
        prompt, is_resumed = call.prompt().tolist(), len(call.token_ids) > 0
        seed = sample_seed(request.sampling.seed or 0, call.name)

        def plan() -> GenerateRequest | None:
            num_tokens = len(call.token_ids)
            remaining = min(call.max_tokens - num_tokens, pending.rests_at - pending.num_tokens)
            if call.is_finished or remaining <= 0:
                return None
            return replace(
                request,
                input_ids=[*prompt, *call.token_ids.tolist()],
                sampling=replace(request.sampling, max_new_tokens=remaining, seed=seed),
                sampled_tokens=num_tokens,
            )

        def take(part: Completion) -> None:
            if call.is_finished and not len(part.token_ids):
                return  # its server was lost between the last token and the finish reason
            num_tokens, reason = len(call.token_ids) + len(part.token_ids), part.finish_reason
            if reason is FinishReason.LENGTH and num_tokens < call.max_tokens:
                reason = FinishReason.ABORT  # the limit of a round
            call.append(part.token_ids, part.logprobs, part.versions, reason)
            self.generated_tokens += len(part.token_ids)

        # What shares a prefix is an episode, not a group; evaluations stay negative.
        group_id, index = pending.sample.group_id, pending.sample.index
        affinity = (group_id << 20) + (index if group_id >= 0 else -index)
        was_sent = await self.pool.generate(plan, take, affinity)
        self.resumed_samples += is_resumed and was_sent

    async def _sample(self, pending: PendingSample, request: GenerateRequest) -> bool:
        """Continue the policy's turn; return whether it has ended."""
        max_tokens, is_resumed = request.sampling.max_new_tokens, pending.is_within_turn
        stop_at = min(max_tokens, pending.rests_at)

        def plan() -> GenerateRequest | None:
            remaining = stop_at - pending.num_tokens
            if remaining == 0:
                return None
            later = replace(
                request,
                input_ids=pending.input_ids(),
                sampling=replace(request.sampling, max_new_tokens=remaining),
                sampled_tokens=pending.num_tokens,
            )
            routes = pending.sample.routes
            if request.routes_from is None or routes is None:
                return later
            return replace(later, routes_from=len(routes))

        def take(part: Completion) -> None:
            num_tokens = pending.num_tokens + len(part.token_ids)
            if part.finish_reason is FinishReason.LENGTH and stop_at <= num_tokens < max_tokens:
                part = replace(part, finish_reason=FinishReason.ABORT)  # the limit of a round
            pending.append(part, max_tokens)
            self.generated_tokens += len(part.token_ids)

        was_sent = await self.pool.generate(plan, take, pending.sample.group_id)
        self.resumed_samples += is_resumed and was_sent
        return pending.is_finished or pending.awaits_answer


def _segment_of(task: asyncio.Task[None], pending: PendingSample) -> _Segment:
    return _Segment(
        task, lambda: pending.is_finished or pending.awaits_answer or pending.is_resting
    )
