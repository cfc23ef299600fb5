"""A plan: what a configuration needs and how long a step takes, beside every other layout."""

from dataclasses import asdict, dataclass
from typing import Any

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.planning.hardware import Assumptions, LayerKind, find_gpu, peak_flops
from bapo_megatron.planning.layout import (
    Layout,
    configured_layout,
    model_parameters,
    possible_layouts,
)
from bapo_megatron.planning.memory import (
    RolloutMemory,
    StageMemory,
    fits,
    plan_memory,
    plan_rollout_memory,
    worst_stage,
)
from bapo_megatron.planning.timing import (
    Collective,
    Messages,
    PhaseTime,
    rollout_time,
    training_time,
    weight_sync_time,
)
from bapo_megatron.planning.workload import Workload, check_lengths, plan_workload
from bapo_megatron.policy.hf_config import HfConfig, check_division

ESTIMATED = (
    "Estimates: messages, times and the order of layouts follow from the assumptions; none of them "
    "was measured on a cluster."
)
"""Printed above the tables and written into the JSON."""

PROMPT_TOKENS = 256
RECOMPUTE_CHOICES = ("none", "full")
"""What other layouts are tried with, cheapest first: ``selective`` saves next to nothing where
attention keeps no scores."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Inputs beyond the configuration; None: a default that the plan states."""

    gpus: int | None = None
    """Trainer GPUs; None: those of one replica."""
    gpu: str = "H100"
    gpu_memory_gb: float | None = None
    """None: the GPU's own."""
    node_gpus: int = 8
    mfu_share: float = 0.4
    layers: LayerKind = "transformer-engine"
    prompt_tokens: int | None = None
    """Mean; None: 256, or the longest allowed if that is less."""
    response_tokens: int | None = None
    """Mean; None: half of the longest allowed."""
    rollout_gpus: int | None = None
    """None: those of ``rollout.servers``, else as many as the trainer has."""
    rollout_tokens_per_s: float | None = None
    """Rate of one rollout GPU; None: estimated."""


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
    """Forward-only passes, forward and backward, and optimizer of one step."""
    is_configured: bool


@dataclass(frozen=True, slots=True)
class StepMessages:
    """One kind of collective over a step."""

    collective: Collective
    per_step: float
    """How many times ``collective.count`` a step has."""

    @property
    def bytes_per_step(self) -> float:
        """Bytes that one GPU sends per step."""
        return self.per_step * self.collective.bytes_sent


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
    fits: bool
    rollout: RolloutMemory
    rollout_tokens_per_s: float
    """Rate of one rollout GPU."""
    messages: list[StepMessages]
    phases: list[PhaseTime]
    bubble_share: float
    layouts: list[LayoutEstimate]
    """Those that fit first, each group from the fastest; the configured one is among them."""
    notes: list[str]

    @property
    def worst_stage(self) -> StageMemory:
        """The stage that needs most memory."""
        return worst_stage(self.stages)

    @property
    def step_s(self) -> float:
        """All phases, one after the other."""
        return sum(phase.seconds for phase in self.phases)

    def to_json_dict(self) -> dict[str, Any]:
        """Every figure, with those that are derived."""
        plan = asdict(self)
        plan["estimated"] = ESTIMATED
        plan["gpus"] = self.layout.gpus
        plan["step_s"] = self.step_s
        plan["worst_stage"] = self.worst_stage.stage
        for stage, values in zip(self.stages, plan["stages"], strict=True):
            values["total_bytes"] = stage.total_bytes
        for message, values in zip(self.messages, plan["messages"], strict=True):
            values["collective"]["bytes_sent"] = message.collective.bytes_sent
            values["bytes_per_step"] = message.bytes_per_step
        return plan


