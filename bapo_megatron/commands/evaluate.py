"""``bapo-megatron eval``: score a model directory, or saved samples, without a trainer."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bapo_megatron.commands.options import OverridesArgument, load
from bapo_megatron.config.check import check_eval_config, check_rewards
from bapo_megatron.config.evaluation import EvalConfig, eval_reward
from bapo_megatron.config.load import parse_section
from bapo_megatron.config.reward import BUILT_IN_FUNCTIONS, RewardConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.engine.load import load_kind
from bapo_megatron.evaluation.results import print_results, summarise, votes_pool, write_results
from bapo_megatron.evaluation.samples import (
    EvalSample,
    EvalSet,
    ResultsError,
    check_same,
    comparable_reward,
    fingerprint,
    load_sets,
    read_samples,
    settings_beside,
    settings_of,
    settings_path,
    write_settings,
)
from bapo_megatron.policy.adapters import ADAPTER_CONFIG_NAME, with_adapter
from bapo_megatron.reward.base import Response, SampleFacts
from bapo_megatron.reward.composition import Rewards
from bapo_megatron.rollout.client import CollectorClient
from bapo_megatron.rollout.evaluation import results_file, samples_file
from bapo_megatron.runtime.files import atomic_write_bytes
from bapo_megatron.runtime.processes import run_async
from bapo_megatron.telemetry.console import ProgressLine, say, uncut_console
from bapo_megatron.telemetry.run_dir import run_dir_locked
from bapo_megatron.types import EvalResult


def command(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="YAML file of the run; optional with --from."),
    ] = None,
    overrides: OverridesArgument = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an evaluation; short for resume=true.")
    ] = False,
    samples: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Regrade these saved samples without a server; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --from: directory for the new scores.")
    ] = None,
) -> None:
    """Evaluate the model on the configured sets, or regrade saved samples."""
    if out is not None and not samples:
        raise typer.BadParameter("--out needs --from; an evaluation writes into its run_dir")
    if resume and samples:
        raise typer.BadParameter("--from samples nothing, so there is nothing to --resume")
    run_config = None if config is None else load(config, overrides, resume=resume)
    if samples:
        results = regrade(samples, run_config, out)
    elif run_config is not None:
        results = evaluate_model(run_config)
    else:
        raise typer.BadParameter("give CONFIG, or --from with a samples file")
    print_results(results, uncut_console())


def evaluate_model(config: RunConfig) -> list[EvalResult]:
    """Score every set of ``config.eval`` with the weights of ``config.model``.

    Announces the cost first. Starts servers unless ``rollout.servers`` names some, or every sample
    exists already; writes ``<run_dir>/eval.json`` and ``eval.md``.

    Raises:
        ValueError: The configuration, a file, or the run directory cannot be used.
        RolloutError: A server failed.
    """
    check_eval_config(config)
    config = with_adapter(config.without_router_replay())
    load_kind(config.rollout.engine).check(config)
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
    renderer = ChatRenderer(tokenizer, config.data, config.rollout)
    sets = load_sets(config, renderer)
    files = fingerprint(config.model.path)
    model = f"{config.model.path.name} ({config.model.dtype}, files {files})"
    if (adapter := config.model.lora.path) is not None:
        model += f" with {adapter.name} (files {fingerprint(adapter, ADAPTER_CONFIG_NAME)})"
    with run_dir_locked(config.run_dir, "eval"):
        if not _announce(sets, config, model):
            results = run_async(_summarise_finished(sets, config, model))
            write_results(results, results_file(config.run_dir, ""))
            return results
        with (
            ProgressLine() as progress,
            closing(
                CollectorClient(config, on_progress=progress.update, for_training=False)
            ) as source,
        ):
            source.launch()
            return source.evaluate_model(model, resume=config.resume)


def _announce(sets: Sequence[EvalSet], config: RunConfig, model: str) -> int:
    """Print how many samples are left, and their maximum tokens; return the samples left."""
    total_samples = total_tokens = 0
    for eval_set in sets:
        num_prompts, sampling = len(eval_set.prompts), eval_set.sampling
        num_done = _num_done(eval_set, config, model)
        num_left = num_prompts * sampling.samples_per_prompt - num_done
        num_tokens = num_left * sampling.max_response_tokens
        done = f" − {num_done:,} done" if num_done else ""
        say(
            f"{eval_set.name}: {num_prompts:,} problems × {sampling.samples_per_prompt} samples"
            f"{done} = {num_left:,}, at most {num_tokens:,} tokens"
        )
        total_samples, total_tokens = total_samples + num_left, total_tokens + num_tokens
    say(f"total: {total_samples:,} samples, at most {total_tokens:,} tokens")
    return total_samples


def _num_done(eval_set: EvalSet, config: RunConfig, model: str) -> int:
    """Count a set's saved samples; refuse those of another evaluation, or any without a resume."""
    path = samples_file(config.run_dir, "", eval_set.name)
    if not path.exists() or not path.stat().st_size:
        return 0
    if not config.resume:
        raise ResultsError(
            f"{path}: holds samples of an earlier evaluation; continue it with --resume, or "
            "change run_dir"
        )
    check_same(path, settings_of(eval_set, config, model))
    return path.read_bytes().count(b"\n")


