"""Runs the episodes of training and evaluation: each is sampled until it ends, then scored.

    begin → the policy's turn → the environment's answer → … → the end → a score

``Interaction`` begins episodes and answers turns, ``Episodes`` runs one task per episode, up to its
score by a ``Grader``. A plain response, an environment and an agent differ in who asks for the
next call; each call is sampled by one function, which waits while nothing is generated. Received
tokens are in the call at once, so a task can be cancelled at any time, and a new one continues
where it stopped.

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
from typing import Any

from bapo_megatron.config.rollout import EpisodesConfig
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.record import Call, Completion, EnoughTokensError
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings, sample_seed
from bapo_megatron.environment.base import Environment, EnvironmentFailedError, Step, Task, Turn
from bapo_megatron.rollout.agents import Agents
from bapo_megatron.rollout.buffer import Episode, PendingGroup
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.types import AGENT_COUNTS, FinishReason

BURST = 16
"""Decode steps between two decisions. Responses that end within a burst are graded and replaced
after it: with more steps, rows stay empty; with fewer, the engine waits for graders more often.
Not a setting, because a run's samples depend on it."""
_MAX_LOOP_TURNS = 8
"""Iterations of the event loop; one suffices for a new task, or one whose environment answered, to
reach the engine."""
_MAX_WAIT_S = 0.5
_MAX_FAILED_IN_ROW = 1024
"""So many agents that are lost or too slow, with none between that is not, end the run."""
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
    _num_failed_in_row: int = 0
    """Agents that were lost or too slow since one ended otherwise."""

    async def respond(self, episode: Episode, sampling: SamplingSettings) -> None:
        """Begin an episode, or answer the turn that has ended; change the episode only at the end.

        ``sampling`` is for the whole response: its limit includes the environment's tokens.

        Raises:
            EnvironmentFailedError: The environment failed, with ``on_error: raise``.
        """
        try:
            if episode.record.calls:
                await self._answer(episode, sampling.max_new_tokens)
            else:
                await self._begin(episode, sampling.seed)
        except EnvironmentFailedError as error:
            self.count_failure(error)
            episode.finish(FinishReason.ENVIRONMENT)

    def count_failure(self, error: EnvironmentFailedError) -> None:
        """Count an episode that ends because its environment failed; raise if it ends the run.

        A program of the policy may kill its agent or hold it up: by itself that ends no run.
        """
        may_go_on = self.agents is not None and error.kind in ("lost", "timeout")
        self._num_failed_in_row += may_go_on
        may_go_on &= self._num_failed_in_row < _MAX_FAILED_IN_ROW
        if self.config.on_error == "raise" and not may_go_on:
            raise error
        if not self.errors[error.kind]:
            _LOG.warning("%s; the episode ends and is counted, as later ones will be", error)
        self.errors[error.kind] += 1

    def finish_agent(
        self, episode: Episode, reason: FinishReason, state: Any, num_refusals: int
    ) -> None:
        """End an agent's episode, and count what it did."""
        if reason is not FinishReason.ENVIRONMENT:
            self._num_failed_in_row = 0
        episode.state, record = state, episode.record
        episode.finish(reason)
        num_forks = sum(call.is_fork for call in record.calls)
        num_untrained = sum(not call.is_trained for call in record.calls)
        counts = len(record.calls), num_forks, record.num_divergences, num_refusals, num_untrained
        for name, count in zip(AGENT_COUNTS, counts, strict=True):
            self.counts[name] += float(count)  # type: ignore[assignment]  # as after a resume

    async def _begin(self, episode: Episode, seed: int) -> None:
        prompt = episode.prompt
        task = Task(
            prompt_id=prompt.prompt_id,
            source=prompt.source,
            prompt=prompt.text,
            answer=prompt.answer,
            row=prompt.row,
            seed=seed,
        )
        episode.state = await self.environment.start(task)
        episode.record.write(prompt.token_ids)

    async def _answer(self, episode: Episode, max_response_tokens: int) -> None:
        record = episode.record
        token_ids = record.calls[-1].turn.token_ids.tolist()
        remaining = max_response_tokens - record.num_tokens

        def turn() -> Turn:
            return Turn(
                number=len(record.calls) - 1,
                text=self.renderer.decode(token_ids, skips_special=True),
                token_ids=tuple(token_ids),
                remaining_tokens=remaining,
                prompt_id=episode.prompt.prompt_id,
                calls=self.renderer.calls(token_ids),
            )

        step = await self.environment.step(episode.state, turn)
        for name, value in step.counts.items():
            self.counts[name] += value  # type: ignore[assignment]  # a Counter of floats
        written = () if step.is_done else self._token_ids(step, episode, token_ids)
        episode.state = step.state
        if step.is_done:
            episode.finish(FinishReason.STOP)
        elif len(record.calls) >= self.config.max_turns:
            episode.finish(FinishReason.TURNS)
        elif len(written) >= remaining:
            episode.finish(FinishReason.LENGTH)
        else:
            record.write(written)

    def _token_ids(self, step: Step, episode: Episode, turn: Sequence[int]) -> Sequence[int]:
        """Return the environment's tokens; check that they are in the vocabulary."""
        try:
            if step.messages:
                return self.renderer.continuation(step.messages, after=turn)
            largest = self.renderer.vocab_size - 1
            if unknown := [token for token in step.token_ids if not 0 <= token <= largest]:
                raise ValueError(f"must have tokens from 0 to {largest}, got {unknown[0]}")
            return step.token_ids
        except ValueError as error:
            number = len(episode.record.calls) - 1
            raise EnvironmentFailedError(
                f"rollout.environment: its answer to turn {number} of {episode.prompt.prompt_id} "
                f"{error}; correct the environment, or set rollout.episodes.on_error=zero",
                "tokens",
            ) from error


