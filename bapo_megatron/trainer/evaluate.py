"""The commands ``eval`` and ``compare``: score a model, grade samples again, compare results."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from bapo_megatron.config.check import check_eval_config
from bapo_megatron.config.evaluation import EvalConfig
from bapo_megatron.config.load import parse_section
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.evaluation.compare import Comparison, compare_results
from bapo_megatron.evaluation.cost import SetCost, describe_cost
from bapo_megatron.evaluation.report import read_results, write_results
from bapo_megatron.evaluation.samples import EvalSample, parse_samples, read_samples
from bapo_megatron.evaluation.sets import load_sets
from bapo_megatron.evaluation.settings import (
    ResultsError,
    check_same,
    fingerprint,
    read_settings,
    settings_path,
)
from bapo_megatron.evaluation.summary import summarise
from bapo_megatron.files import atomic_write_bytes
from bapo_megatron.reward.base import RewardError
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.rollout.collector_client import CollectorClient
from bapo_megatron.rollout.evaluation import results_file, samples_file, settings_of
from bapo_megatron.rollout.grading import Grader
from bapo_megatron.telemetry.progress import ProgressLine
from bapo_megatron.types import Prompt

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.evaluation.sets import EvalSet
    from bapo_megatron.types import EvalResult

_T = TypeVar("_T")

NO_TRAINING = ""
"""The moment of an evaluation by the command."""


def evaluate_model(config: RunConfig) -> list[EvalResult]:
    """Score every set of ``config.eval`` with the weights in ``config.model.path``.

    Says first what it will cost. Starts servers unless ``rollout.servers`` names some, or every
    sample is there already; writes ``<run_dir>/eval.json`` and ``eval.md``.

    Raises:
        ValueError: No evaluation set is configured, a file is missing or unreadable, or the run
            directory holds samples that are not to be gone on with.
        RolloutError: A server failed.
    """
    check_eval_config(config)
    renderer = ChatRenderer(
        load_tokenizer(config.model.path), config.data.system_prompt, config.data.prompt_suffix
    )
    sets = load_sets(config.eval, renderer, config.data.max_prompt_tokens)
    model = (
        f"{config.model.path.name} ({config.model.dtype}, files {fingerprint(config.model.path)})"
    )
    costs = [_cost_of(eval_set, config, model) for eval_set in sets]
    for line in describe_cost(costs, config.eval.assumed_tokens_per_s):
        _say(line)
    if not any(cost.num_samples for cost in costs):
        results = _run(_summarise_finished(sets, config))
        write_results(results, results_file(config.run_dir, NO_TRAINING))
        return results
    config.run_dir.mkdir(parents=True, exist_ok=True)
    with ProgressLine() as progress:
        source = CollectorClient(config, on_progress=progress.update, for_training=False)
        try:
            source.start()
            return source.evaluate_model(model, resume=config.resume)
        finally:
            source.close()


def regrade(
    paths: Sequence[Path], config: RunConfig | None, out_dir: Path | None
) -> list[EvalResult]:
    """Grade samples with the present reward code, without a server.

    Args:
        paths: Complete samples files.
        config: Has the settings of rewards and scores; without it those that the samples were
            graded with, and the defaults.
        out_dir: Gets the samples with their new scores, ``eval.json`` and ``eval.md``, if given.

    Raises:
        ResultsError: A file cannot be used.
        OSError: A file cannot be read or written.
    """
    return [] if not paths else _run(_regrade(paths, config, out_dir))


def compare_files(
    first: Path, second: Path, *, num_resamples: int, seed: int, common_only: bool
) -> list[Comparison]:
    """Compare the results of two evaluations.

    Args:
        first: A: an ``eval.json``, a directory with one, or a samples file.
        second: B.
        num_resamples: Of the bootstrap.
        seed: Of the bootstrap.
        common_only: Leave out problems that only one of them has, instead of refusing.

    Raises:
        ResultsError: A file cannot be used, or they hold other problems.
        OSError: A file cannot be read.
    """
    return compare_results(
        _results_of(first),
        _results_of(second),
        k_values=EvalConfig().k_values,
        num_resamples=num_resamples,
        seed=seed,
        common_only=common_only,
    )


def _cost_of(eval_set: EvalSet, config: RunConfig, model: str) -> SetCost:
    """What is still to be done for a set.

    Raises:
        ResultsError: There are samples of another evaluation, or of one to be resumed.
    """
    path = samples_file(config.run_dir, NO_TRAINING, eval_set.name)
    num_done = 0
    if path.exists() and path.stat().st_size:
        if not config.resume:
            raise ResultsError(
                f"{path}: holds samples of an earlier evaluation; continue it with --resume, or "
                "change run_dir"
            )
        check_same(path, settings_of(eval_set, config, model))
        num_done = len(parse_samples(path, allow_torn=True))
    return SetCost(
        name=eval_set.name,
        num_prompts=len(eval_set.prompts),
        samples_per_prompt=eval_set.sampling.samples_per_prompt,
        num_done=num_done,
        max_response_tokens=eval_set.sampling.max_response_tokens,
    )


async def _summarise_finished(sets: Sequence[EvalSet], config: RunConfig) -> list[EvalResult]:
    """The results of an evaluation whose samples are all there."""
    async with RewardPool(config.reward.workers, config.reward.timeout_s) as votes:
        return [
            await summarise(
                eval_set.name,
                read_samples(samples_file(config.run_dir, NO_TRAINING, eval_set.name)),
                votes,
                k_values=config.eval.k_values,
                num_resamples=config.eval.bootstrap_resamples,
                seed=config.seed,
            )
            for eval_set in sets
        ]


async def _regrade(
    paths: Sequence[Path], config: RunConfig | None, out_dir: Path | None
) -> list[EvalResult]:
    results = []
    for path in paths:
        before = read_samples(path)
        settings = _settings_beside(path)
        evaluation = config.eval if config else EvalConfig()
        if config is not None:
            rewards = config.reward
        else:
            place = str(settings_path(path))
            rewards = parse_section(RewardConfig, settings.get("reward", {}), place)
        with ProgressLine() as progress:
            progress.update(f"grading {sum(map(len, before)):,} samples of {path}")
            async with RewardPool(rewards.workers, rewards.timeout_s) as pool:
                # Nothing is decoded, so that no tokenizer is needed.
                after = await _grade_again(Grader(None, pool), before)
                result = await summarise(
                    str(settings.get("name", path.stem)),
                    after,
                    pool,
                    k_values=evaluation.k_values,
                    num_resamples=evaluation.bootstrap_resamples,
                    seed=config.seed if config else 0,
                )
        results.append(result)
        _say(f"{path}: {_describe_changes(before, after)}")
        if out_dir is not None:
            lines = b"".join(sample.to_line() for group in after for sample in group)
            atomic_write_bytes(out_dir / path.name, lines)
    if out_dir is not None:
        write_results(results, out_dir / "eval.json")
    return results


async def _grade_again(
    grader: Grader, groups: Sequence[Sequence[EvalSample]]
) -> list[list[EvalSample]]:
    async def grade(sample: EvalSample) -> EvalSample:
        prompt = Prompt(
            prompt_id=sample.prompt_id,
            token_ids=(),
            answer=sample.answer,
            text=sample.prompt,
            source=sample.source,
            row=sample.row,
        )
        score = await grader.grade_text(sample.response, prompt)
        return replace(
            sample,
            extracted=score.extracted,
            reward=score.reward,
            answer_found=score.answer_found,
            timed_out=score.timed_out,
        )

    async with asyncio.TaskGroup() as tasks:
        graded = [[tasks.create_task(grade(sample)) for sample in group] for group in groups]
    return [[task.result() for task in group] for group in graded]


def _describe_changes(
    before: Sequence[Sequence[EvalSample]], after: Sequence[Sequence[EvalSample]]
) -> str:
    changes = [
        new.reward - old.reward
        for old_group, new_group in zip(before, after, strict=True)
        for old, new in zip(old_group, new_group, strict=True)
    ]
    num_up, num_down = sum(c > 0 for c in changes), sum(c < 0 for c in changes)
    return f"{len(changes):,} samples graded again, {num_up:,} rewards rose, {num_down:,} fell"


def _results_of(path: Path) -> list[EvalResult]:
    """Results as they were written, or those of a samples file with its recorded rewards."""
    if path.is_dir():
        path = path / "eval.json"
    if path.suffix != ".jsonl":
        return read_results(path)

    async def count() -> EvalResult:
        defaults = RewardConfig()
        async with RewardPool(defaults.workers, defaults.timeout_s) as votes:
            return await summarise(
                str(_settings_beside(path).get("name", path.stem)),
                read_samples(path),
                votes,
                k_values=EvalConfig().k_values,
                num_resamples=EvalConfig().bootstrap_resamples,
                seed=0,
            )

    return [_run(count())]


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` to its end; what a reward function does wrong is one line.

    Raises:
        ResultsError: Grading failed.
    """
    try:
        return asyncio.run(work)
    except* RewardError as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise ResultsError(str(error)) from error


def _settings_beside(path: Path) -> dict[str, Any]:
    beside = settings_path(path)
    return read_settings(beside) if beside.exists() else {}


def _say(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, soft_wrap=True, markup=False)
