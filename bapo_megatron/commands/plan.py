"""``bapo-megatron plan``: memory, traffic, time and other layouts of a run, as tables or JSON.

Tables are 100 columns wide; on narrower terminals cells are folded.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bapo_megatron.commands.options import (
    ConfigArgument,
    GpuMemoryOption,
    GpuOption,
    HostMemoryOption,
    JsonOption,
    LocalLayersOption,
    NodeGpusOption,
    OverridesArgument,
    load,
)
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.policy.architecture import HfConfig
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.runtime.gpus import MAX_GPUS
from bapo_megatron.telemetry.console import uncut_console
from bapo_megatron.tools.planning.memory import (
    BUFFER_TOKEN_BYTES,
    DUMP_TOKEN_BYTES,
    OPTIMIZER_BYTES,
    StageMemory,
)
from bapo_megatron.tools.planning.plan import ESTIMATED, Plan, PlanOptions, make_plan

_MAX_LAYOUTS = 12
"""Rows of the list of layouts; --json has all of them."""


def command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_GPUS, help="All GPUs; default: the fewest that fit."),
    ] = None,
    trainer_gpus: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_GPUS, help="Those that train; default: all but the servers'."),
    ] = None,
    gpu: GpuOption = "H100",
    gpu_memory: GpuMemoryOption = None,
    host_memory: HostMemoryOption = None,
    host_bandwidth: Annotated[
        float, typer.Option(min=0.1, max=1e4, help="GB/s between host memory and a GPU.")
    ] = 25.0,
    node_gpus: NodeGpusOption = 8,
    mfu: Annotated[
        float, typer.Option(min=0.01, max=1, help="Model FLOPS utilization of GEMMs.")
    ] = 0.4,
    local_layers: LocalLayersOption = False,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean prompt length; default: at most 256.")
    ] = None,
    response_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean response length; default: half the maximum.")
    ] = None,
    rollout_tokens_per_s: Annotated[
        float | None, typer.Option(min=0.001, max=1e9, help="Tokens/s per rollout GPU.")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="A config.json; default: that of model.path.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate memory, traffic and time of CONFIG on a cluster, and list other layouts."""
    run_config = load(config, overrides)
    options = PlanOptions(
        gpus=gpus,
        trainer_gpus=trainer_gpus,
        gpu=gpu,
        gpu_memory_gb=gpu_memory,
        host_memory_gb=host_memory,
        host_gb_per_s=host_bandwidth,
        node_gpus=node_gpus,
        mfu_share=mfu,
        layers="local" if local_layers else "transformer-engine",
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        rollout_tokens_per_s=rollout_tokens_per_s,
    )
    hf = _read_model("model", run_config.model.path, run_config, model_config)
    models = run_config.algorithm.frozen_models
    frozen = {k: _read_model(k, m.path, run_config) for k, m in models.items() if m.path}
    plan = make_plan(run_config, hf, options, frozen)
    if as_json:
        typer.echo(json.dumps(asdict(plan), indent=2))
    else:
        _print_plan(plan, uncut_console())


def _read_model(key: str, path: Path, config: RunConfig, file: Path | None = None) -> HfConfig:
    """Read ``file``, by default the config.json of the model of a section."""
    if file is None and not (path / "config.json").is_file():
        instead = "give a config.json by --model-config FILE, or " * (key == "model")
        raise ValueError(
            f"{key}.path: no such file '{path / 'config.json'}'; {instead}download one (hf "
            "download OWNER/MODEL config.json --local-dir DIRECTORY)"
        )
    return read_hf_config_file(file or path / "config.json", config.model.ignored_config_fields)


def _print_plan(plan: Plan, console: Console) -> None:
    hours = plan.gpu_hours_per_step
    for part in (
        *_head(plan),
        _memory_table(plan),
        *([_frozen_table(plan)] if plan.frozen_parameters else []),
        *_verdicts(plan),
        ESTIMATED,
        _traffic_table(plan),
        _phases_table(plan),
        f"GPU-hours of {plan.gpus} GPUs: {_number(hours)} per step, "
        f"{_number(hours * plan.steps)} in {plan.steps:,} steps",
        *(
            f"cost at {cost:g} per GPU-hour: {_number(hours * cost)} per step, "
            f"{_number(hours * cost * plan.steps)} in {plan.steps:,} steps"
            for cost in [plan.gpu_hour_cost]
            if cost is not None
        ),
        _disk_table(plan),
        _layouts_table(plan),
        *_assumptions(plan),
    ):
        console.print(part, highlight=False)


