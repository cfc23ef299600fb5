"""A plan as tables for people, 100 columns wide; on narrower terminals cells are folded.

A plan's parameters against those of the model that Megatron builds.

The ``plan`` command: find the architecture, plan, check, print.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bapo_megatron.commands.options import ConfigArgument, OverridesArgument, load
from bapo_megatron.planning.layout import chunk_parameters
from bapo_megatron.planning.plan import PlanOptions, make_plan
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.telemetry.console import uncut_console

if TYPE_CHECKING:
    from rich.console import Console

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.planning.layout import Layout
    from bapo_megatron.planning.plan import LayoutEstimate, Plan, PlanOptions
    from bapo_megatron.policy.hf_config import HfConfig


MAX_LAYOUTS = 12
"""Rows of the list of layouts; --json has all of them."""


def print_plan(plan: Plan, console: Console) -> None:
    """Print the plan.

    Args:
        plan: What ``make_plan`` returned.
        console: Where to.
    """
    _print_head(plan, console)
    _print_table(console, _memory_table(plan))
    _print_verdict(plan, console)
    _print_rollout(plan, console)
    _print_table(console, _messages_table(plan))
    _print_table(console, _phases_table(plan))
    _print_table(console, _layouts_table(plan))
    _print_assumptions(plan, console)


def _print_head(plan: Plan, console: Console) -> None:
    work, layout = plan.workload, plan.layout
    servers = plan.assumptions.rollout_gpus
    _line(
        console,
        f"[bold]{plan.name}[/]: {plan.model_type}, {plan.model_parameters:,} parameters, on "
        f"{layout.gpus} trainer and {servers} rollout {plan.assumptions.gpu}",
    )
    _line(
        console,
        f"tensor {layout.tensor}{' (sequence)' if layout.sequence else ''} × "
        f"pipeline {layout.pipeline} (virtual {layout.virtual}) × context {layout.context} × "
        f"data {layout.data}, recompute {plan.recompute}",
    )
    _line(
        console,
        f"step: {work.samples_per_step:,} samples, {work.tokens_per_step:,} tokens, updates: "
        f"{work.updates_per_step} × {work.tokens_per_update:,} tokens",
    )
    _line(
        console,
        f"update: {work.micro_batches} micro-batches of about {work.micro_batch_tokens:,} "
        f"tokens (at most {work.max_micro_batch_tokens:,}) on each rank",
    )


def _memory_table(plan: Plan) -> Table:
    table = Table(
        "stage",
        "parameters",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "workspace",
        "total",
        title="Trainer memory per GPU, GB (total: with the larger of logits and workspace)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in table.columns[1:]:
        column.justify = "right"
    worst = plan.worst_stage.stage
    shown = sorted({0, worst, plan.layout.pipeline - 1})
    for stage in (plan.stages[number] for number in shown):
        mark = " ←" if stage.stage == worst and len(shown) > 1 else ""
        table.add_row(
            f"{stage.stage}{mark}",
            f"{stage.parameters:,}",
            _gb(stage.weights_bytes),
            _gb(stage.gradients_bytes),
            _gb(stage.optimizer_bytes),
            f"{_gb(stage.activations_bytes)} ({stage.chunks_in_flight}×)",
            _gb(stage.logits_bytes),
            _gb(stage.workspace_bytes),
            f"[bold]{_gb(stage.total_bytes)}[/]",
        )
    return table


def _print_verdict(plan: Plan, console: Console) -> None:
    assumptions = plan.assumptions
    need, room = plan.worst_stage.total_bytes, assumptions.gpu_memory_bytes
    answer = "[green]fits[/]" if plan.fits else "[red]does not fit[/]"
    _line(
        console,
        f"{_gb(need)} GB + {_gb(assumptions.reserve_bytes)} GB reserve of {_gb(room)} GB: {answer}",
    )


def _print_rollout(plan: Plan, console: Console) -> None:
    memory = plan.rollout
    _line(
        console,
        f"rollout GPU, {memory.gpus_per_server} per server: weights {_gb(memory.weights_bytes)} "
        f"GB + KV cache {_gb(memory.kv_cache_bytes)} GB, {memory.kv_bytes_per_token:,.0f} "
        "bytes per token",
    )
    _line(
        console,
        f"server: {memory.kv_cache_tokens:,} tokens = {memory.mean_sequences} mean or "
        f"{memory.longest_sequences} longest sequences at a time",
    )


def _messages_table(plan: Plan) -> Table:
    table = Table(
        "collective",
        "over",
        "link",
        "operation",
        "times",
        "MB each",
        "GB/step",
        "hidden by",
        title="Collectives of a step, as one GPU sends them",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for number in (4, 5, 6):
        table.columns[number].justify = "right"
    for message in plan.messages:
        collective = message.collective
        table.add_row(
            collective.name,
            f"{collective.group} {collective.ranks}",
            "node" if collective.within_node else "network",
            collective.operation,
            f"{message.per_step * collective.count:,.0f}",
            _number(collective.tensor_bytes / 1e6),
            _number(message.bytes_per_step / 1e9),
            "" if collective.hidden_by == "nothing" else collective.hidden_by,
        )
    if not plan.messages:
        table.add_row("none: one GPU")
    return table


def _phases_table(plan: Plan) -> Table:
    table = Table(
        "phase",
        "seconds",
        "compute",
        "messages",
        "bubble",
        "share",
        title="Estimated time of a step",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for phase in plan.phases:
        table.add_row(
            phase.name,
            _number(phase.seconds),
            _number(phase.compute_s),
            _number(phase.messages_s),
            _number(phase.bubble_s),
            f"{phase.seconds / plan.step_s:.0%}",
        )
    table.add_row("[bold]step[/]", f"[bold]{_number(plan.step_s)}[/]", "", "", "", "")
    return table


def _layouts_table(plan: Plan) -> Table:
    fitting = sum(estimate.fits for estimate in plan.layouts)
    table = Table(
        "",
        "tensor",
        "pipeline",
        "virtual",
        "context",
        "data",
        "recompute",
        "GB",
        "fits",
        "bubble",
        "training s",
        title=(
            f"{len(plan.layouts)} layouts of {plan.layout.gpus} GPUs, {fitting} fit; "
            "the fastest, and the configured one (→)"
        ),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for number in (1, 2, 3, 4, 5, 7, 9, 10):
        table.columns[number].justify = "right"
    for estimate in _shown_layouts(plan):
        table.add_row(*_layout_row(estimate))
    return table


def _shown_layouts(plan: Plan) -> list[LayoutEstimate]:
    """The fastest, each with its best number of chunks per stage, and the configured one."""
    shown: list[LayoutEstimate] = []
    seen = set()
    for estimate in plan.layouts:
        layout = estimate.layout
        sizes = (layout.tensor, layout.pipeline, layout.context, layout.data)
        if estimate.is_configured or (sizes not in seen and len(shown) < MAX_LAYOUTS):
            shown.append(estimate)
        seen.add(sizes)
    return shown


def _layout_row(estimate: LayoutEstimate) -> list[str]:
    layout = estimate.layout
    return [
        "→" if estimate.is_configured else "",
        f"{layout.tensor}{' seq' if layout.sequence else ''}",
        f"{layout.pipeline}",
        f"{layout.virtual}",
        f"{layout.context}",
        f"{layout.data}",
        estimate.recompute,
        _gb(estimate.memory_bytes),
        "yes" if estimate.fits else "no",
        f"{estimate.bubble_share:.0%}",
        _number(estimate.training_s),
    ]


def _print_assumptions(plan: Plan, console: Console) -> None:
    a = plan.assumptions
    rate = "given" if a.rollout_tokens_per_s is not None else "estimated"
    _line(console, "[bold]Assumptions[/] (1 GB = 10⁹ bytes)")
    for line in (
        f"{a.gpu}: {a.peak_flops / 1e12:,.0f} TFLOP/s peak at {a.mfu_share:.0%} MFU, "
        f"{a.memory_bytes_per_s / 1e12:.2f} TB/s at {a.memory_share:.0%}",
        f"links: {a.node_link_bytes_per_s / 1e9:.0f} GB/s in a node of {a.node_gpus}, "
        f"{a.network_bytes_per_s / 1e9:.0f} GB/s per GPU between nodes, at {a.link_share:.0%}; "
        f"shared disk {a.disk_bytes_per_s / 1e9:.0f} GB/s",
        f"mean lengths: prompt {a.prompt_tokens:,}, response {a.response_tokens:,} tokens, "
        "responses uniform from 0 to twice that",
        f"rollout: {a.rollout_gpus} GPUs, {plan.rollout_tokens_per_s:,.0f} tokens/s each ({rate})",
        f"layers: {a.layers}",
        *plan.notes,
    ):
        _line(console, f"- {line}")


def _print_table(console: Console, table: Table) -> None:
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f}"


def _number(value: float) -> str:
    """Three digits that count."""
    if 0 < value < 0.001:
        return "<0.001"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def check_parameters(config: RunConfig, hf: HfConfig, layout: Layout) -> None:
    """Build every stage on the meta device and compare.

    Imports Megatron, and leaves this process unfit for a GPU.

    Raises:
        RuntimeError: A number differs: a defect of the plan.
    """
    from bapo_megatron.policy.quiet import ignore_known_warnings

    ignore_known_warnings()  # before megatron is imported
    from bapo_megatron.policy.meta_model import stage_parameters

    for stage in range(layout.pipeline):
        chunks = stage_parameters(hf, config.model, config.parallel, stage)
        built = [sum(map(math.prod, shapes.values())) for shapes in chunks]
        planned = [chunk_parameters(hf, layout, stage, chunk) for chunk in range(layout.virtual)]
        if built != planned:
            raise RuntimeError(
                f"stage {stage}: Megatron builds {built} parameters, the plan counts {planned}"
            )


def show_plan(
    config: RunConfig,
    options: PlanOptions,
    *,
    config_file: Path | None,
    check: bool,
    as_json: bool,
) -> None:
    """Print the plan of a run.

    Args:
        config: The run.
        options: Hardware and mean lengths.
        config_file: As of ``read_architecture``.
        check: Compare the parameters with those of the model that Megatron builds.
        as_json: Print JSON instead of tables.

    Raises:
        ValueError: As by ``read_architecture`` and ``make_plan``.
    """
    hf = read_architecture(config.model.path, config_file)
    plan = make_plan(config, hf, options)
    if check:
        check_parameters(config, hf, plan.layout)
        Console(stderr=True).print("parameters: equal to Megatron's on every stage")
    if as_json:
        sys.stdout.write(json.dumps(plan.to_json_dict(), indent=2) + "\n")
    else:
        print_plan(plan, uncut_console())


def read_architecture(model_path: Path, config_file: Path | None) -> HfConfig:
    """Read the model's config.json; nothing else of it is needed.

    Args:
        model_path: ``model.path``.
        config_file: A config.json elsewhere; None: the one in ``model_path``.

    Raises:
        ValueError: There is none, or it describes a model that is not supported.
    """
    if config_file is not None:
        if not config_file.is_file():
            raise ValueError(f"--model-config: no such file '{config_file}'; give a config.json")
        return read_hf_config_file(config_file)
    path = model_path / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model.path: '{model_path}' has no config.json; download that file of the model to it "
            "(hf download OWNER/MODEL config.json --local-dir DIRECTORY), or give --model-config "
            "FILE"
        )
    return read_hf_config_file(path)


def command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    gpus: Annotated[
        int | None, typer.Option(help="Trainer GPUs; default: those of one replica.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="A100, H100, H200 or B200.")] = "H100",
    gpu_memory: Annotated[
        float | None, typer.Option(min=1, help="GB of one GPU; default: that GPU's.")
    ] = None,
    node_gpus: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    mfu: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the peak that products reach.")
    ] = 0.4,
    local_layers: Annotated[
        bool, typer.Option("--local-layers", help="Without Transformer Engine.")
    ] = False,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean; default: 256, if prompts may be so long.")
    ] = None,
    response_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean; default: half of the longest.")
    ] = None,
    rollout_gpus: Annotated[
        int | None, typer.Option(min=1, help="Default: rollout.servers', else as the trainer.")
    ] = None,
    rollout_tokens_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="Of one rollout GPU; default: estimated.")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="A config.json; default: that of model.path.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare parameters with Megatron's own model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate memory, messages and time of CONFIG on a cluster, and list other layouts."""
    run_config = load(config, overrides)

    options = PlanOptions(
        gpus=gpus,
        gpu=gpu,
        gpu_memory_gb=gpu_memory,
        node_gpus=node_gpus,
        mfu_share=mfu,
        layers="local" if local_layers else "transformer-engine",
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        rollout_gpus=rollout_gpus,
        rollout_tokens_per_s=rollout_tokens_per_s,
    )
    show_plan(run_config, options, config_file=model_config, check=check, as_json=as_json)
