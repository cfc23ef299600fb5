"""``bapo-megatron eval``: score a model directory without a trainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.commands.options import OverridesArgument, load
from bapo_megatron.commands.regrade import regrade, run_graded
from bapo_megatron.config.check import check_eval_config
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.engine.load import load_kind
from bapo_megatron.evaluation.report import print_results, write_results
from bapo_megatron.evaluation.samples import iterate_samples, read_samples
from bapo_megatron.evaluation.settings import (
    EvalSet,
    ResultsError,
    check_same,
    fingerprint,
    load_sets,
    settings_of,
)
from bapo_megatron.evaluation.summary import votes_pool
from bapo_megatron.rollout.client import CollectorClient
from bapo_megatron.rollout.evaluation import results_file, samples_file, summarise_set
from bapo_megatron.telemetry.console import ProgressLine, say, uncut_console
from bapo_megatron.telemetry.run_lock import run_dir_locked
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
        typer.Option("--from", help="Grade these samples again, without a server; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --from: directory for the new scores.")
    ] = None,
) -> None:
    """Evaluate model.path on the configured sets, or grade earlier samples again."""
    if out is not None and not samples:
        raise typer.BadParameter("--out needs --from; an evaluation writes into its run_dir")
    if config is None and not samples:
        raise typer.BadParameter("give CONFIG, or --from with a samples file")
    if resume and samples:
        raise typer.BadParameter("--from samples nothing, so there is nothing to --resume")
    given = [*(overrides or []), *(["resume=true"] if resume else [])]
    run_config = None if config is None else load(config, given)
    if samples:
        results = regrade(samples, run_config, out)
    else:
        assert run_config is not None, "refused above"
        results = evaluate_model(run_config)
    print_results(results, uncut_console())


def evaluate_model(config: RunConfig) -> list[EvalResult]:
    """Score every set of ``config.eval`` with the weights in ``config.model.path``.

    Announces the cost first. Starts servers unless ``rollout.servers`` names some, or every sample
    exists already; writes ``<run_dir>/eval.json`` and ``eval.md``.

    Raises:
        ValueError: No evaluation set is configured, a file is missing or unreadable, or the run
            directory is in use, or holds samples that this evaluation may not continue.
        RolloutError: A server failed.
    """
    check_eval_config(config)
    load_kind(config.rollout.engine).check(config)
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
    renderer = ChatRenderer(tokenizer, config.data)
    sets = load_sets(config.eval, renderer, config.data.max_prompt_tokens)
    files = fingerprint(config.model.path)
    model = f"{config.model.path.name} ({config.model.dtype}, files {files})"
    with run_dir_locked(config.run_dir, "eval"):
        if _announce(sets, config, model):
            return _sample(config, model)
        results = run_graded(_summarise_finished(sets, config, model))
        write_results(results, results_file(config.run_dir, ""))
        return results


def _sample(config: RunConfig, model: str) -> list[EvalResult]:
    """Sample what is missing, then score every set."""
    with ProgressLine() as progress:
        source = CollectorClient(config, on_progress=progress.update, for_training=False)
        try:
            source.launch()
            return source.evaluate_model(model, resume=config.resume)
        finally:
            source.close()


def _announce(sets: Sequence[EvalSet], config: RunConfig, model: str) -> int:
    """Say how many samples are left, and tokens at most; return the number of samples."""
    all_samples = all_tokens = 0
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
        all_samples, all_tokens = all_samples + num_left, all_tokens + num_tokens
    say(f"in all {all_samples:,} samples, at most {all_tokens:,} tokens")
    return all_samples


def _num_done(eval_set: EvalSet, config: RunConfig, model: str) -> int:
    """Count a set's samples; refuse those of another evaluation, or of one to be resumed."""
    path = samples_file(config.run_dir, "", eval_set.name)
    if not path.exists() or not path.stat().st_size:
        return 0
    if not config.resume:
        raise ResultsError(
            f"{path}: holds samples of an earlier evaluation; continue it with --resume, or "
            "change run_dir"
        )
    check_same(path, settings_of(eval_set, config, model))
    return sum(1 for _ in iterate_samples(path, allow_torn=True))


async def _summarise_finished(
    sets: Sequence[EvalSet], config: RunConfig, model: str
) -> list[EvalResult]:
    """The results of an evaluation whose samples all exist."""
    results = []
    async with votes_pool(config.reward) as votes:
        for eval_set in sets:
            groups = read_samples(samples_file(config.run_dir, "", eval_set.name))
            results.append(await summarise_set(eval_set, groups, votes, config, model))
    return results
