"""The samples of an evaluation: every one is made once, graded, and kept as it finishes."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings, sample_seed
from bapo_megatron.evaluation.report import write_results
from bapo_megatron.evaluation.samples import EvalSample, SampleJournal
from bapo_megatron.evaluation.settings import EvalSet, settings_of
from bapo_megatron.evaluation.summary import summarise
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.rollout.buffer import PendingGroup, PendingSample
from bapo_megatron.rollout.episodes import Episodes, Interaction
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.rollout.replay import write_errors
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
    num_samples: int = 0
    """Samples finished so far, in all evaluations."""
    is_interrupted: bool = False
    """End at once, as if no server held the weights; what is finished is kept."""
    runs_beside: bool = False
    """Beside a rollout: it shows no progress, and waits where no server holds the weights, which
    the rollout asks for."""
    _begun: str | None = None
    """The evaluation whose files this process has begun."""

    async def evaluate(
        self, pool: EnginePool, moment: str, weights: str, *, resume: bool = False
    ) -> list[EvalResult] | None:
        """Score every set with the weights that the servers hold; None where none does any more.

        The sets are sampled together, in their order, so that servers do not wait for the longest
        responses of one set before they begin the next.

        Args:
            pool: The servers.
            moment: Begins the names of the results files, see ``samples_file``. An evaluation that
                is asked for again continues where it failed.
            weights: Names the weights; only their samples are continued.
            resume: Continue with the samples of an earlier process.

        Raises:
            RolloutError: Servers or an environment failed, or the results cannot be written.
            ResultsError: The files hold samples of something else.
            RewardError: Grading failed, or comparing answers (then inside an exception group).
        """
        config, is_resumed = self.config, resume or self._begun == moment
        journals: list[SampleJournal] = []
        with contextlib.ExitStack() as stack:
            for eval_set in self.sets:
                path = samples_file(config.run_dir, moment, eval_set.name)
                settings = settings_of(eval_set, config, weights)
                with _write_errors(path):
                    journals.append(await SampleJournal.open(path, settings, resume=is_resumed))
                stack.callback(journals[-1].close)
            self._begun = moment
            has_all = await self._sample(pool, journals)
            for journal in journals:
                with _write_errors(journal.path):
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
            results.append(await summarise_set(eval_set, groups, self.votes, config, weights))
        path = results_file(config.run_dir, moment)
        with _write_errors(path):
            write_results(results, path)
        return results

    async def _sample(self, pool: EnginePool, journals: Sequence[SampleJournal]) -> bool:
        """Make every sample that its journal lacks; returns whether servers had the weights."""
        version = pool.states.version
        assert version is not None, "weights come before an evaluation"
        began_s, num_before = time.monotonic(), sum(len(journal.samples) for journal in journals)
        started_s = began_s - max((j.elapsed_s for j in journals), default=0.0)
        waiting, places = self._missing(journals)
        num_missing = sum(len(group.samples) for group in waiting)

        async def keep(pending: PendingSample) -> None:
            _, journal = places[pending.sample.group_id]
            spans = pending.sample.versions
            assert all(span.version == version for span in spans), f"{spans} are not of {version}"
            sample = _eval_sample(pending, version, time.monotonic() - started_s)
            with _write_errors(journal.path):
                await journal.append(sample)
            self.num_samples += 1

        def plan(pending: PendingSample) -> GenerateRequest:
            return self._request_of(pending, places[pending.sample.group_id][0])

        episodes = Episodes(pool, self.interaction, self.grader, plan, on_score=keep)

        def num_made() -> int:
            return sum(len(journal.samples) for journal in journals) - num_before

        def report() -> None:
            done, total = num_before + num_made(), num_before + num_missing
            rate = describe_rate(episodes.generated_tokens, began_s)
            if not self.runs_beside:
                self.report(f"evaluation: {done}/{total} samples{rate}")

        # While some are graded or answered, others are sampled.
        max_underway = 2 * (self.config.rollout.max_connections or num_missing)
        if pool.stepper is not None:  # gets all: what it samples next must not depend on graders
            max_underway = num_missing
        num_begun = 0
        try:
            with reporting(report):
                while num_made() < num_missing:
                    lacks_weights = pool.states.needs_weights and not self.runs_beside
                    if lacks_weights or self.is_interrupted:
                        return False
                    while waiting and num_begun - num_made() < max_underway:
                        num_begun += len(waiting[0].samples)
                        episodes.advance([waiting.popleft()])
                    await episodes.wait_for_change()
            return True
        finally:
            await episodes.close()

    def _missing(
        self, journals: Sequence[SampleJournal]
    ) -> tuple[deque[PendingGroup], dict[int, tuple[EvalSet, SampleJournal]]]:
        """Missing samples, in the order of sets and prompts, and where those of a group belong."""
        groups: deque[PendingGroup] = deque()
        places: dict[int, tuple[EvalSet, SampleJournal]] = {}
        for eval_set, journal in zip(self.sets, journals, strict=True):
            for prompt in eval_set.prompts:
                # Negative: see ``EnginePool.generate``.
                group_id = -1 - len(places)
                group = PendingGroup.start(group_id, prompt, eval_set.sampling.samples_per_prompt)
                group.samples = [
                    pending
                    for pending in group.samples
                    if (prompt.prompt_id, pending.sample.index) not in journal.samples
                ]
                groups.append(group)
                places[group_id] = eval_set, journal
        return groups, places

    def _request_of(self, pending: PendingSample, eval_set: EvalSet) -> GenerateRequest:
        """The request for a sample's whole response."""
        sample, prompt_id, sampling = pending.sample, pending.prompt.prompt_id, eval_set.sampling
        return GenerateRequest(
            input_ids=pending.prompt.token_ids,
            sampling=SamplingSettings(
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_response_tokens,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sample_seed(self.config.seed, eval_set.name, prompt_id, sample.index),
            ),
            label=f"evaluation of {eval_set.name}, {prompt_id}, sample {sample.index}",
            order=(-sample.group_id, sample.index),
            return_logprobs=False,
        )


def _eval_sample(pending: PendingSample, version: int, elapsed_s: float) -> EvalSample:
    sample, prompt = pending.sample, pending.prompt
    assert pending.graded is not None, "it was scored"
    response, score = pending.graded
    return EvalSample(
        prompt_id=prompt.prompt_id,
        index=sample.index,
        prompt=prompt.text,
        answer=prompt.answer,
        response=response.text,
        turns=response.turns,
        state=pending.state,
        **asdict(score),
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

    ``moment`` is ``step_<n>``, ``start``, or empty for an evaluation without training.
    """
    return run_dir / "eval" / f"{moment}{'_' * bool(moment)}{set_name}.jsonl"


def results_file(run_dir: Path, moment: str) -> Path:
    """Where the scores of all sets are: ``eval/step_000020.json``, or ``eval.json``."""
    return run_dir / "eval" / f"{moment}.json" if moment else run_dir / "eval.json"


def _write_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    return write_errors("the evaluation results", path, "change run_dir")
