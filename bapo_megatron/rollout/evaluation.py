"""Evaluations, also beside a rollout (``eval.overlap``); finished samples are kept at once."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings, sample_seed
from bapo_megatron.evaluation.results import summarise, write_results
from bapo_megatron.evaluation.samples import EvalSample, EvalSet, SampleJournal, settings_of
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.rollout.buffer import Episode, PendingGroup
from bapo_megatron.rollout.episodes import Episodes, Interaction
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.rollout.messages import Evaluate
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.runtime.files import naming
from bapo_megatron.telemetry.console import describe_rate, reporting
from bapo_megatron.types import EvalResult


@dataclass(eq=False)
class Evaluator:
    """Samples n responses to each prompt of each set."""

    interaction: Interaction
    grader: Grader
    votes: RewardPool
    sets: Sequence[EvalSet]
    config: RunConfig
    report: Callable[[str], None]
    is_interrupted: bool = False
    """End at once, as if no server held the weights; finished samples are kept."""
    _runs_beside: bool = False
    """Beside a rollout: show no progress, and leave it to the rollout to ask for lost weights."""
    _task: asyncio.Task[list[EvalResult] | None] | None = None
    """The evaluation that began beside a rollout."""
    _begun: str | None = None
    """``Evaluate.moment`` of an unfinished evaluation that this process began."""

    def begin(self, pool: EnginePool, request: Evaluate) -> None:
        """Begin an evaluation beside the rollout."""
        self._runs_beside = True
        self._task = asyncio.create_task(self.evaluate(pool, request))

    async def finish(self) -> None:
        """Wait for the evaluation beside the rollout, for which nobody syncs weights any more."""
        self._runs_beside = False
        if self._task is not None:
            await asyncio.wait([self._task])

    async def complete(self, pool: EnginePool, request: Evaluate) -> list[EvalResult] | None:
        """Return what ``evaluate`` does, of the evaluation that began beside the rollout if any."""
        await self.finish()
        beside, self._task = self._task, None
        return await (beside or self.evaluate(pool, request))

    async def close(self) -> None:
        """Cancel the evaluation beside the rollout."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def evaluate(self, pool: EnginePool, request: Evaluate) -> list[EvalResult] | None:
        """Score every set with the weights that the servers hold; None once none holds them.

        The sets are sampled together, so that no server waits for the longest responses of one. A
        second call for the same ``moment`` continues where the first one failed.

        Raises:
            RolloutError: Servers or an environment failed.
            ResultsError: The files hold samples of other weights or settings.
            RewardError: Grading failed, or comparing answers (then inside an exception group).
            OSError: The results cannot be written.
        """
        config, moment, weights = self.config, request.moment, request.weights
        is_resumed = request.resume or self._begun == moment
        journals: list[SampleJournal] = []
        with contextlib.ExitStack() as stack:
            for eval_set in self.sets:
                path = samples_file(config.run_dir, moment, eval_set.name)
                settings = settings_of(eval_set, config, weights)
                journals.append(await SampleJournal.open(path, settings, resume=is_resumed))
                stack.callback(journals[-1].close)
            self._begun = moment
            has_all = await self._sample(pool, journals)
            for journal in journals:
                with naming(journal.path):
                    journal.sync()
        if not has_all:
            return None
        self._begun = None
        results = []
        for eval_set, journal in zip(self.sets, journals, strict=True):
            self.report(f"evaluation of {eval_set.name}: comparing answers")
            indices = range(eval_set.sampling.samples_per_prompt)
            groups = [
                [journal.samples[prompt.prompt_id, index] for index in indices]
                for prompt in eval_set.prompts
            ]
            settings = settings_of(eval_set, config, weights)
            result = await summarise(
                eval_set.name, groups, self.votes, config.eval, settings=settings, seed=config.seed
            )
            results.append(result)
        write_results(results, results_file(config.run_dir, moment))
        return results

    async def _sample(self, pool: EnginePool, journals: Sequence[SampleJournal]) -> bool:
        """Generate all missing samples; return False once no server holds the weights."""
        version = pool.states.version
        assert version is not None, "weights come before an evaluation"
        began_s, num_before = time.monotonic(), sum(len(journal.samples) for journal in journals)
        started_s = began_s - max((journal.elapsed_s for journal in journals), default=0.0)
        waiting, owners = self._missing(journals)
        total = num_before + sum(len(group.episodes) for group in waiting)

        async def keep(episode: Episode) -> None:
            _, journal = owners[episode.group_id]
            spans = episode.record.versions
            assert all(span.version == version for span in spans), f"{spans} are not of {version}"
            journal.append(_eval_sample(episode, version, time.monotonic() - started_s))

        def plan(episode: Episode) -> GenerateRequest:
            return self._request_of(episode, owners[episode.group_id][0])

        episodes = Episodes(pool, self.interaction, self.grader, plan, on_score=keep)

        def num_done() -> int:
            return sum(len(journal.samples) for journal in journals)

        def report() -> None:
            rate = describe_rate(episodes.generated_tokens, began_s)
            if not self._runs_beside:
                self.report(f"evaluation: {num_done()}/{total} samples{rate}")

        # Keep sampling while others wait for graders or environments.
        max_in_progress = 2 * (self.config.rollout.max_connections or total)
        if pool.stepper is not None:  # its next step must not depend on graders
            max_in_progress = total
        num_begun = num_before
        try:
            with reporting(report):
                while num_done() < total:
                    needs_weights = pool.states.needs_weights and not self._runs_beside
                    if needs_weights or self.is_interrupted:
                        return False
                    while waiting and num_begun - num_done() < max_in_progress:
                        num_begun += len(waiting[0].episodes)
                        episodes.advance([waiting.popleft()])
                    await episodes.wait_for_change()
            return True
        finally:
            await episodes.close()

    def _missing(
        self, journals: Sequence[SampleJournal]
    ) -> tuple[deque[PendingGroup], dict[int, tuple[EvalSet, SampleJournal]]]:
        """Return the missing samples by set and prompt, and the set and journal of each group."""
        groups: deque[PendingGroup] = deque()
        owners: dict[int, tuple[EvalSet, SampleJournal]] = {}
        for eval_set, journal in zip(self.sets, journals, strict=True):
            for prompt in eval_set.prompts:
                # Negative: see ``EnginePool.generate``.
                group_id = -1 - len(owners)
                group = PendingGroup.start(group_id, prompt, eval_set.sampling.samples_per_prompt)
                group.episodes = [
                    episode
                    for episode in group.episodes
                    if (prompt.prompt_id, episode.index) not in journal.samples
                ]
                groups.append(group)
                owners[group_id] = eval_set, journal
        return groups, owners

    def _request_of(self, episode: Episode, eval_set: EvalSet) -> GenerateRequest:
        """The request for an episode's whole response."""
        prompt, index, sampling = episode.prompt, episode.index, eval_set.sampling
        return GenerateRequest(
            input_ids=prompt.token_ids,
            sampling=SamplingSettings(
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_response_tokens,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sample_seed(self.config.seed, eval_set.name, prompt.prompt_id, index),
            ),
            label=f"evaluation of {eval_set.name}, {prompt.prompt_id}, sample {index}",
            order=(-episode.group_id, index),
            return_logprobs=self.config.rollout.agent is not None,  # which may ask
        )


