"""What a run reports beside its training metrics: costs, samples for trackers, how it ended."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.settings import public_settings
from bapo_megatron.data.dump import dump_path, read_batch, texts_by_sample
from bapo_megatron.rollout.evaluation import results_file
from bapo_megatron.runtime.distributed import ProcessGroups, gather_objects
from bapo_megatron.runtime.files import atomic_write_text
from bapo_megatron.runtime.gpus import peak_flops, recognize_gpu
from bapo_megatron.runtime.versions import own_software
from bapo_megatron.telemetry.console import say, show
from bapo_megatron.telemetry.sinks import MetricsSinks, ShowRow
from bapo_megatron.trainer.checkpointing import RunProgress
from bapo_megatron.types import EvalResult

_NUM_ROWS = 8
_MAX_CHARS = 4000
"""Length of a prompt, and of a response, in the table of samples."""


def open_sinks(config: RunConfig, progress: RunProgress, show_row: ShowRow | None) -> MetricsSinks:
    """Open the metrics sinks of a run, from the first step that is not reported."""
    return MetricsSinks(
        config.run_dir,
        config.name,
        config.log,
        first_step=progress.first_unreported,
        total_steps=config.train.steps,
        settings=public_settings(config) | own_software().settings(),
        sample_rows=partial(sample_rows, config.replay.dumps or config.run_dir / "rollouts"),
        show_row=show_row,
    )


def find_peak_flops(config: RunConfig, groups: ProcessGroups) -> float | None:
    """Return the peak FLOP/s of all ranks' GPUs together; None on a CPU or an unknown GPU."""
    if config.log.peak_tflops is not None:
        return config.log.peak_tflops * 1e12 * groups.world_size
    if groups.device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(groups.device)
    gpu = recognize_gpu(name)
    if gpu is None:
        if groups.rank == 0:
            say(f"the peak of '{name}' is not known: set log.peak_tflops for throughput/mfu_share")
        return None
    return groups.world_size * peak_flops(gpu, config.model.dtype, config.megatron.fp8)


def cost_metrics(
    values: Mapping[str, float], groups: ProcessGroups, peak: float | None
) -> dict[str, float]:
    """Return a step's times, memory, throughput and MFU over all ranks; {} except on rank 0.

    A collective of all ranks, whose ``values`` have the same phases.
    """
    measured = {n.removeprefix("time/"): s for n, s in values.items() if n.startswith("time/")}
    measured |= _memory(groups.device)
    gathered = gather_objects(list(measured.values()), groups)
    if gathered is None:
        return {}
    by_rank = torch.tensor(gathered, dtype=torch.float64)
    costs: dict[str, float] = {}
    reduced = {"min": by_rank.amin(0), "mean": by_rank.mean(0), "max": by_rank.amax(0)}
    for how, numbers in reduced.items():
        names = (f"ranks/{name}_{how}" for name in measured)
        costs |= dict(zip(names, numbers.tolist(), strict=True))
    training_s = costs["ranks/training_s_max"]
    costs["throughput/trained_tokens_per_s"] = values["train/trained_tokens"] / training_s
    if peak is not None:
        flops = values["train/forward_only_flops"] + values["train/forward_backward_flops"]
        costs["throughput/mfu_share"] = flops / (training_s * peak)
    return costs