def _head(plan: Plan) -> list[str]:
    work, layout, assumptions = plan.workload, plan.layout, plan.assumptions
    return [
        f"[bold]{plan.name}[/]: {plan.model_type}, {plan.model_parameters:,} parameters, on "
        f"{layout.gpus} trainer and {assumptions.rollout_gpus} rollout {assumptions.gpu.name} "
        f"({assumptions.placement})",
        f"tensor {layout.tensor}{' (sequence)' if layout.sequence else ''} × "
        f"pipeline {layout.pipeline} (virtual {layout.virtual}) × context {layout.context} × "
        f"data {layout.data}, recompute {plan.recompute}",
        f"step: {work.samples_per_step:,} samples, {work.tokens_per_step:,} tokens, updates: "
        f"{work.updates_per_step} × {work.tokens_per_update:,} tokens",
        *(
            f"frozen: {key}, {parameters:,} parameters"
            for key, parameters in plan.frozen_parameters.items()
        ),
        f"update: {work.micro_batches} micro-batches of about {work.micro_batch_tokens:,} "
        f"tokens (at most {work.max_micro_batch_tokens:,}) on each rank",
    ]


def _memory_table(plan: Plan) -> Table:
    worst, last = plan.worst_stage.stage, plan.layout.pipeline - 1
    return _table(
        "Trainer memory per GPU, GB (total: with the larger of logits and workspace)",
        _shown_stages(plan),
        {
            "stage": lambda s: f"{s.stage}{' ←' if s.stage == worst and last else ''}",
            ">parameters": lambda s: f"{s.parameters:,}",
            ">weights": lambda s: _gb(s.weights_bytes),
            ">gradients": lambda s: _gb(s.gradients_bytes),
            ">optimizer": lambda s: _gb(s.optimizer_bytes),
            ">activations": lambda s: f"{_gb(s.activations_bytes)} ({s.chunks_in_flight}×)",
            ">logits": lambda s: _gb(s.logits_bytes),
            ">workspace": lambda s: _gb(s.workspace_bytes),
            ">total": lambda s: f"[bold]{_gb(s.total_bytes)}[/]",
        },
    )


def _frozen_table(plan: Plan) -> Table:
    return _table(
        "Frozen models per GPU, GB, included in the total (scoring replaces activations, logits "
        "and workspace)",
        _shown_stages(plan),
        {
            "stage": lambda s: str(s.stage),
            ">weights": lambda s: _gb(s.frozen_bytes),
            ">teacher's hidden states": lambda s: _gb(s.teacher_hidden_bytes),
            ">scoring": lambda s: _gb(s.scoring_bytes),
            ">host memory": lambda s: _gb(s.host_bytes),
        },
    )


def _shown_stages(plan: Plan) -> list[StageMemory]:
    numbers = {0, plan.worst_stage.stage, plan.layout.pipeline - 1}
    return [plan.stages[number] for number in sorted(numbers)]


def _verdicts(plan: Plan) -> list[str]:
    """Whether the trainer fits, and what a rollout GPU holds."""
    assumptions, memory = plan.assumptions, plan.rollout
    answer = "[green]fits[/]" if plan.fits else "[red]does not fit[/]"
    needs, host = f"{_gb(plan.worst_stage.total_bytes)} GB", ""
    if plan.sampling_bytes:
        needs += f", {_gb(plan.sampling_bytes)} GB while servers sample,"
    if plan.host_bytes_per_node:
        host = f", and {_gb(plan.host_bytes_per_node)} GB of host memory per node"
        if limit_bytes := assumptions.host_memory_bytes:
            host += f" of {_gb(limit_bytes)} GB"
    return [
        f"{needs} + {_gb(assumptions.reserve_bytes)} GB reserve of "
        f"{_gb(assumptions.gpu_memory_bytes)} GB{host}: {answer}",
        f"rollout GPU, {memory.gpus_per_server} per server: weights {_gb(memory.weights_bytes)} "
        f"GB + KV cache {_gb(memory.kv_cache_bytes)} GB, {memory.kv_bytes_per_token:,.0f} "
        "bytes per token",
        f"server: {memory.kv_cache_tokens:,} tokens = {memory.mean_sequences} mean or "
        f"{memory.longest_sequences} maximum-length sequences at a time",
    ]


def _traffic_table(plan: Plan) -> Table:
    layout, node_gpus = plan.layout, plan.assumptions.node_gpus
    return _table(
        "GB one GPU sends in a step",
        plan.sent_bytes,
        {
            "group": str,
            ">ranks": lambda group: str(layout.groups[group][0]),
            "link": lambda g: "node" if layout.groups[g][1] <= node_gpus else "network",
            ">GB": lambda group: _number(plan.sent_bytes[group] / 1e9),
        },
    )


