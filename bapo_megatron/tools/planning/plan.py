"""A plan: what a configuration needs and how long a step takes, beside every other layout."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bapo_megatron.config.check import check_updates
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.policy.hf_config import HfConfig, check_division
from bapo_megatron.runtime.gpus import find_gpu, peak_flops
from bapo_megatron.tools.planning.disk import DiskUse, disk_use
from bapo_megatron.tools.planning.hardware import Assumptions, LayerKind, Placement
from bapo_megatron.tools.planning.layout import (
    Group,
    Layout,
    configured_layout,
    model_parameters,
    possible_layouts,
)
from bapo_megatron.tools.planning.memory import (
    RolloutMemory,
    StageMemory,
    plan_memory,
    rollout_memory,
)
from bapo_megatron.tools.planning.timing import (
    PhaseTime,
    rollout_time,
    training_time,
    weight_sync_time,
)
from bapo_megatron.tools.planning.workload import Scenario, Workload, plan_passes, plan_workload

ESTIMATED = (
    "Estimates: messages, times and the order of layouts follow from the assumptions; none of them "
    "was measured on a cluster."
)
"""Printed above the tables and written into the JSON."""

MISS_SHARE = 0.05
"""Share of predicted bounds that are wrong; in the demo 0 to 4 %, up to a lag of 64 updates
(docs/benchmarks/)."""

RECOMPUTE_CHOICES = ("none", "full")
"""What other layouts are tried with, cheapest first: ``selective`` saves next to nothing where
attention keeps no scores."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of the command, whose help tells what None stands for."""

    gpus: int | None = None
    gpu: str = "H100"
    gpu_memory_gb: float | None = None
    node_gpus: int = 8
    mfu_share: float = 0.4
    layers: LayerKind = "transformer-engine"
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    rollout_gpus: int | None = None
    rollout_tokens_per_s: float | None = None
    miss_share: float = MISS_SHARE


@dataclass(frozen=True, slots=True)
class LayoutEstimate:
    """One layout of the list."""

    layout: Layout
    recompute: str
    memory_bytes: float
    """Need of the worst stage, without the reserve."""
    fits: bool
    micro_batches: int
    bubble_share: float
    training_s: float
    """Passes and optimizer of one step."""
    is_configured: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the command prints."""

    name: str
    model_type: str
    model_parameters: int
    layout: Layout
    recompute: str
    assumptions: Assumptions
    workload: Workload
    stages: list[StageMemory]
    sampling_bytes: float
    """Need of a trainer GPU while colocated servers sample on it, without the reserve; else 0."""
    fits: bool
    rollout: RolloutMemory
    rollout_tokens_per_s: float
    """Rate of one rollout GPU."""
    phases: list[PhaseTime]
    steps: int
    """Steps of the whole run."""
    disk: list[DiskUse]
    """At most, over the whole run."""
    bubble_share: float
    layouts: list[LayoutEstimate]
    """Those that fit first, each group from the fastest; the configured one is among them."""
    notes: list[str]

    @property
    def worst_stage(self) -> StageMemory:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def step_s(self) -> float:
        """All phases, one after the other."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def sent_bytes(self) -> dict[Group, float]:
        """What one GPU sends in a step to the others of each group."""
        groups = self.layout.group_ranks
        return {g: sum(phase.sent_bytes.get(g, 0.0) for phase in self.phases) for g in groups}

    @property
    def all_gpus(self) -> int:
        """Trainer and rollout GPUs together, colocated ones once."""
        are_shared = self.assumptions.placement == "colocated"
        return self.layout.gpus + (0 if are_shared else self.assumptions.rollout_gpus)

    @property
    def gpu_hours_per_step(self) -> float:
        """Trainer and rollout GPUs together."""
        return self.step_s * self.all_gpus / 3600

    def to_json_dict(self) -> dict[str, Any]:
        """Every figure, with those that are derived."""
        plan = asdict(self)
        plan["estimated"] = ESTIMATED
        plan["gpus"] = self.layout.gpus
        plan["all_gpus"] = self.all_gpus
        plan["step_s"] = self.step_s
        plan["sent_bytes"] = self.sent_bytes
        plan["gpu_hours_per_step"] = self.gpu_hours_per_step
        plan["gpu_hours_per_run"] = self.gpu_hours_per_step * self.steps
        plan["worst_stage"] = self.worst_stage.stage
        for stage, values in zip(self.stages, plan["stages"], strict=True):
            values["total_bytes"] = stage.total_bytes
        return plan


