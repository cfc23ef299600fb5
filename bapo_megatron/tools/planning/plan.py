"""A plan: what a configuration needs and how long a step takes, beside every other layout.

``choose_layout`` also decides which GPUs train and which sample, for ``init``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bapo_megatron.config.check import check_settings
from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.section import with_values
from bapo_megatron.policy.adapters import targets_of
from bapo_megatron.policy.architecture import HfConfig
from bapo_megatron.policy.hf_config import check_division
from bapo_megatron.runtime.gpus import find_gpu, peak_flops
from bapo_megatron.tools.planning.memory import (
    DiskUse,
    NoRoomError,
    RolloutMemory,
    StageMemory,
    disk_use,
    model_parameters,
    plan_memory,
    rollout_memory,
)
from bapo_megatron.tools.planning.scenario import (
    Assumptions,
    Group,
    LayerKind,
    Layout,
    Passes,
    Placement,
    Scenario,
    Workload,
    configured_layout,
    frozen_specs,
    plan_passes,
    plan_workload,
    possible_layouts,
)
from bapo_megatron.tools.planning.timing import (
    PhaseTime,
    rollout_time,
    scoring_times,
    training_time,
    weight_sync_time,
)

ESTIMATED = (
    "Estimates: messages, times and the order of layouts follow from the assumptions; none of them "
    "was measured on a cluster."
)
"""Printed above the tables and written into the JSON."""

MISS_SHARE = 0.05
"""Share of predicted bounds that are wrong; in the demo 0 to 4 %, up to a lag of 64 updates
(docs/benchmarks/)."""

RECOMPUTE_CHOICES = ("none", "full")
"""Recomputation to try in other layouts, cheapest first; ``selective`` saves next to nothing where
attention keeps no scores."""

_COLOCATED_MEM_SHARE = 0.4
"""Share of a GPU's memory for a server, beside the trainer's weights and optimizer states."""
_EQUAL_TIME_RATIO = 1.1
"""Estimates that differ by at most this factor are taken as equal."""
_CHUNKED = {"ops": {"logits_chunk_tokens": 2048}}
_SAVINGS: tuple[dict[str, Any], ...] = (
    {},
    _CHUNKED,
    {**_CHUNKED, "megatron": {"optimizer_offload_share": 1.0}},
    {
        **_CHUNKED,
        "model": {"lora": {"rank": 32}},
        "optimizer": {"lr": 1e-5},
        "rollout": {"weight_sync": {"verify": 10}},  # its default with adapters
    },
)
"""What ``choose_layout`` sets where recomputation is not enough, by what it costs."""
_TOKENS_MULTIPLE = 128
"""Micro-batches are multiples of this, which every layout divides (``packing_multiples``)."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of the command; its help says what None stands for."""

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
    bubble_share: float
    training_s: float
    """Passes, frozen models' included, and optimizer of one step."""
    is_configured: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the command prints; its fields are the JSON."""

    name: str
    model_type: str
    model_parameters: int
    gpus: int
    """Trainer GPUs."""
    all_gpus: int
    """Trainer and rollout GPUs together, colocated ones once."""
    layout: Layout
    recompute: str
    assumptions: Assumptions
    workload: Workload
    passes: Passes
    """Passes of a step, besides a loss pass per update."""
    frozen_parameters: dict[str, int]
    """Parameters of each frozen model in the trainer, by its section."""
    stages: list[StageMemory]
    host_bytes_per_node: float
    """Host memory for frozen models and the optimizer, on the node that holds most."""
    sampling_bytes: float
    """Need of a trainer GPU while colocated servers sample on it, without the reserve; else 0."""
    fits: bool
    rollout: RolloutMemory
    rollout_tokens_per_s: float
    """Rate of one rollout GPU."""
    phases: list[PhaseTime]
    step_s: float
    """All phases, one after the other; the rollout beside the others if it may run ahead."""
    sent_bytes: dict[Group, float]
    """What one GPU sends in a step to the others of each group."""
    steps: int
    """Steps of the whole run."""
    gpu_hours_per_step: float
    """Trainer and rollout GPUs together."""
    gpu_hour_cost: float | None
    """``log.gpu_hour_cost``."""
    disk: list[DiskUse]
    """At most, over the whole run."""
    layouts: list[LayoutEstimate]
    """Those that fit first, each group from the fastest; the configured one is among them."""
    notes: list[str]
    estimated: str = ESTIMATED

    @property
    def worst_stage(self) -> StageMemory:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.total_bytes)


def make_plan(
    config: RunConfig,
    hf: HfConfig,
    options: PlanOptions,
    frozen: Mapping[str, HfConfig] | None = None,
) -> Plan:
    """Plan a run; no file that ``config`` names is read.

    ``frozen`` holds the models of ``AlgorithmConfig.frozen_models`` that have a path, by key.

    Raises:
        ValueError: Something does not divide or fit, or the GPU is unknown; one line.
    """
    check_settings(config, hf.max_position_embeddings)
    layout = configured_layout(config.parallel, options.gpus)
    check_division(hf, config.parallel)
    specs = frozen_specs(config, hf, frozen or {})
    passes = plan_passes(config.algorithm, options.miss_share)

    def on(layout: Layout) -> Scenario:
        assumptions = make_assumptions(config, layout.gpus, options)
        return Scenario(config, hf, layout, assumptions, passes, specs)

    case = on(layout)
    if options.gpus is None:
        powers = (2**exponent for exponent in range(_max_data(config).bit_length()))
        more = (on(replace(layout, data=layout.data * power)) for power in powers)
        case = next((other for other in more if _fits(other)), case)
    layout, assumptions = case.layout, case.assumptions
    rollout = rollout_memory(case)
    workload = plan_workload(case)
    stages = plan_memory(case, workload)
    training, _ = training_time(case, workload, stages)
    rollout_phase, rate = rollout_time(case, workload, rollout)
    scoring = scoring_times(case, workload)
    phases = [rollout_phase, *scoring, *training, weight_sync_time(case)]
    others_s = sum(phase.seconds for phase in phases[1:])
    seconds = rollout_phase.seconds, others_s
    step_s = max(seconds) if config.rollout.steps_ahead > 0 else sum(seconds)
    all_gpus = layout.gpus + assumptions.rollout_gpus * (assumptions.placement != "colocated")
    return Plan(
        name=config.name,
        model_type=hf.model_type,
        model_parameters=model_parameters(hf),
        gpus=layout.gpus,
        all_gpus=all_gpus,
        layout=layout,
        recompute=config.megatron.recompute,
        assumptions=assumptions,
        workload=workload,
        passes=case.passes,
        frozen_parameters={model.key: model_parameters(model.hf) for model in case.frozen},
        stages=stages,
        host_bytes_per_node=_host_bytes_per_node(case, stages),
        sampling_bytes=_sampling_bytes(case, stages),
        fits=_fits(case, stages),
        rollout=rollout,
        rollout_tokens_per_s=rate,
        phases=phases,
        step_s=step_s,
        sent_bytes={
            group: sum(phase.sent_bytes.get(group, 0.0) for phase in phases)
            for group in layout.groups
        },
        steps=config.train.steps,
        gpu_hours_per_step=step_s * all_gpus / 3600,
        gpu_hour_cost=config.log.gpu_hour_cost,
        disk=disk_use(case, workload),
        layouts=_rank_layouts(case),
        notes=_notes(case, stages, rollout),
    )


def make_assumptions(config: RunConfig, gpus: int, options: PlanOptions) -> Assumptions:
    """Fill in what neither the configuration nor the options say.

    Raises:
        ValueError: The GPU is unknown or lacks the number format, or a length is too large.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    for option, mean, key, longest in (
        ("--prompt-tokens", options.prompt_tokens, "data.max_prompt_tokens", prompt),
        ("--response-tokens", options.response_tokens, "rollout.max_response_tokens", response),
    ):
        if mean is not None and mean > longest:
            raise ValueError(f"{option}: must be at most {key} = {longest}, got {mean}; lower it")
    gpu = find_gpu(options.gpu)
    rollout, server = config.rollout, config.rollout.server
    placement: Placement = "colocated" if rollout.colocated else "elsewhere"
    if placement == "elsewhere" and rollout.starts_servers and server.first_gpu:
        placement = "same node"
    num_servers = len(rollout.servers) if placement == "elsewhere" else server.count
    return Assumptions(
        gpu=gpu,
        gpu_memory_bytes=(options.gpu_memory_gb or gpu.memory_gb) * 1e9,
        layers=options.layers,
        peak_flops=peak_flops(gpu, config.model.dtype, config.megatron.fp8),
        mfu_share=options.mfu_share,
        node_gpus=options.node_gpus,
        prompt_tokens=options.prompt_tokens or min(256, prompt),
        response_tokens=options.response_tokens or max(1, response // 2),
        miss_share=options.miss_share,
        placement=placement,
        rollout_gpus=options.rollout_gpus or num_servers * server.tensor or gpus,
        rollout_tokens_per_s=options.rollout_tokens_per_s,
    )


def _host_bytes_per_node(case: Scenario, stages: Sequence[StageMemory]) -> float:
    gpus, size = case.layout.gpus, case.assumptions.node_gpus
    by_rank = [stage.host_bytes for stage in stages for _ in range(gpus // len(stages))]
    return max(sum(by_rank[first : first + size]) for first in range(0, gpus, size))


def _sampling_bytes(case: Scenario, stages: Sequence[StageMemory]) -> float:
    """A server, and the weights, gradients and optimizer states that the trainer keeps."""
    if case.assumptions.placement != "colocated":
        return 0.0
    kept_bytes = max(
        s.weights_bytes + s.gradients_bytes + s.optimizer_bytes + s.frozen_bytes for s in stages
    )
    server_bytes = case.config.rollout.server.mem_fraction * case.assumptions.gpu_memory_bytes
    return kept_bytes + server_bytes


def _fits(case: Scenario, stages: Sequence[StageMemory] | None = None) -> bool:
    stages = stages or plan_memory(case, plan_workload(case))
    needed_bytes = max(_sampling_bytes(case, stages), *(stage.total_bytes for stage in stages))
    return needed_bytes <= case.assumptions.gpu_memory_bytes - case.assumptions.reserve_bytes


def _max_data(config: RunConfig) -> int:
    """The samples of an update: more data-parallel ranks would have nothing to do."""
    samples = config.rollout.groups_per_step * config.rollout.samples_per_group
    return samples // config.algorithm.updates_per_batch


def _rank_layouts(configured: Scenario) -> list[LayoutEstimate]:
    """Every layout of these GPUs with the least recomputation that fits, and the configured one."""
    config, assumptions = configured.config, configured.assumptions
    current = (configured.layout, config.megatron.recompute)

    def estimate(layout: Layout, recompute: str) -> LayoutEstimate:
        other = with_values(config, megatron={"recompute": recompute})
        case = replace(configured, layout=layout, config=other)
        workload = plan_workload(case)
        stages = plan_memory(case, workload)
        training, bubble_share = training_time(case, workload, stages)
        phases = [*scoring_times(case, workload), *training]
        return LayoutEstimate(
            layout=layout,
            recompute=recompute,
            memory_bytes=max(stage.total_bytes for stage in stages),
            fits=_fits(case, stages),
            bubble_share=bubble_share,
            training_s=sum(phase.seconds for phase in phases),
            is_configured=(layout, recompute) == current,
        )

    estimates = {}
    models = [configured.hf, *(model.hf for model in configured.frozen)]
    for layout in possible_layouts(
        models, configured.layout.gpus, node_gpus=assumptions.node_gpus, max_data=_max_data(config)
    ):
        for recompute in RECOMPUTE_CHOICES:
            candidate = estimate(layout, recompute)
            if candidate.fits:
                break
        estimates[layout, candidate.recompute] = candidate
    estimates[current] = estimate(*current)
    return sorted(estimates.values(), key=lambda e: (not e.fits, e.training_s, e.memory_bytes))


def _notes(case: Scenario, stages: Sequence[StageMemory], rollout: RolloutMemory) -> list[str]:
    """Caveats that the numbers do not show."""
    config, layout, assumptions = case.config, case.layout, case.assumptions
    notes = []
    if rollout.gpus_per_server != config.rollout.server.tensor:
        notes.append(
            f"rollout.server.tensor = {config.rollout.server.tensor} has no room for the longest "
            f"sequence: planned with {rollout.gpus_per_server} GPUs per server"
        )
    if layout.tensor > assumptions.node_gpus:
        notes.append(
            f"tensor parallel {layout.tensor} exceeds a node of {assumptions.node_gpus} GPUs"
        )
    if config.megatron.optimizer_offload_share:
        gigabytes = _host_bytes_per_node(case, stages) / 1e9
        notes.append(
            f"offload: {gigabytes:,.0f} GB of host memory per node, frozen models included"
        )
    if config.megatron.fp8 != "none":
        notes.append("fp8: GEMMs run at the FP8 peak; memory is counted as of bfloat16")
    if assumptions.layers == "local" and layout.context > 1:
        notes.append("local layers: gathered keys, values and masks (context > 1) are not counted")
    distillation = config.algorithm.distillation
    if distillation.has_engine:
        notes.append(
            f"teacher.engine = {distillation.teacher.engine}: the teacher's engines and their time "
            "are not planned"
        )
    return notes


def choose_layout(
    config: RunConfig, hf: HfConfig, options: PlanOptions, gpus: int
) -> tuple[RunConfig, Plan]:
    """Divide ``gpus`` GPUs between trainer and servers, and choose the trainer's layout.

    On one node, half of the GPUs train; where no layout fits, all of them train and sample in
    turns. Of several nodes, half train. Where nothing fits, ``_SAVINGS`` are tried. Of the layouts
    that fit, the simplest one within ``_EQUAL_TIME_RATIO`` of the fastest is chosen.

    Returns:
        The configuration with ``parallel``, what saves memory, the micro-batch (of as many tokens
        over all context-parallel ranks) and the servers filled in, and its plan, which fits.

    Raises:
        ValueError: Nothing fits, the nodes are not whole, or the GPU is unknown.
    """
    find_gpu(options.gpu)
    node_gpus = options.node_gpus
    if gpus > node_gpus and gpus % node_gpus:
        raise ValueError(
            f"--gpus: must be whole nodes of {node_gpus} GPUs beyond one node, got {gpus}; give "
            f"{gpus // node_gpus * node_gpus}"
        )
    for candidate, placed in _candidates(config, hf, options, gpus):
        if (plan := make_plan(candidate, hf, placed)).fits:
            return candidate, plan
    raise ValueError(
        f"--gpus: {gpus} {options.gpu} cannot train and sample {config.model.path} with responses "
        f"of {config.rollout.max_response_tokens} tokens, not even with recomputation, the "
        "optimizer in host memory or LoRA; give more GPUs, fewer --response-tokens, or a smaller "
        "model"
    )


def _candidates(
    config: RunConfig, hf: HfConfig, options: PlanOptions, gpus: int
) -> Iterator[tuple[RunConfig, PlanOptions]]:
    """Yield configurations with a division and a layout each, the preferred ones first."""
    has_recurrences = bool(targets_of(hf, LoraConfig(rank=1), "sections"))
    for saving, division in product(_SAVINGS, _divisions(gpus, options.node_gpus)):
        trainer_gpus, server_gpus, rollout = division
        divided = with_values(with_values(config, **saving), rollout=rollout)
        elsewhere = gpus - trainer_gpus if gpus > options.node_gpus else None
        placed = replace(options, gpus=trainer_gpus, rollout_gpus=elsewhere)
        try:
            plan = make_plan(divided, hf, placed)
        except NoRoomError:
            continue
        if (tensor := plan.rollout.gpus_per_server) > server_gpus:
            continue
        server = {"tensor": tensor, "count": server_gpus // tensor}
        divided = with_values(divided, rollout={"server": server})
        for estimate in _simplest_first(plan.layouts):
            if divided.model.lora.rank and has_recurrences and estimate.layout.tensor > 1:
                continue  # see check_targets
            divisor = _TOKENS_MULTIPLE * estimate.layout.context
            multiples = -(-config.train.max_tokens_per_micro_batch // divisor)
            candidate = with_values(
                divided,
                parallel=estimate.layout.parallel,
                megatron={"recompute": estimate.recompute},
                train={"max_tokens_per_micro_batch": multiples * _TOKENS_MULTIPLE},
            )
            yield candidate, placed


def _simplest_first(estimates: Sequence[LayoutEstimate]) -> list[LayoutEstimate]:
    """Return the layouts that fit.

    Those nearly as fast as the fastest come first, least divided first, then the others by time.
    """
    fitting = [estimate for estimate in estimates if estimate.fits]
    limit_s = _EQUAL_TIME_RATIO * min((estimate.training_s for estimate in fitting), default=0.0)

    def order(estimate: LayoutEstimate) -> tuple[float, ...]:
        layout = estimate.layout
        if estimate.training_s > limit_s:
            return (1, estimate.training_s)
        return (0, layout.pipeline * layout.virtual, layout.context, layout.tensor)

    return sorted(fitting, key=order)


def _divisions(gpus: int, node_gpus: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the trainer's GPUs, the server GPUs of a node, and the division's ``rollout`` keys."""
    if gpus > node_gpus:
        yield gpus // node_gpus // 2 * node_gpus, node_gpus, {"async_steps": 1}
        return
    if half := gpus // 2:
        yield half, gpus - half, {"async_steps": 1, "server": {"first_gpu": half}}
    server, sync = {"mem_fraction": _COLOCATED_MEM_SHARE}, {"method": "tensor"}
    yield gpus, gpus, {"colocated": True, "weight_sync": sync, "server": server}
