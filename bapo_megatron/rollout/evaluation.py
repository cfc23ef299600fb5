"""The samples of an evaluation: every one is made once, graded, and kept as it finishes.

What is made of them is in ``evaluation/``.
"""

from __future__ import annotations

import asyncio
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
from bapo_megatron.rollout.driving import BURST, Driver, reporting
from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from bapo_megatron.config.evaluation import EvalSamplingConfig
    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.engine.base import Completion, Stepper
    from bapo_megatron.evaluation.sets import EvalSet
    from bapo_megatron.reward.pool import RewardPool
    from bapo_megatron.rollout.engine_pool import EnginePool
    from bapo_megatron.rollout.grading import Grader
    from bapo_megatron.types import EvalResult, Prompt

_WAITING_RATIO = 2
"""Samples on their way per connection: while some are graded, others generate."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One sample to be made."""

    journal: SampleJournal
    set_name: str
    prompt: Prompt
    index: int
    sampling: EvalSamplingConfig
    affinity: int


class Evaluator:
    """Samples n responses to each prompt of each set."""

    def __init__(
        self,
        grader: Grader,
        votes: RewardPool,
        sets: Sequence[EvalSet],
        config: RunConfig,
        report: Callable[[str], None],
    ) -> None:
        """Put the parts together.

        Args:
            grader: Decodes and scores.
            votes: Compares answers with each other, by the function ``math``.
            sets: What to evaluate.
            config: The run; of it the evaluation, the rewards, the seed and its directory.
            report: Takes a line about the progress.
        """
        self._grader = grader
        self._votes = votes
        self._sets = tuple(sets)
        self._config = config
        self._report = report
        self.num_samples = 0
        """Samples finished so far, in all evaluations."""
        self._num_tokens = 0
        """Received since the present evaluation began to sample."""
        self._num_sampling = 0
        """Requests that have not had their last token."""
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
            RolloutError: A server failed, or gave up, or the results cannot be written (inside an
                exception group).
            ResultsError: The files hold samples of something else.
            RewardError: Grading failed (inside an exception group).
        """
        pool.reopen()
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
        """Make every sample that its journal lacks."""
        jobs = deque(self._jobs(journals))
        num_jobs, began_s = len(jobs), time.monotonic()
        self._num_tokens, self._num_sampling = 0, num_jobs
        started_s = time.monotonic() - max((j.elapsed_s for j in journals), default=0.0)
        num_workers = num_jobs
        if pool.stepper is None:  # else what is sampled next must not depend on graders
            num_workers = min(num_jobs, _WAITING_RATIO * self._config.rollout.max_connections)
        before = sum(len(journal.samples) for journal in journals)

        async def work() -> None:
            while jobs:
                await self._make(pool, jobs.popleft(), started_s)

        def report() -> None:
            num_done = sum(len(journal.samples) for journal in journals)
            rate = self._num_tokens / max(time.monotonic() - began_s, 1e-9)
            self._report(f"evaluation: {num_done}/{before + num_jobs} samples, {rate:.0f} tokens/s")

        with reporting(report):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(num_workers):
                    tasks.create_task(work())
                if pool.stepper is not None:
                    await self._drive(pool.stepper, pool)

    async def _drive(self, stepper: Stepper, pool: EnginePool) -> None:
        """Have the engine sample until every response has ended."""

        def is_settled(_: bool) -> bool:
            return self._num_sampling == pool.num_in_flight

        driver = Driver(stepper, pool, is_settled, asyncio.Event(), awaits_scores=False)
        while self._num_sampling:
            await driver.drive(BURST)

    def _jobs(self, journals: Sequence[SampleJournal]) -> list[_Job]:
        missing: list[_Job] = []
        affinity = 0
        for eval_set, journal in zip(self._sets, journals, strict=True):
            for prompt in eval_set.prompts:
                affinity -= 1  # numbers of its own: those of groups may be in use
                missing += [
                    _Job(journal, eval_set.name, prompt, index, eval_set.sampling, affinity)
                    for index in range(eval_set.sampling.samples_per_prompt)
                    if (prompt.prompt_id, index) not in journal.samples
                ]
        return missing

    def _count(self, part: Completion) -> None:
        self._num_tokens += len(part.token_ids)
        self._num_sampling -= part.finish_reason is not FinishReason.ABORT

    async def _make(self, pool: EnginePool, job: _Job, started_s: float) -> None:
        prompt, sampling = job.prompt, job.sampling
        completion = await pool.generate(
            prompt.token_ids,
            SamplingSettings(
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_response_tokens,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sample_seed(self._config.seed, job.set_name, prompt.prompt_id, job.index),
            ),
            label=f"evaluation of {job.set_name}, {prompt.prompt_id}, sample {job.index}",
            affinity=job.affinity,
            return_logprobs=False,
            on_part=self._count,
        )
        assert completion is not None, "evaluations are never drained"
        assert pool.version is not None, "a generated answer implies a version"
        text, score = await self._grader.grade(
            completion.token_ids, prompt, completion.finish_reason
        )
        sample = EvalSample(
            prompt_id=prompt.prompt_id,
            index=job.index,
            prompt=prompt.text,
            answer=prompt.answer,
            response=text,
            **score_fields(score),
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            version=pool.version,
            elapsed_s=time.monotonic() - started_s,
            source=prompt.source,
            row=prompt.row,
        )
        with _named_write_errors(job.journal.path):
            await job.journal.append(sample)
        self.num_samples += 1


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
    return eval_settings(
        name=eval_set.name,
        weights=weights,
        prompts=eval_set.prompts,
        sampling=eval_set.sampling,
        reward=eval_reward(config.reward, config.eval),
        seed=config.seed,
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
