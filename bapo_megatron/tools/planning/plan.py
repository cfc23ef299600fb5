"""A plan: what a configuration needs and how long a step takes, beside every other layout.

``choose_layout`` also decides which GPUs train and which sample, for ``init``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bapo_megatron.config.check import check_settings
from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.config.rollout import ServerConfig
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

_EQUAL_TIME_RATIO = 1.1
"""Estimates that differ by at most this factor are taken as equal."""
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {
        "model": {"lora": {"rank": 32}},
        "optimizer": {"lr": 1e-5},
        "rollout": {"weight_sync": {"verify": 10}},  # its default with adapters
    },
}
"""Changes to a configuration by what it trains: all weights or adapters."""
MIN_RESPONSE_TOKENS = 1024
_TOKENS_MULTIPLE = 128
"""Micro-batches are multiples of this, which every layout divides (``packing_multiples``)."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of the command; its help says what None stands for."""

    gpus: int | None = None
    trainer_gpus: int | None = None
    gpu: str = "H100"
    gpu_memory_gb: float | None = None
    host_memory_gb: float | None = None
    host_gb_per_s: float = 25.0
    node_gpus: int = 8
    mfu_share: float = 0.4
    layers: LayerKind = "transformer-engine"
    prompt_tokens: int | None = None
    response_tokens: int | None = None
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
    """Trainer and rollout GPUs together, colocated ones once."""
    trainer_gpus: int
    """Those that train."""
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
    trainer_gpus = _trainer_gpus(config, options)
    layout = configured_layout(config.parallel, trainer_gpus)
    check_division(hf, config.parallel)
    specs = frozen_specs(config, hf, frozen or {})
    passes = plan_passes(config.algorithm, options.miss_share)

    def on(layout: Layout) -> Scenario:
        assumptions = make_assumptions(config, layout.gpus, options)
        return Scenario(config, hf, layout, assumptions, passes, specs)

    case = on(layout)
    if trainer_gpus is None:
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
    all_gpus = layout.gpus + assumptions.rollout_gpus * config.rollout.has_own_gpus
    return Plan(
        name=config.name,
        model_type=hf.model_type,
        model_parameters=model_parameters(hf),
        gpus=all_gpus,
        trainer_gpus=layout.gpus,
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


def _trainer_gpus(config: RunConfig, options: PlanOptions) -> int | None:
    """Return the GPUs that train, or None for as few as fit: of all, those that do not sample.

    Where neither the options nor the configuration say how many sample, half of them do.
    """
    gpus, trainer_gpus = options.gpus, options.trainer_gpus
    if gpus is None:
        return trainer_gpus
    if not config.rollout.has_own_gpus:
        if trainer_gpus not in (None, gpus):
            raise ValueError(
                f"--trainer-gpus: must be all {gpus} of --gpus where they sample, too, got "
                f"{trainer_gpus}; leave it out"
            )
        return gpus
    server_gpus = _server_gpus(config) or max(1, gpus // 2)
    num_training = trainer_gpus or gpus - server_gpus
    if not 0 < num_training < gpus:
        others = f"{trainer_gpus} that train" if trainer_gpus else f"{server_gpus} of the servers"
        raise ValueError(
            f"--gpus: must exceed the {others}, got {gpus}; give more, or share them "
            "(rollout.colocated=true)"
        )
    return num_training


def _placement(config: RunConfig) -> Placement:
    rollout = config.rollout
    if rollout.colocated:
        return "colocated"
    has_node = rollout.starts_servers and rollout.server.first_gpu
    return "same node" if has_node else "elsewhere"


def _server_gpus(config: RunConfig) -> int:
    """Return the GPUs of the servers, 0 if the configuration does not say."""
    rollout, is_elsewhere = config.rollout, _placement(config) == "elsewhere"
    num_servers = len(rollout.servers) if is_elsewhere else rollout.server.count
    return num_servers * rollout.server.tensor


def make_assumptions(config: RunConfig, gpus: int, options: PlanOptions) -> Assumptions:
    """Fill in what neither the configuration nor the options say; ``gpus`` GPUs train.

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
    placement, host_memory_gb = _placement(config), options.host_memory_gb
    others = (options.gpus or gpus) - gpus if placement == "elsewhere" else 0
    return Assumptions(
        gpu=gpu,
        gpu_memory_bytes=(options.gpu_memory_gb or gpu.memory_gb) * 1e9,
        host_memory_bytes=None if host_memory_gb is None else host_memory_gb * 1e9,
        host_link_bytes_per_s=options.host_gb_per_s * 1e9,
        layers=options.layers,
        peak_flops=peak_flops(gpu, config.model.dtype, config.megatron.fp8),
        mfu_share=options.mfu_share,
        node_gpus=options.node_gpus,
        prompt_tokens=options.prompt_tokens or min(256, prompt),
        response_tokens=options.response_tokens or max(1, response // 2),
        miss_share=options.miss_share,
        placement=placement,
        rollout_gpus=others or _server_gpus(config) or gpus,
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
    assumptions, host_memory_bytes = case.assumptions, case.assumptions.host_memory_bytes
    if host_memory_bytes is not None and _host_bytes_per_node(case, stages) > host_memory_bytes:
        return False
    return needed_bytes <= assumptions.gpu_memory_bytes - assumptions.reserve_bytes


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
    config: RunConfig,
    hf: HfConfig,
    options: PlanOptions,
    gpus: int,
    *,
    modes: Sequence[str] = tuple(MODES),
    min_response_tokens: int = MIN_RESPONSE_TOKENS,
) -> tuple[RunConfig, Plan]:
    """Divide ``gpus`` GPUs between trainer and servers, and choose the trainer's layout.

    On one node, half of the GPUs train; where no layout fits, all of them train and sample in
    turns. Of several nodes, half train. Where nothing fits, ``_savings`` are tried, then the next
    of ``modes``, then half the response length. Of the layouts that fit, the simplest one within
    ``_EQUAL_TIME_RATIO`` of the fastest is chosen; of savings too where GPUs take turns.

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
    lengths = [config.rollout.max_response_tokens]
    while (half := lengths[-1] // 2) >= min_response_tokens:
        lengths.append(half)
    for response_tokens, mode in product(lengths, modes):
        shorter = with_values(config, rollout={"max_response_tokens": response_tokens})
        fitting = _fitting(with_values(shorter, **MODES[mode]), hf, options, gpus)
        if (first := next(fitting, None)) is None:
            continue
        if not first[0].rollout.colocated:
            return first
        in_turns = [first, *(c for c in fitting if c[0].rollout.colocated)]
        limit_s = _EQUAL_TIME_RATIO * min(plan.step_s for _, plan in in_turns)
        return next(choice for choice in in_turns if choice[1].step_s <= limit_s)
    raise ValueError(
        f"--gpus: {gpus} {options.gpu} cannot train and sample {config.model.path} "
        f"({model_parameters(hf):,} parameters, in the trainer and in servers) with responses of "
        f"{lengths[-1]} tokens, not even with recomputation, the optimizer in host memory"
        f"{' or LoRA' * ('lora' in modes)}; give more GPUs, fewer --response-tokens, or a smaller "
        "model"
    )


def _savings(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield what saves memory, from what costs least with large batches."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    few: dict[str, Any] = {"train": {"max_tokens_per_micro_batch": longest}}
    chunked = {**few, "ops": {"logits_chunk_tokens": 2048}}
    host, again = {"optimizer_offload_share": 1.0}, {"recompute": "full"}
    yield from ({}, few, chunked)
    yield from ({**chunked, "megatron": megatron} for megatron in (host, again, host | again))


def _fitting(
    config: RunConfig, hf: HfConfig, options: PlanOptions, gpus: int
) -> Iterator[tuple[RunConfig, Plan]]:
    """Yield the preferred layout of each division with each of ``_savings``, where one fits."""
    for saving, division in product(_savings(config), _divisions(gpus, options.node_gpus)):
        trainer_gpus, server_gpus, rollout = division
        divided = with_values(with_values(config, **saving), rollout=rollout)
        placed = replace(options, gpus=gpus, trainer_gpus=trainer_gpus)
        try:
            plan = make_plan(divided, hf, placed)
            if (tensor := plan.rollout.gpus_per_server) > server_gpus:
                continue
        except NoRoomError:
            continue
        server = {"tensor": tensor, "count": server_gpus // tensor}
        divided = with_values(divided, rollout={"server": server})
        if divided.rollout.colocated:
            divided = _with_fraction(divided, plan, fills=False)
            plan = make_plan(divided, hf, placed)
        for candidate in _candidates(divided, hf, plan):
            if (plan := make_plan(candidate, hf, placed)).fits:
                if divided.rollout.colocated:
                    candidate = _with_fraction(candidate, plan, fills=True)
                    plan = make_plan(candidate, hf, placed)
                yield candidate, plan
                break


def _candidates(divided: RunConfig, hf: HfConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yield a configuration with each of its plan's layouts, the preferred ones first."""
    has_recurrences = bool(targets_of(hf, LoraConfig(rank=1), "sections"))
    for estimate in _simplest_first(plan.layouts):
        if divided.model.lora.rank and has_recurrences and estimate.layout.tensor > 1:
            continue  # see check_targets
        if estimate.recompute != "none" == divided.megatron.recompute:
            continue  # a later saving
        divisor = _TOKENS_MULTIPLE * estimate.layout.context
        multiples = -(-divided.train.max_tokens_per_micro_batch // divisor)
        yield with_values(
            divided,
            parallel=estimate.layout.parallel,
            megatron={"recompute": estimate.recompute},
            train={"max_tokens_per_micro_batch": multiples * _TOKENS_MULTIPLE},
        )


def _with_fraction(config: RunConfig, plan: Plan, *, fills: bool) -> RunConfig:
    """Set ``mem_fraction``, in hundredths: to what holds the weights and one longest sequence.

    With ``fills`` to what the trainer leaves, but at most the default.
    """
    memory, assumptions, server = plan.rollout, plan.assumptions, config.rollout.server
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    percent_bytes = assumptions.gpu_memory_bytes / 100
    cache_bytes = (longest + 1) * memory.kv_bytes_per_token  # a server has whole tokens
    needed_bytes = memory.weights_bytes + cache_bytes + memory.state_bytes
    percent = math.ceil(needed_bytes / percent_bytes)
    if fills:
        kept_bytes = plan.sampling_bytes + assumptions.reserve_bytes
        free = 100 * (1 + server.mem_fraction) - kept_bytes / percent_bytes
        percent = max(percent, min(round(100 * ServerConfig().mem_fraction), math.floor(free)))
    return with_values(config, rollout={"server": {"mem_fraction": percent / 100}})


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
    yield gpus, gpus, {"colocated": True, "weight_sync": {"method": "tensor"}}