def make_plan(config: RunConfig, hf: HfConfig, options: PlanOptions) -> Plan:
    """Plan a run; no file that ``config`` names is read.

    Raises:
        ValueError: A layout that does not divide model or GPUs, updates that do not divide a batch,
            lengths that do not fit a micro-batch, an unknown GPU, or a server without room for a
            sequence; one line with the remedy.
    """
    check_updates(config)
    layout = configured_layout(config.parallel, options.gpus)
    check_division(hf, config.parallel)
    assumptions = make_assumptions(config, layout.gpus, options)
    passes = plan_passes(config.algorithm, assumptions.miss_share)
    case = Scenario(config, hf, layout, assumptions, passes)
    rollout = rollout_memory(case)
    workload = plan_workload(case)
    stages = plan_memory(case, workload)
    sampling_bytes = _sampling_bytes(case, stages)
    needed_bytes = max(sampling_bytes, *(stage.total_bytes for stage in stages))
    training, bubble_share = training_time(case, workload, stages)
    rollout_phase, rate = rollout_time(case, workload, rollout)
    return Plan(
        name=config.name,
        model_type=hf.model_type,
        model_parameters=model_parameters(hf),
        layout=layout,
        recompute=config.megatron.recompute,
        assumptions=assumptions,
        workload=workload,
        stages=stages,
        sampling_bytes=sampling_bytes,
        fits=needed_bytes <= assumptions.usable_bytes,
        rollout=rollout,
        rollout_tokens_per_s=rate,
        phases=[rollout_phase, *training, weight_sync_time(case)],
        steps=config.train.steps,
        disk=disk_use(case, workload),
        bubble_share=bubble_share,
        layouts=_rank_layouts(case),
        notes=_notes(case, rollout),
    )