def _eval_sample(episode: Episode, version: int, elapsed_s: float) -> EvalSample:
    sample, prompt = episode.finished(), episode.prompt
    assert episode.graded is not None, "only scored samples are kept"
    response, score = episode.graded
    return EvalSample(
        prompt_id=prompt.prompt_id,
        index=episode.index,
        prompt=prompt.text,
        answer=prompt.answer,
        response=response.text,
        turns=response.turns,
        state=episode.state,
        **asdict(score),
        num_tokens=sample.episode_sampled,
        num_environment_tokens=sample.episode_tokens - sample.episode_sampled,
        finish_reason=sample.finish_reason,
        version=version,
        elapsed_s=elapsed_s,
        source=prompt.source,
        row=prompt.row,
    )


def samples_file(run_dir: Path, moment: str, set_name: str) -> Path:
    """Return ``eval/step_000020_aime24.jsonl``; without a moment ``eval/aime24.jsonl``."""
    return run_dir / "eval" / f"{moment}{'_' * bool(moment)}{set_name}.jsonl"


def results_file(run_dir: Path, moment: str) -> Path:
    """Return the file with the scores of all sets: ``eval/step_000020.json``, or ``eval.json``."""
    return run_dir / "eval" / f"{moment}.json" if moment else run_dir / "eval.json"