def _phases_table(plan: Plan) -> Table:
    table = _table(
        "Estimated time of a step",
        plan.phases,
        {
            "phase": lambda phase: phase.name,
            ">seconds": lambda phase: _number(phase.seconds),
            ">compute": lambda phase: _number(phase.compute_s),
            ">messages": lambda phase: _number(phase.messages_s),
            ">bubble": lambda phase: _number(phase.bubble_s),
            ">share": lambda phase: f"{phase.seconds / plan.step_s:.0%}",
        },
    )
    table.add_row("[bold]step[/]", f"[bold]{_number(plan.step_s)}[/]")
    return table


def _disk_table(plan: Plan) -> Table:
    table = _table(
        "Disk under run_dir, GB",
        plan.disk,
        {
            "files": lambda use: use.what,
            ">each": lambda use: _gb(use.each_bytes),
            ">number": lambda use: f"{use.number:,}",
            ">GB": lambda use: _gb(use.total_bytes),
        },
    )
    total = sum(use.total_bytes for use in plan.disk)
    table.add_row("[bold]whole run[/]", "", "", f"[bold]{_gb(total)}[/]")
    return table


def _layouts_table(plan: Plan) -> Table:
    num_fitting = sum(estimate.fits for estimate in plan.layouts)
    return _table(
        f"{len(plan.layouts)} layouts of {plan.layout.gpus} GPUs, {num_fitting} fit; "
        "the fastest, and the configured one (→)",
        [e for rank, e in enumerate(plan.layouts) if rank < _MAX_LAYOUTS or e.is_configured],
        {
            "": lambda e: "→" if e.is_configured else "",
            ">tensor": lambda e: f"{e.layout.tensor}{' seq' if e.layout.sequence else ''}",
            ">pipeline": lambda e: str(e.layout.pipeline),
            ">virtual": lambda e: str(e.layout.virtual),
            ">context": lambda e: str(e.layout.context),
            ">data": lambda e: str(e.layout.data),
            "recompute": lambda e: e.recompute,
            ">GB": lambda e: _gb(e.memory_bytes),
            "fits": lambda e: "yes" if e.fits else "no",
            ">bubble": lambda e: f"{e.bubble_share:.0%}",
            ">training s": lambda e: _number(e.training_s),
        },
    )


def _assumptions(plan: Plan) -> list[str]:
    a, gpu = plan.assumptions, plan.assumptions.gpu
    host_link = f"host memory: {a.host_link_bytes_per_s / 1e9:.0f} GB/s per GPU"
    lines = [
        f"{gpu.name}: {a.peak_flops / 1e12:,.0f} TFLOP/s peak at {a.mfu_share:.0%} MFU, "
        f"{gpu.memory_bytes_per_s / 1e12:.2f} TB/s at {a.memory_share:.0%}",
        f"links: {gpu.node_link_bytes_per_s / 1e9:.0f} GB/s in a node of {a.node_gpus}, "
        f"{gpu.network_bytes_per_s / 1e9:.0f} GB/s per GPU between nodes, at {a.link_share:.0%}; "
        f"shared disk {a.disk_bytes_per_s / 1e9:.0f} GB/s",
        *([host_link] if plan.host_bytes_per_node else []),
        f"mean lengths: prompt {a.prompt_tokens:,}, response {a.response_tokens:,} tokens, "
        "responses uniform from 0 to twice that",
        f"rollout: {a.rollout_gpus} GPUs, {plan.rollout_tokens_per_s:,.0f} tokens/s each",
        f"layers: {a.layers}",
        f"disk: {OPTIMIZER_BYTES} bytes of optimizer state per parameter, {DUMP_TOKEN_BYTES} bytes "
        f"per response token of a dump with texts, {BUFFER_TOKEN_BYTES} of an unfinished sample",
        *([f"predicted bounds: {a.miss_share:.0%} miss"] if plan.passes.repeated else []),
        *plan.notes,
    ]
    return ["[bold]Assumptions[/] (1 GB = 10⁹ bytes)", *(f"- {line}" for line in lines)]


def _table(title: str, items: Iterable[Any], columns: Mapping[str, Callable[[Any], str]]) -> Table:
    """Return a table; columns whose heading begins with ">" are aligned to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in columns:
        name = heading.removeprefix(">")
        table.add_column(name, justify="left" if name == heading else "right", overflow="fold")
    for item in items:
        table.add_row(*(cell(item) for cell in columns.values()))
    return table


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f}"


def _number(value: float) -> str:
    """Return three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
