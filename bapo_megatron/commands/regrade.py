"""Grading samples again without a server: ``eval --from``, and ``compare`` of samples files."""

import asyncio
import os
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bapo_megatron.config.check import check_rewards
from bapo_megatron.config.evaluation import EvalConfig, eval_reward
from bapo_megatron.config.load import parse_section
from bapo_megatron.config.reward import BUILT_IN_FUNCTIONS, RewardConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.errors import first_cause
from bapo_megatron.evaluation.report import write_results
from bapo_megatron.evaluation.samples import EvalSample, read_samples
from bapo_megatron.evaluation.settings import (
    ResultsError,
    comparable_reward,
    read_settings,
    settings_path,
    write_settings,
)
from bapo_megatron.evaluation.summary import summarise, votes_pool
from bapo_megatron.reward.base import Response, RewardError, SampleFacts
from bapo_megatron.reward.composition import Rewards
from bapo_megatron.runtime.files import atomic_write_bytes
from bapo_megatron.runtime.processes import run_async
from bapo_megatron.telemetry.console import ProgressLine, say
from bapo_megatron.types import EvalResult


def regrade(
    paths: Sequence[Path], config: RunConfig | None, out_dir: Path | None
) -> list[EvalResult]:
    """Grade samples again, with the reward code as it is now.

    Args:
        paths: Complete samples files.
        config: Settings of rewards and scores; by default the functions that the samples were
            graded with, and the schema's defaults.
        out_dir: If given, gets the samples with their new scores, ``eval.json`` and ``eval.md``.

    Raises:
        ResultsError: A file cannot be used.
        OSError: A file cannot be read or written.
    """
    for path in paths:
        if not path.is_file():
            raise ResultsError(f"{path}: no such file; give a .jsonl of samples")
        if out_dir is not None and os.path.realpath(out_dir) == os.path.realpath(path.parent):
            raise ResultsError(
                f"--out: would replace {path}, which is graded again; give another directory"
            )
    for number, path in enumerate(paths):
        if any(map(path.samefile, paths[:number])):
            raise ResultsError(f"--from: must be different files, got {path} twice; leave one out")
        if out_dir is not None and path.name in [other.name for other in paths[:number]]:
            raise ResultsError(
                f"--out: files must have different names, got two {path.name}; grade them one by "
                "one"
            )
    return run_graded(_regrade(paths, config, out_dir))


async def _regrade(
    paths: Sequence[Path], config: RunConfig | None, out_dir: Path | None
) -> list[EvalResult]:
    results: list[EvalResult] = []
    for path in paths:
        before = read_samples(path)
        settings = settings_beside(path)
        evaluation = config.eval if config else EvalConfig()
        if config is not None:
            rewards = eval_reward(config.reward, config.eval)
            check_rewards(rewards.functions)
        else:
            rewards = _recorded_rewards(settings, str(settings_path(path)))
        if settings:
            settings["reward"] = comparable_reward(rewards)
        with ProgressLine() as progress:
            progress.update(f"grading {sum(map(len, before)):,} samples of {path}")
            async with Rewards(rewards) as functions, votes_pool(rewards) as votes:
                await functions.start()
                functions.require_single()
                after = await _grade_again(functions, before)
                result = await summarise(
                    str(settings.get("name", path.stem)),
                    after,
                    votes,
                    settings=settings,
                    k_values=evaluation.k_values,
                    num_resamples=evaluation.bootstrap_resamples,
                    seed=config.seed if config else settings.get("seed", 0),
                )
        if result.name in {earlier.name for earlier in results}:
            raise ResultsError(
                f"{settings_path(path)}: 'name' must differ from those of the files before, got "
                f"{result.name}; grade them one by one"
            )
        results.append(result)
        say(f"{path}: {_describe_changes(before, after)}")
        if out_dir is not None:
            lines = b"".join(sample.to_line() for group in after for sample in group)
            atomic_write_bytes(out_dir / path.name, lines)
            if settings:
                write_settings(out_dir / path.name, settings)
    if out_dir is not None:
        write_results(results, out_dir / "eval.json")
    return results


def _recorded_rewards(settings: dict[str, Any], place: str) -> RewardConfig:
    """The reward section beside samples, which may come from anywhere.

    It may name no code; how much of this machine grading may use is not for it to say.
    """
    rewards = parse_section(RewardConfig, settings.get("reward", {}), place)
    for number, entry in enumerate(rewards.functions):
        if entry.function not in BUILT_IN_FUNCTIONS:
            raise ResultsError(
                f"{place}: reward.functions[{number}] is {entry.url or entry.function}, which "
                "samples alone may not run; give the CONFIG that may run it"
            )
    own = RewardConfig()
    limits = {name: getattr(own, name) for name in ("workers", "timeout_s", "memory_limit_mb")}
    return rewards.model_copy(update=limits)


async def _grade_again(
    rewards: Rewards, groups: Sequence[Sequence[EvalSample]]
) -> list[list[EvalSample]]:
    async def grade(sample: EvalSample) -> EvalSample:
        facts = SampleFacts(
            prompt_id=sample.prompt_id,
            source=sample.source,
            prompt=sample.prompt,
            finish_reason=sample.finish_reason.value,
            num_tokens=sample.num_tokens + sample.num_environment_tokens,
            num_turns=1 + len(sample.turns) // 2,
            environment_tokens=sample.num_environment_tokens,
        )
        response = Response(
            sample.response, sample.answer, facts, sample.row, sample.turns, sample.state
        )
        return replace(sample, **asdict(await rewards.score(response)))

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


def run_graded[T](work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end; the failure of a reward function becomes one line.

    Raises:
        ResultsError: Grading failed.
    """
    try:
        return run_async(work)
    except* RewardError as errors:
        error = first_cause(errors)
        raise ResultsError(str(error)) from error


def settings_beside(path: Path) -> dict[str, Any]:
    """The settings beside a samples file; empty if there are none."""
    beside = settings_path(path)
    return read_settings(beside) if os.path.lexists(beside) else {}
