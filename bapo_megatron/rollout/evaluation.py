"""The samples of an evaluation: every one is made once, graded, and kept as it finishes.

What is made of them is in ``evaluation/``.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bapo_megatron.config.evaluation import eval_reward
from bapo_megatron.engine.base import SamplingSettings, sample_seed
from bapo_megatron.errors import RolloutError
from bapo_megatron.evaluation.report import write_results
from bapo_megatron.evaluation.samples import EvalSample, SampleJournal, in_order, score_fields
from bapo_megatron.evaluation.settings import eval_settings
from bapo_megatron.evaluation.summary import summarise
from bapo_megatron.rollout.buffer import PendingGroup, PendingSample, empty_sample
from bapo_megatron.rollout.driving import BURST, Driver, reporting, wait_for_news
from bapo_megatron.rollout.episodes import EpisodePlan, Episodes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.evaluation.settings import EvalSet
    from bapo_megatron.reward.pool import RewardPool
    from bapo_megatron.rollout.episodes import Interaction
    from bapo_megatron.rollout.grading import Grader
    from bapo_megatron.rollout.pool import EnginePool
    from bapo_megatron.types import EvalResult

_WAITING_RATIO = 2
"""Samples on their way per connection: while some are graded or answered, others are sampled."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Samples of one prompt that are to be made."""

    group: PendingGroup
    eval_set: EvalSet
    journal: SampleJournal


class Evaluator:
    """Samples n responses to each prompt of each set."""

    def __init__(
        self,
        interaction: Interaction,
        grader: Grader,
        votes: RewardPool,
        sets: Sequence[EvalSet],
        config: RunConfig,
        report: Callable[[str], None],
    ) -> None:
        """Put the parts together.

        Args:
            interaction: Answers the policy's turns.
            grader: Decodes and scores.
            votes: Compares answers with each other, by the function ``math``.
            sets: What to evaluate.
            config: The run; of it the evaluation, the rewards, the seed and its directory.
            report: Takes a line about the progress.
        """
        self._interaction = interaction
        self._grader = grader
        self._votes = votes
        self._sets = tuple(sets)
        self._config = config
        self._report = report
        self.num_samples = 0
        """Samples finished so far, in all evaluations."""
        self._begun: str | None = None
        """The evaluation whose files this process has begun."""

    async def evaluate(
        self, pool: EnginePool, moment: str, weights: str, *, resume: bool = False
    ) -> list[EvalResult]:
        """Score every set with the weights that the servers hold.

        The sets are sampled together, in their order, so that servers do not wait for the longest
        responses of one set before the next one begins.

        Args:
            pool: The servers.
            moment: Begins the names of the results files, see ``samples_file``; empty for an
                evaluation without training. One that is asked for again goes on where it failed.
            weights: Names the weights: only samples of these are gone on with.
            resume: Go on with the samples of an earlier process.

        Raises:
            RolloutError: A server failed, or gave up, an environment failed, or the results cannot
                be written.
            ResultsError: The files hold samples of something else.
            RewardError: Grading failed; comparing answers too (inside an exception group).
        """
        is_resumed = resume or self._begun == moment
        async with contextlib.AsyncExitStack() as stack:
            journals = [
                await stack.enter_async_context(self._journal(s, moment, weights, is_resumed))
                for s in self._sets
            ]
            self._begun = moment
            await self._sample(pool, journals)
            samples = [
                in_order(
                    journal.samples,
                    [prompt.prompt_id for prompt in eval_set.prompts],
                    eval_set.sampling.samples_per_prompt,
                )
                for eval_set, journal in zip(self._sets, journals, strict=True)
            ]
        self._begun = None
        results = []
        for eval_set, groups in zip(self._sets, samples, strict=True):
            self._report(f"evaluation of {eval_set.name}: counting")
            results.append(
                await summarise_set(eval_set, groups, self._votes, self._config, weights)
            )
        path = results_file(self._config.run_dir, moment)
        with _named_write_errors(path):
            write_results(results, path)
        return results

    @contextlib.asynccontextmanager
    async def _journal(
        self, eval_set: EvalSet, moment: str, weights: str, is_resumed: bool
    ) -> AsyncIterator[SampleJournal]:
        path = samples_file(self._config.run_dir, moment, eval_set.name)
        settings = settings_of(eval_set, self._config, weights)
        with _named_write_errors(path):
            journal = await SampleJournal.open(path, settings, resume=is_resumed)
        try:
            yield journal
            with _named_write_errors(path):
                journal.sync()
        finally:
            journal.close()

    async def _sample(self, pool: EnginePool, journals: Sequence[SampleJournal]) -> None:
        """Make every sample that its journal lacks.

        Raises:
            RolloutError: No server could go on, an environment failed, or a file cannot be written.
            RewardError: Grading failed.
        """
        began_s, before = time.monotonic(), sum(len(journal.samples) for journal in journals)
        started_s = began_s - max((j.elapsed_s for j in journals), default=0.0)
        places = self._missing(journals)
        num_missing = sum(len(place.group.samples) for place in places.values())
        waiting = deque(place.group for place in places.values())

        async def keep(pending: PendingSample) -> None:
            place = places[pending.sample.group_id]
            group, journal = place.group, place.journal
            assert pool.version is not None, "a generated answer implies a version"
            sample = _eval_sample(pending, pool.version, time.monotonic() - started_s)
            with _named_write_errors(journal.path):
                await journal.append(sample)
            group.samples = [other for other in group.samples if other is not pending]
            self.num_samples += 1

        def plan_of(pending: PendingSample) -> EpisodePlan:
            return self._plan(pending, places[pending.sample.group_id].eval_set)

        episodes = Episodes(
            pool, self._interaction, self._grader, plan_of, needs_logprobs=False, on_score=keep
        )

        def num_done() -> int:
            return sum(len(journal.samples) for journal in journals)

        def report() -> None:
            rate = episodes.generated_tokens / max(time.monotonic() - began_s, 1e-9)
            total = before + num_missing
            self._report(f"evaluation: {num_done()}/{total} samples, {rate:.0f} tokens/s")

        driver, most_underway = None, _WAITING_RATIO * self._config.rollout.max_connections
        if pool.stepper is not None:  # gets all: what it samples next must not depend on graders
            most_underway = num_missing
            driver = Driver(
                pool.stepper, pool, episodes.is_settled, episodes.news, awaits_scores=False
            )
        try:
            with reporting(report):
                num_begun = 0
                while num_done() < before + num_missing:
                    while waiting and num_begun - (num_done() - before) < most_underway:
                        num_begun += len(waiting[0].samples)
                        episodes.advance([waiting.popleft()])
                    if driver is None or not await driver.drive(BURST):
                        await wait_for_news(episodes.news)
                        episodes.raise_failure()
        finally:
            await episodes.close()

    def _missing(self, journals: Sequence[SampleJournal]) -> dict[int, _Place]:
        """What is to be made, by group, in the order of sets and prompts."""
        places: dict[int, _Place] = {}
        for eval_set, journal in zip(self._sets, journals, strict=True):
            for prompt in eval_set.prompts:
                # Numbers of its own: those of training may be in flight.
                group_id = -1 - len(places)
                tokens = prompt.tokens()
                samples = [
                    PendingSample(empty_sample(group_id, index, tokens), prompt)
                    for index in range(eval_set.sampling.samples_per_prompt)
                    if (prompt.prompt_id, index) not in journal.samples
                ]
                places[group_id] = _Place(PendingGroup(group_id, samples), eval_set, journal)
        return places

    def _plan(self, pending: PendingSample, eval_set: EvalSet) -> EpisodePlan:
        sample, prompt_id, sampling = pending.sample, pending.prompt.prompt_id, eval_set.sampling
        return EpisodePlan(
            SamplingSettings(
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_response_tokens,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sample_seed(self._config.seed, eval_set.name, prompt_id, sample.index),
            ),
            label=f"evaluation of {eval_set.name}, {prompt_id}, sample {sample.index}",
            order=(-sample.group_id, sample.index),
        )