def _memory(device: torch.device) -> dict[str, float]:
    """Return this process's memory now and, on a GPU, its peaks since the last call, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = {"host_bytes": float(pages * os.sysconf("SC_PAGE_SIZE"))}
    if device.type == "cuda":
        memory["cuda_allocated_bytes"] = float(torch.cuda.max_memory_allocated(device))
        memory["cuda_reserved_bytes"] = float(torch.cuda.max_memory_reserved(device))
        torch.cuda.reset_peak_memory_stats(device)
    return memory


def sample_rows(dumps: Path, step: int) -> list[dict[str, Any]]:
    """Return samples of a step, each as cells by column.

    They go from the lowest reward to the highest, evenly spaced by rank. Samples without text are
    left out, and long texts shortened. Raises ``DumpError``.
    """
    path = dump_path(dumps, step)
    try:
        texts, batch = texts_by_sample(path), read_batch(path)
    except FileNotFoundError:
        return []
    if texts is None:
        return []
    pairs = ((sample, texts.get((sample.group_id, sample.index))) for sample in batch.samples)
    ranked = sorted(((s, text) for s, text in pairs if text), key=lambda pair: pair[0].reward)
    last = min(_NUM_ROWS, len(ranked)) - 1
    return [
        {
            "step": step,
            "group": sample.group_id,
            "sample": sample.index,
            "reward": sample.reward,
            "tokens": sample.episode_sampled,
            "finish": sample.finish_reason.value,
            "prompt": _shortened(text.prompt_text),
            "response": _shortened("\n\n".join(text.turns) or text.response_text),
            "answer": text.answer,
        }
        for number in range(last + 1)
        for sample, text in [ranked[number * (len(ranked) - 1) // max(last, 1)]]
    ]


def _shortened(text: str) -> str:
    half = _MAX_CHARS // 2
    return text if len(text) <= _MAX_CHARS else f"{text[:half]}\n[…]\n{text[-half:]}"


def show_evaluation(results: Sequence[EvalResult]) -> None:
    """Print a line for each evaluation set."""
    for result in results:
        score = result.scores[0]
        show(
            f"evaluation of {result.name}: {score.name} {score.value:.1%} ({score.low:.1%} … "
            f"{score.high:.1%}) on {result.num_prompts} prompts ({result.wall_s:.1f} s)"
        )


def report_run(
    config: RunConfig, progress: RunProgress, phase_s: dict[str, float], trainer_gpus: int = 0
) -> None:
    """Write ``summary.json`` and print a table of it; ``phase_s`` is of this process only."""
    rate: float | None = None  # response tokens per second while batches were collected
    if config.has_engines:
        generation_s = progress.generation_s
        rate = progress.generated_tokens / generation_s if generation_s > 0 else 0.0
    gpus = trainer_gpus and trainer_gpus + _rollout_gpus(config)
    gpu_hours = gpus * sum(phase_s.values()) / 3600
    cost = config.log.gpu_hour_cost
    summary = {
        "name": config.name,
        "seed": config.seed,
        "steps": progress.finished_steps,
        "updates": progress.updates,
        "accuracy_before": progress.accuracy_before,
        "accuracy_after": progress.accuracy_after,
        "num_prompts": progress.num_prompts,
        "generated_tokens": int(progress.generated_tokens),
        "generated_tokens_per_s": rate,
        "gpu_hours": gpu_hours,
        "gpu_cost": None if cost is None else gpu_hours * cost,
        "phase_s": phase_s,
        **asdict(own_software()),
    }
    atomic_write_text(config.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    if config.log.console:
        show(_table(config, summary))
    if progress.updates == 0:
        say(
            "nothing was trained: all updates were skipped; see reward/mixed_groups, "
            "rollout/masked_token_share and train/nonfinite_tokens in "
            f"{config.run_dir / 'metrics.jsonl'}"
        )
    if config.log.console:
        for line in next_steps(config):
            show(line)


def _rollout_gpus(config: RunConfig) -> int:
    """Return the GPUs of the servers, as configured; 0 if they are the trainer's or on a CPU."""
    rollout = config.rollout
    if not rollout.has_own_gpus or not config.has_engines:
        return 0
    file = rollout.servers_file
    listed = rollout.servers if file is None else file.read_text().split()
    return (len(listed) or rollout.server.count) * rollout.server.tensor


def next_steps(config: RunConfig) -> list[str]:
    """Return next steps after a run, as lines: where the model is, and commands."""
    here, run = Path.cwd(), config.run_dir
    run = run.relative_to(here) if run.is_relative_to(here) else run
    scores = [results_file(run, name) for name in ("start", f"step_{config.train.steps:06d}")]
    commands = [["report", str(run)]]
    if config.checkpoint.at_end:
        sets = [] if config.eval.sets else ["eval.sets=[{path: FILE}]"]
        places = [f"model.path={run}/hf", f"run_dir={run}-eval"]
        commands.append(["eval", str(run / "config.yaml"), *places, *sets])
    if all(path.exists() for path in scores):
        commands.append(["compare", *map(str, scores)])
    model = [f"the trained model: {run}/hf"] if config.checkpoint.at_end else []
    return [*model, *(f"python -m bapo_megatron {shlex.join(words)}" for words in commands)]


def _table(config: RunConfig, summary: Mapping[str, Any]) -> Table:
    table = Table(title=f"{escape(str(config.run_dir))}, seed {config.seed}", show_header=False)
    score = "avg@k"
    for dataset in config.eval.sets[:1]:
        score = f"avg@{config.eval.sampling_of(dataset).samples_per_prompt}"
    table.add_column("what")
    table.add_column("value", justify="right")
    rows = [
        ("held-out prompts", "{}", summary["num_prompts"] or None),
        (f"{score} before", "{:.1%}", summary["accuracy_before"]),
        (f"{score} after", "[bold]{:.1%}[/bold]", summary["accuracy_after"]),
        ("steps", "{}", summary["steps"]),
        ("optimizer updates", "{}", summary["updates"]),
        ("generated tokens/s", "{:,.0f}", summary["generated_tokens_per_s"]),
        ("GPU-hours", "{:,.1f}", summary["gpu_hours"] or None),
        ("cost", "{:,.2f}", summary["gpu_cost"]),
    ]
    phases = ((n.replace("_", " "), round(s, 1) or None) for n, s in summary["phase_s"].items())
    rows += [(f"time: {name}", "{:.1f} s", seconds) for name, seconds in phases]
    for label, form, value in rows:
        if value is not None:
            table.add_row(label, form.format(value))
    return table