@dataclass(eq=False)
class _Run:
    """The task of an episode, and what it waits for."""

    episode: Episode
    sampling: set[Call] = field(default_factory=set)
    """Calls in the engine, or on their way there."""
    held: set[Call] = field(default_factory=set)
    """Calls that wait until generation goes on, or until the next round."""
    is_queued: bool = False
    """Whether its agent waits for others to end."""
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Wakes the calls that are held."""
    task: asyncio.Task[None] = field(init=False)

    @property
    def is_asking(self) -> bool:
        """Whether its environment or agent is at work, or a call has not reached the engine yet."""
        is_idle = self.sampling or self.held or self.is_queued
        return not (is_idle or self.episode.is_finished)

    @property
    def leaves(self) -> bool:
        """Whether a call is about to leave the engine."""
        if not self.sampling:
            return False
        return self.episode.is_resting or any(call.is_finished for call in self.sampling)


@dataclass(eq=False)
class Episodes:
    """The tasks of episodes in progress, and their counters.

    ``raise_failure`` and the methods that wait raise the failure of a task, once.
    """

    pool: EnginePool
    interaction: Interaction
    grader: Grader
    plan: Callable[[Episode], GenerateRequest]
    """The request for an episode's whole response."""
    on_score: Callable[[Episode], Awaitable[None]] | None = None
    """Awaited with each episode once it is scored."""
    awaits_scores: bool = False
    """Whether every burst of decode steps waits for all scores."""
    gives_up: Callable[[], bool] = lambda: False
    """Whether ``settle`` no longer waits for scores."""
    is_running: bool = False
    """Whether requests may be in flight."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a call begins or ends, an episode is finished or scored, or a task fails."""
    generated_tokens: int = 0
    resumed_samples: int = 0
    """Requests so far that resumed a turn."""
    _runs: dict[tuple[int, int], _Run] = field(default_factory=dict)
    _failure: BaseException | None = None

    def advance(self, groups: Iterable[PendingGroup]) -> None:
        """Start a task for every episode that needs one; running tasks continue."""
        if not self.is_running:
            self.pool.reopen()
            self.is_running = True
        for group in groups:
            for episode in group.episodes:
                if (run := self._runs.get(episode.key)) is not None:
                    if run.held and not episode.is_resting:
                        run.held.clear()
                        run.goes_on.set()
                        run.goes_on.clear()
                elif not (episode.is_scored or episode.graded is not None or episode.is_resting):
                    self._runs[episode.key] = run = _Run(episode)
                    run.task = asyncio.create_task(self._run_episode(run, group))
                    run.task.add_done_callback(functools.partial(self._end, run))

    async def stop(self) -> None:
        """Abort every request; calls keep their tokens. Agents and graders continue."""
        if not self.is_running:
            return
        self.is_running = False
        await self.pool.drain()
        while any(run.sampling for run in self._runs.values()):
            await asyncio.sleep(0)  # their requests have ended

    def cancel(self, episode: Episode) -> None:
        """Cancel the task of an episode that is dropped or restarted."""
        if (run := self._runs.pop(episode.key, None)) is not None:
            run.task.cancel()

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
        tasks = [run.task for run in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_settled(self, scored: bool) -> bool:
        """Whether every episode waits inside the engine for its next tokens, rests or is queued.

        None is on its way there, about to end or waiting for its environment; with ``scored``, none
        is grading either.
        """
        self.raise_failure()
        runs = self._runs.values()
        if sum(len(run.sampling) for run in runs) != self.pool.num_in_flight:
            return False
        if any(run.is_asking or run.leaves for run in runs):
            return False
        return not (scored and any(run.episode.is_finished for run in runs))

    async def _wait_for_news(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.news.wait(), _MAX_WAIT_S)
        self.news.clear()

    def _end(self, run: _Run, task: asyncio.Task[None]) -> None:
        if self._runs.get(run.episode.key) is run:
            del self._runs[run.episode.key]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self.news.set()

    async def _run_episode(self, run: _Run, group: PendingGroup) -> None:
        """Run the episode to its end, and score it."""
        episode = run.episode
        if not episode.is_finished:
            request = self.plan(episode)
            if self.interaction.agents is None:
                await self._run_environment(run, request)
            else:
                await self._run_agent(run, request, self.interaction.agents)
            self.news.set()
        await self.grader.score(episode, group)
        if self.on_score is not None:
            await self.on_score(episode)

    async def _run_environment(self, run: _Run, request: GenerateRequest) -> None:
        """Have the environment begin, answer each turn and end; a plain response has one turn."""
        episode, record = run.episode, run.episode.record
        while not episode.is_finished:
            call = record.calls[-1] if record.calls else None
            if call is not None and not call.is_finished:
                before = record.num_tokens - call.num_tokens
                call.max_tokens = request.sampling.max_new_tokens - before
                await self._sample(run, call, request)
            elif call is not None and call.finish_reason is FinishReason.LENGTH:
                episode.finish(FinishReason.LENGTH)
            else:
                await self.interaction.respond(episode, request.sampling)

    async def _run_agent(self, run: _Run, request: GenerateRequest, agents: Agents) -> None:
        """Run an episode's agent from its task to its end; calls of earlier runs are recorded."""
        episode, state = run.episode, None
        episode.record.restart()
        session = agents.session(
            episode.record,
            request.sampling,
            lambda call: self._sample(run, call, request),
            is_serial=self.pool.stepper is not None,
        )

        def note_wait(has_to_wait: bool) -> None:
            run.is_queued = has_to_wait
            if has_to_wait:
                self.news.set()
            else:
                session.begin()

        try:
            seed = request.sampling.seed
            reason, state = await agents.play(session, episode.prompt, seed, note_wait)
        except EnvironmentFailedError as error:
            self.interaction.count_failure(error)
            reason = FinishReason.ENVIRONMENT
        self.interaction.finish_agent(episode, reason, state, session.num_refusals)

    async def _sample(self, run: _Run, call: Call, request: GenerateRequest) -> None:
        """Sample a call to its end, in as many requests as that takes."""
        while not call.is_finished:
            is_held = not self.is_running or run.episode.is_resting
            calls = run.held if is_held else run.sampling
            calls.add(call)
            self.news.set()
            try:
                await (run.goes_on.wait() if is_held else self._request(run.episode, call, request))
            finally:
                calls.discard(call)
        self.news.set()

    async def _request(self, episode: Episode, call: Call, request: GenerateRequest) -> None:
        """Continue a call until it ends, rests or is aborted."""
        group_id, is_resumed, seed = episode.group_id, call.num_tokens > 0, request.sampling.seed
        if call.name:  # an agent's calls may be sampled side by side, and share an own prefix
            seed, before = sample_seed(seed, call.name), 0
            # Evaluations stay negative.
            index = episode.index if group_id >= 0 else -episode.index
            affinity = (group_id << 20) + index
        else:
            before, affinity = episode.num_tokens - call.num_tokens, group_id
        prompt, stop_at = call.prompt().tolist(), 0

        def plan() -> GenerateRequest | None:
            nonlocal stop_at
            round_end = call.num_tokens + episode.rests_at - episode.num_tokens
            stop_at = min(call.max_tokens, round_end)
            if call.is_finished or stop_at <= call.num_tokens:
                return None
            later = replace(
                request,
                input_ids=[*prompt, *call.turn.token_ids.tolist()],
                sampling=replace(
                    request.sampling, max_new_tokens=stop_at - call.num_tokens, seed=seed
                ),
                sampled_tokens=before + call.num_tokens,
                top_logprobs=request.top_logprobs if call.is_trained else 0,
            )
            return later if request.routes_from is None else replace(later, routes_from=call.routed)

        def take(part: Completion) -> None:
            num_tokens = call.num_tokens + len(part.token_ids)
            if part.finish_reason is FinishReason.LENGTH and stop_at <= num_tokens:
                # Of the round, unless it is that of the call.
                part = replace(part, finish_reason=FinishReason.ABORT)
            has_more = part.finish_reason is FinishReason.ABORT
            part = call.until_stop(part, self._text)
            call.append(part)
            self.generated_tokens += len(part.token_ids)
            if has_more and part.finish_reason is FinishReason.STOP_STRING:
                raise EnoughTokensError

        was_sent = await self.pool.generate(plan, take, affinity)
        self.resumed_samples += is_resumed and was_sent

    def _text(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens, as agents see it."""
        return self.interaction.renderer.decode(token_ids, skips_special=True)
