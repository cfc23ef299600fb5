"""``bapo-megatron generate``: sample the training prompts without a trainer."""

from contextlib import closing
from typing import Annotated

import typer

from bapo_megatron.commands.options import ConfigArgument, OverridesArgument, load
from bapo_megatron.config.check import check_generate_config
from bapo_megatron.config.rollout import ReplayConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.scorers import DistillationConfig
from bapo_megatron.config.section import with_values
from bapo_megatron.data.dump import decode_batch
from bapo_megatron.engine.load import load_kind
from bapo_megatron.policy.adapters import with_adapter
from bapo_megatron.policy.hf_config import check_routers, read_hf_config_file
from bapo_megatron.rollout.client import CollectorClient
from bapo_megatron.telemetry.console import PhaseTimer, ProgressLine
from bapo_megatron.telemetry.metrics import batch_metrics
from bapo_megatron.telemetry.run_dir import run_dir_locked
from bapo_megatron.telemetry.sinks import MetricsSinks
from bapo_megatron.types import StepMetrics


def command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option(min=1, help="Batches to generate.")] = 1,
) -> None:
    """Generate batches with the model and the training prompts, without a trainer."""
    run_config = load(config, overrides)
    generate_batches(run_config, steps)
    typer.echo(f"the metrics of each batch are in {run_config.run_dir / 'metrics.jsonl'}")


def generate_batches(config: RunConfig, steps: int) -> None:
    """Generate ``steps`` batches (at least one) with the weights of ``config.model``.

    Starts servers unless ``rollout.servers`` names some. Each batch is dumped (``rollout.dump``)
    before the next one begins, and its metrics are shown and written as in training.

    Raises:
        ValueError: The configuration cannot be used, or the run directory is in use or not empty.
        RolloutError: Generation failed; earlier batches are kept.
    """
    check_generate_config(config)
    config = with_adapter(config)
    if config.algorithm.router_replay != "none":
        ignored = config.model.ignored_config_fields
        hf = read_hf_config_file(config.model.path / "config.json", ignored)
        check_routers(hf, config.algorithm)
    load_kind(config.rollout.engine).check(config)
    with run_dir_locked(config.run_dir, "generate"):
        dumps = (config.run_dir / "rollouts").glob("step_*.parquet")
        if any(dumps) or (config.run_dir / "metrics.jsonl").exists():
            raise ValueError(
                f"{config.run_dir} already holds a run; change run_dir, or move it away"
            )
        # No step follows the last one, no trainer needs the servers' memory, and every group is
        # dumped once. Nothing reads a teacher's log-probs.
        config = with_values(
            config,
            train={"steps": steps},
            rollout={"colocated": False},
            replay=ReplayConfig(),
            log={"tensorboard": False, "wandb_project": ""},
            algorithm={"distillation": DistillationConfig()},
        )
        timer = PhaseTimer()
        with (
            ProgressLine() as progress,
            closing(CollectorClient(config, on_progress=progress.update)) as source,
            closing(
                MetricsSinks(
                    config.run_dir, config.name, config.log, first_step=1, total_steps=steps
                )
            ) as sinks,
        ):
            source.launch()
            source.ensure_weights()
            if config.log.console:
                progress.move_to(config.run_dir / "logs" / "progress")
            for step in range(1, steps + 1):
                with timer.phase("rollout"):
                    while (encoded := source.collect(step)) is None:  # every server had to restart
                        source.load_weights()
                values = batch_metrics(decode_batch(encoded), timer.end_step())
                sinks.write(StepMetrics(step, values))