async def _summarise_finished(
    sets: Sequence[EvalSet], config: RunConfig, model: str
) -> list[EvalResult]:
    """The results of an evaluation whose samples all exist."""
    results = []
    async with votes_pool(config.reward) as votes:
        for eval_set in sets:
            groups = read_samples(samples_file(config.run_dir, "", eval_set.name))
            settings = settings_of(eval_set, config, model)
            result = await summarise(
                eval_set.name, groups, votes, config.eval, settings=settings, seed=config.seed
            )
            results.append(result)
    return results


def regrade(
    paths: Sequence[Path], config: RunConfig | None, out_dir: Path | None
) -> list[EvalResult]:
    """Grade the saved samples of complete files with the current reward code.

    Without ``config``, the recorded reward functions grade, and other settings have their defaults.
    ``out_dir`` gets the samples with their new scores, ``eval.json`` and ``eval.md``.

    Raises:
        ResultsError: A file cannot be used.
        RewardError: Grading failed.
        OSError: A file cannot be read or written.
    """
    for path in paths:
        if out_dir is not None and os.path.realpath(out_dir) == os.path.realpath(path.parent):
            raise ResultsError(f"--out: would replace {path}; give another directory")
    settings = [settings_beside(path) for path in paths]
    set_names = [str(s.get("name", path.stem)) for s, path in zip(settings, paths, strict=True)]
    for names in (set_names, [path.name for path in paths]):
        if len(set(names)) < len(names):
            raise ResultsError(
                f"--from: must be different sets, got {', '.join(names)}; give each once"
            )
    results = []
    for name, path, sampling in zip(set_names, paths, settings, strict=True):
        result, samples = run_async(_regrade(name, path, sampling, config))
        results.append(result)
        if out_dir is not None:
            atomic_write_bytes(out_dir / path.name, b"".join(s.to_line() for s in samples))
            if result.settings:
                write_settings(out_dir / path.name, result.settings)
    if out_dir is not None:
        write_results(results, out_dir / "eval.json")
    return results


async def _regrade(
    name: str, path: Path, settings: dict[str, Any], config: RunConfig | None
) -> tuple[EvalResult, list[EvalSample]]:
    groups = read_samples(path)
    if config is not None:
        rewards = eval_reward(config.reward, config.eval)
        check_rewards(rewards.functions)
    else:
        rewards = _recorded_rewards(settings, str(settings_path(path)))
    if settings:
        settings["reward"] = comparable_reward(rewards)
    with ProgressLine() as progress:
        progress.update(f"grading {sum(map(len, groups)):,} samples of {path}")
        async with Rewards(rewards) as functions, votes_pool(rewards) as votes:
            await functions.start()
            functions.require_single()
            async with asyncio.TaskGroup() as tasks:
                grading = [
                    [tasks.create_task(_grade_again(functions, sample)) for sample in group]
                    for group in groups
                ]
            regraded = [[task.result() for task in group] for group in grading]
            result = await summarise(
                name,
                regraded,
                votes,
                config.eval if config else EvalConfig(),
                settings=settings,
                seed=config.seed if config else settings.get("seed", 0),
            )
    old, new = ([sample for group in g for sample in group] for g in (groups, regraded))
    num_changed = sum(a.reward != b.reward for a, b in zip(old, new, strict=True))
    say(f"{path}: regraded {len(new):,} samples, {num_changed:,} rewards changed")
    return result, new


def _recorded_rewards(settings: dict[str, Any], place: str) -> RewardConfig:
    """The reward section saved with samples, which may come from anyone.

    It must not name custom code, and its limits and sandbox are ignored.
    """
    rewards = parse_section(RewardConfig, settings.get("reward", {}), place)
    for number, entry in enumerate(rewards.functions):
        if entry.function not in BUILT_IN_FUNCTIONS:
            raise ResultsError(
                f"{place}: reward.functions[{number}] is {entry.url or entry.function}: custom "
                "reward code is not run from a samples file; pass a CONFIG that names it"
            )
    limits = ("workers", "timeout_s", "memory_limit_mb", "program")
    return rewards.model_copy(update={name: getattr(RewardConfig(), name) for name in limits})


async def _grade_again(rewards: Rewards, sample: EvalSample) -> EvalSample:
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