def make_assumptions(config: RunConfig, gpus: int, options: PlanOptions) -> Assumptions:
    """Fill in what neither the configuration nor the options say.

    Raises:
        ValueError: An unknown GPU, or one that cannot run the configured number format; a mean
            length above the longest, or a longest sequence above a micro-batch.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    for option, mean, key, longest in (
        ("--prompt-tokens", options.prompt_tokens, "data.max_prompt_tokens", prompt),
        ("--response-tokens", options.response_tokens, "rollout.max_response_tokens", response),
    ):
        if mean is not None and mean > longest:
            raise ValueError(f"{option}: must be at most {key} = {longest}, got {mean}; lower it")
    room = config.train.max_tokens_per_micro_batch * config.parallel.context
    if room < prompt + response:
        raise ValueError(
            "train.max_tokens_per_micro_batch × parallel.context: must hold data.max_prompt_tokens "
            f"+ rollout.max_response_tokens = {prompt + response}, got {room}; raise it"
        )
    gpu = find_gpu(options.gpu)
    memory_gb = gpu.memory_gb if options.gpu_memory_gb is None else options.gpu_memory_gb
    placement = _placement(config.rollout)
    server = config.rollout.server
    num_servers = len(config.rollout.servers) if placement == "elsewhere" else server.count
    return Assumptions(
        gpu=gpu.name,
        gpu_memory_bytes=memory_gb * 1e9,
        layers=options.layers,
        peak_flops=peak_flops(gpu, config.model.dtype, config.megatron.fp8),
        mfu_share=options.mfu_share,
        memory_bytes_per_s=gpu.memory_bytes_per_s,
        node_gpus=options.node_gpus,
        node_link_bytes_per_s=gpu.node_link_bytes_per_s,
        network_bytes_per_s=gpu.network_bytes_per_s,
        prompt_tokens=options.prompt_tokens or min(256, prompt),
        response_tokens=options.response_tokens or max(1, response // 2),
        miss_share=options.miss_share,
        placement=placement,
        rollout_gpus=options.rollout_gpus or num_servers * server.tensor or gpus,
        rollout_tokens_per_s=options.rollout_tokens_per_s,
    )


def _placement(rollout: RolloutConfig) -> Placement:
    if rollout.colocated:
        return "colocated"
    return "same node" if rollout.starts_servers and rollout.server.first_gpu else "elsewhere"


def _sampling_bytes(case: Scenario, stages: Sequence[StageMemory]) -> float:
    """A server, beside the weights, gradients and optimizer states that the trainer keeps."""
    if case.assumptions.placement != "colocated":
        return 0.0
    kept_bytes = max(s.weights_bytes + s.gradients_bytes + s.optimizer_bytes for s in stages)
    server_bytes = case.config.rollout.server.mem_fraction * case.assumptions.gpu_memory_bytes
    return kept_bytes + server_bytes


def _rank_layouts(configured: Scenario) -> list[LayoutEstimate]:
    """Every layout of these GPUs with the least recomputation that fits, and the configured one."""
    config, assumptions = configured.config, configured.assumptions
    chosen = (configured.layout, config.megatron.recompute)

    def estimate(layout: Layout, recompute: str) -> LayoutEstimate:
        megatron = config.megatron.model_copy(update={"recompute": recompute})
        other = config.model_copy(update={"megatron": megatron})
        case = replace(configured, layout=layout, config=other)
        workload = plan_workload(case)
        stages = plan_memory(case, workload)
        phases, bubble_share = training_time(case, workload, stages)
        memory_bytes = max(stage.total_bytes for stage in stages)
        return LayoutEstimate(
            layout=layout,
            recompute=recompute,
            memory_bytes=memory_bytes,
            fits=memory_bytes <= assumptions.usable_bytes,
            micro_batches=workload.micro_batches,
            bubble_share=bubble_share,
            training_s=sum(phase.seconds for phase in phases),
            is_configured=(layout, recompute) == chosen,
        )

    found = {}
    samples = config.rollout.groups_per_step * config.rollout.samples_per_group
    max_data = samples // config.algorithm.updates_per_batch
    for layout in possible_layouts(
        configured.hf, configured.layout.gpus, node_gpus=assumptions.node_gpus, max_data=max_data
    ):
        for recompute in RECOMPUTE_CHOICES:
            tried = estimate(layout, recompute)
            if tried.fits:
                break
        found[layout, tried.recompute] = tried
    found[chosen] = estimate(*chosen)
    return sorted(found.values(), key=lambda e: (not e.fits, e.training_s, e.memory_bytes))


def _notes(case: Scenario, rollout: RolloutMemory) -> list[str]:
    """Caveats that no figure shows."""
    config, layout, assumptions = case.config, case.layout, case.assumptions
    notes = []
    if rollout.gpus_per_server != config.rollout.server.tensor:
        notes.append(
            f"a server of rollout.server.tensor = {config.rollout.server.tensor} GPUs has no room "
            f"for the longest sequence; planned with {rollout.gpus_per_server} GPUs per server"
        )
    if layout.tensor > assumptions.node_gpus:
        notes.append(
            f"tensor parallel {layout.tensor} leaves the node of {assumptions.node_gpus} GPUs: "
            "its messages, between all products, cross the network"
        )
    for name in ("optimizer_offload_share", "activation_offload_layers"):
        if getattr(config.megatron, name):
            notes.append(f"{name}: memory is counted, copies to the host are not timed")
    if config.megatron.fp8 != "none":
        notes.append(
            "fp8: products run at the 8-bit peak; activations and weights are counted in bfloat16"
        )
    if assumptions.layers == "local" and layout.context > 1:
        notes.append(
            "local layers with context > 1 also keep gathered keys, values and masks: not counted"
        )
    return notes