def make_plan(config: RunConfig, hf: HfConfig, options: PlanOptions) -> Plan:
    """Plan a run.

    Args:
        config: The run; no file that it names is read.
        hf: Its model.
        options: Hardware and mean lengths.

    Raises:
        ValueError: A layout that does not divide model or GPUs, lengths that do not fit a
            micro-batch, an unknown GPU, or a server without room for a sequence; one line with the
            remedy.
    """
    layout = configured_layout(config.parallel, options.gpus)
    check_division(hf, config.parallel)
    check_lengths(config, options.prompt_tokens, options.response_tokens)
    assumptions = make_assumptions(config, layout.gpus, options)
    rollout = plan_rollout_memory(config, hf, assumptions)
    messages, stages = _lay_out(config, hf, layout, assumptions, config.megatron.recompute)
    training, bubble_share = training_time(messages, stages)
    rollout_phase, rate = rollout_time(messages, rollout)
    return Plan(
        name=config.name,
        model_type=hf.model_type,
        model_parameters=model_parameters(hf),
        layout=layout,
        recompute=config.megatron.recompute,
        assumptions=assumptions,
        workload=messages.workload,
        stages=stages,
        fits=fits(stages, assumptions),
        rollout=rollout,
        rollout_tokens_per_s=rate,
        messages=[StepMessages(c, messages.per_step(c)) for c in messages.all()],
        phases=[rollout_phase, *training, weight_sync_time(messages)],
        bubble_share=bubble_share,
        layouts=_rank_layouts(config, hf, layout, assumptions),
        notes=_notes(config, layout, assumptions, rollout),
    )


def make_assumptions(config: RunConfig, gpus: int, options: PlanOptions) -> Assumptions:
    """Fill in what neither the configuration nor the options say.

    Raises:
        ValueError: An unknown GPU, or one that cannot run the configured number format.
    """
    gpu = find_gpu(options.gpu)
    memory_gb = gpu.memory_gb if options.gpu_memory_gb is None else options.gpu_memory_gb
    prompt = min(PROMPT_TOKENS, config.data.max_prompt_tokens)
    response = max(1, config.rollout.max_response_tokens // 2)
    servers = len(config.rollout.servers) * config.rollout.server.tensor
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
        prompt_tokens=options.prompt_tokens or prompt,
        response_tokens=options.response_tokens or response,
        rollout_gpus=options.rollout_gpus or servers or gpus,
        rollout_tokens_per_s=options.rollout_tokens_per_s,
    )


def _lay_out(
    config: RunConfig, hf: HfConfig, layout: Layout, assumptions: Assumptions, recompute: str
) -> tuple[Messages, list[StageMemory]]:
    megatron = config.megatron.model_copy(update={"recompute": recompute})
    workload = plan_workload(config, hf, layout, assumptions)
    stages = plan_memory(config, hf, layout, megatron, workload, assumptions)
    return Messages(config, hf, layout, megatron, workload, assumptions), stages


def _rank_layouts(
    config: RunConfig, hf: HfConfig, configured: Layout, assumptions: Assumptions
) -> list[LayoutEstimate]:
    """Every layout of these GPUs with the least recomputation that fits, and the configured one."""
    samples = config.rollout.groups_per_step * config.rollout.samples_per_group
    chosen = (configured, config.megatron.recompute)

    def estimate(layout: Layout, recompute: str) -> LayoutEstimate:
        messages, stages = _lay_out(config, hf, layout, assumptions, recompute)
        phases, bubble_share = training_time(messages, stages)
        return LayoutEstimate(
            layout=layout,
            recompute=recompute,
            memory_bytes=worst_stage(stages).total_bytes,
            fits=fits(stages, assumptions),
            micro_batches=messages.workload.micro_batches,
            bubble_share=bubble_share,
            training_s=sum(phase.seconds for phase in phases),
            is_configured=(layout, recompute) == chosen,
        )

    found = {}
    for layout in possible_layouts(
        hf,
        configured.gpus,
        node_gpus=assumptions.node_gpus,
        max_data=samples // config.algorithm.updates_per_batch,
    ):
        for recompute in RECOMPUTE_CHOICES:
            tried = estimate(layout, recompute)
            if tried.fits or recompute == RECOMPUTE_CHOICES[-1]:
                found[layout, recompute] = tried
                break
    found[chosen] = estimate(*chosen)
    return sorted(found.values(), key=lambda e: (not e.fits, e.training_s, e.memory_bytes))


def _notes(
    config: RunConfig, layout: Layout, assumptions: Assumptions, rollout: RolloutMemory
) -> list[str]:
    """Caveats that no figure shows."""
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