def _eval_sample(pending: PendingSample, version: int, elapsed_s: float) -> EvalSample:
    sample, prompt = pending.sample, pending.prompt
    assert pending.score is not None, "it was scored"
    assert pending.texts is not None, "it was decoded"
    return EvalSample(
        prompt_id=prompt.prompt_id,
        index=sample.index,
        prompt=prompt.text,
        answer=prompt.answer,
        response=pending.texts[-1],
        turns=pending.texts if len(pending.texts) > 1 else (),
        state=pending.state,
        **score_fields(pending.score),
        num_tokens=sample.num_sampled,
        num_environment_tokens=sample.num_written,
        finish_reason=sample.finish_reason,
        version=version,
        elapsed_s=elapsed_s,
        source=prompt.source,
        row=prompt.row,
    )


async def summarise_set(
    eval_set: EvalSet,
    groups: Sequence[Sequence[EvalSample]],
    votes: RewardPool,
    config: RunConfig,
    weights: str,
) -> EvalResult:
    """The scores of a set whose samples are complete, as the run's settings want them.

    Raises:
        RewardError: Comparing answers failed (inside an exception group).
    """
    return await summarise(
        eval_set.name,
        groups,
        votes,
        settings=settings_of(eval_set, config, weights),
        k_values=config.eval.k_values,
        num_resamples=config.eval.bootstrap_resamples,
        seed=config.seed,
    )


def samples_file(run_dir: Path, moment: str, set_name: str) -> Path:
    """Where the samples of a set are: ``eval/step_000020_aime24.jsonl``, or ``eval/aime24.jsonl``.

    Args:
        run_dir: Directory of the run.
        moment: ``step_<n>``, ``start``, or empty for an evaluation without training.
        set_name: Of the set.
    """
    return run_dir / "eval" / f"{moment}{'_' * bool(moment)}{set_name}.jsonl"


def results_file(run_dir: Path, moment: str) -> Path:
    """Where the scores of all sets are: ``eval/step_000020.json``, or ``eval.json``."""
    return run_dir / "eval" / f"{moment}.json" if moment else run_dir / "eval.json"


def settings_of(eval_set: EvalSet, config: RunConfig, weights: str) -> dict[str, object]:
    """What the samples of a set are made with."""
    rollout = config.rollout
    return eval_settings(
        name=eval_set.name,
        weights=weights,
        prompts=eval_set.prompts,
        sampling=eval_set.sampling,
        reward=eval_reward(config.reward, config.eval),
        seed=config.seed,
        environment=rollout.environment if rollout.has_environment else None,
        max_turns=rollout.episodes.max_turns if rollout.has_environment else None,
    )


@contextlib.contextmanager
def _named_write_errors(path: Path) -> Iterator[None]:
    """An operating-system error of the block says what could not be written."""
    try:
        yield
    except OSError as error:
        raise RolloutError(
            f"cannot write the evaluation results to {path}: {error.strerror}; free space, or "
            "change run_dir"
        ) from error
