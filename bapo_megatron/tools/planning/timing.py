"""Rough estimates of a step's traffic and time on the assumed hardware.

GEMMs and attention take operations / (GPUs × peak × MFU). A ring over g ranks sends (g − 1)/g of
the whole tensor from each GPU for an all-gather or a reduce-scatter, and twice that for an
all-reduce. Exposed communication comes on top, for each micro-batch, and the bubble of a pipeline
of p stages with v chunks each and m micro-batches makes all of it longer by the factor
1 + (p − 1)/(v·m) (Narayanan et al. 2021).

Left out, being small or hidden: latencies, the sums of loss and objective, those of tied embeddings
between stages, and the gathering of shards for the servers.

Symbols: t, c, p ranks of the tensor, context and pipeline group, d of data × context; n tokens of a
micro-batch on a rank, h hidden size, k key channels, e bytes of an element, L layers of a stage.
"""

from dataclasses import dataclass, replace

from bapo_megatron.policy.mixers.base import FLOAT32_BYTES
from bapo_megatron.tools.planning.memory import (
    RolloutMemory,
    StageMemory,
    adapter_parameters,
    model_parameters,
    visited_parameters,
    waiting_parameters,
)
from bapo_megatron.tools.planning.scenario import (
    Group,
    Scenario,
    Workload,
    plan_workload,
)

ADAM_TRAFFIC_BYTES = 30
"""Read and written for each parameter of a rank's share: gradient 4, master weight, two moments
2 · 12, weight 2."""

LOCAL_TIME_RATIO = 48_394 / 41_430
"""Time of a step with our own layers over that with Transformer Engine's: 0.5B on one H100
(docs/benchmarks/gpu_h100_202611.md)."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase of a step."""

    name: str
    seconds: float
    compute_s: float
    """The part spent on operations (optimizer and decoding: on memory traffic)."""
    messages_s: float
    """The part spent on exposed communication, on files and on copies from host memory."""
    bubble_s: float
    """The part spent waiting for other pipeline stages."""
    sent_bytes: dict[Group, float]
    """What one GPU sends to the others of each group."""


def tensor_bytes(case: Scenario, tokens: int, *, trains: bool) -> float:
    """Return what a micro-batch sends: 2·(2·L + 1) · (t − 1)/t · n·h·e forward.

    A layer's two sums and the embedding's are all-reduces, or with sequence parallel a
    reduce-scatter and an all-gather each, which cost the same. Backward sums gradients likewise;
    sequence parallel then gathers inputs once more, and full recomputation repeats the layers'.
    """
    sums = 2 if case.hf.has_single_blocks else 4
    layout, layers = case.layout, sums * case.hf.num_layers // case.layout.pipeline
    times: float = layers + 2
    if trains:
        times = times * (2.5 if layout.sequence else 2.0) + layers * case.recomputes_all
    return times * (layout.tensor - 1) / layout.tensor * tokens * case.whole_hidden_bytes


def context_bytes(case: Scenario, tokens: int) -> float:
    """Return what context-parallel ranks send of keys and values, and for recurrences."""
    hf, layout = case.hf, case.layout
    sent = sum(mixer.context_channels(hf, layout.tensor, layout.context) for mixer in hf.mixers)
    return sent / layout.pipeline * tokens * case.element_bytes


def pipeline_bytes(case: Scenario, tokens: int) -> float:
    """Return what one direction sends: v · n·h·e / t, where t counts with sequence parallel."""
    chunks = case.layout.virtual if case.layout.pipeline > 1 else 0
    return chunks * tokens * case.hidden_bytes


def expert_bytes(case: Scenario, tokens: int, *, trains: bool) -> float:
    """Return what a micro-batch sends to and from experts: 2 · L · k · n·h·e/s · (x − 1)/x forward.

    x ranks divide the experts, of which each token visits k. Backward sends the gradients likewise,
    and full recomputation repeats the layers.
    """
    experts, layout = case.hf.experts, case.layout
    if experts is None:
        return 0.0
    layers = (case.hf.num_layers - len(experts.dense_layers)) / layout.pipeline
    times = 2 * layers * (1 + trains * (1 + case.recomputes_all))
    share = (layout.expert - 1) / layout.expert
    return times * experts.per_token * tokens * case.hidden_bytes * share


def data_bytes(case: Scenario, parameters: int, ranks: int) -> float:
    """Return what an update sends: (4 + e) · (d − 1)/d for each parameter that d ranks hold.

    The sum of float32 gradients, and the weights that each rank updated.
    """
    size = FLOAT32_BYTES + case.element_bytes
    return size * parameters * (ranks - 1) / ranks


def training_time(
    case: Scenario, work: Workload, stages: list[StageMemory]
) -> tuple[list[PhaseTime], float]:
    """Estimate what the updates of a step take.

    Returns:
        The forward-only passes, forward and backward, and the optimizer; and the bubble's share of
        the time of a pass.
    """
    layout, megatron = case.layout, case.config.megatron
    layers_s, attention_s, forward_s = _forward_times(case, work)
    recompute_s = {"none": 0.0, "selective": attention_s, "full": layers_s}[megatron.recompute]
    # Frozen weights have no gradient; attention has the same as ever.
    frozen_s = forward_s - attention_s if case.config.model.lora.rank else 0.0
    backward_s = 2 * forward_s - frozen_s + recompute_s
    waiting = (layout.pipeline - 1) / (layout.virtual * work.micro_batches)
    phases = []
    for name, passes, trains in (
        ("forward-only", case.passes.forward_only, False),
        ("forward + backward", work.updates_per_step + case.passes.repeated, True),
    ):
        # KV tensors go round the ring, and in the backward pass again, with their gradients.
        rounds = 3 + case.recomputes_all if trains else 1
        sent = _sent_by_pass(case, work.micro_batch_tokens, rounds, trains=trains)
        compute_s, hidden_s = forward_s + trains * backward_s, rounds * attention_s
        times = passes * work.micro_batches
        phases.append(_phase(case, name, times, compute_s, sent, {"context": hidden_s}, waiting))
    # Adam is memory-bound: each rank reads and writes its share of the state.
    largest = max(stages, key=lambda stage: stage.parameters)
    experts, others = largest.trained_experts, largest.trained_parameters
    owned = others / case.layout.replicas + experts / case.layout.expert_replicas
    share, assumptions = megatron.optimizer_offload_share, case.assumptions
    adam_s = (1 - share) * ADAM_TRAFFIC_BYTES * owned / assumptions.reached_memory_bytes_per_s
    # In host memory, taken to be as fast as the link to it: also gradients there, weights back.
    host_bytes = ADAM_TRAFFIC_BYTES + FLOAT32_BYTES + case.element_bytes
    adam_s += share * host_bytes * owned / assumptions.host_link_bytes_per_s
    hidden_s = backward_s * megatron.overlap_grad_reduce + forward_s * megatron.overlap_param_gather
    summed = data_bytes(case, others, layout.replicas)
    summed += data_bytes(case, experts, layout.expert_replicas)
    data_sent: dict[Group, float] = {"data": summed}
    updates = work.updates_per_step
    phases.append(_phase(case, "optimizer", updates, adam_s, data_sent, {"data": hidden_s}, 0.0))
    return phases, waiting / (1 + waiting)


def scoring_times(case: Scenario, work: Workload) -> list[PhaseTime]:
    """Estimate the forward-only pass of each frozen model over the samples of a step.

    Before it, all GPUs copy their weights from host memory at the same time.
    """
    phases, layout = [], case.layout
    waiting = (layout.pipeline - 1) / (layout.virtual * work.micro_batches)
    for model in case.frozen:
        scored = case.of_model(model.hf)
        _, attention_s, forward_s = _forward_times(scored, plan_workload(scored))
        phase = _phase(
            scored,
            f"scoring ({model.key.rpartition('.')[2]})",
            case.config.algorithm.updates_per_batch * work.micro_batches,
            forward_s,
            _sent_by_pass(scored, work.micro_batch_tokens, 1, trains=False),
            {"context": attention_s},
            waiting,
        )
        parameters = max(waiting_parameters(model, layout, s) for s in range(layout.pipeline))
        copy_s = case.element_bytes * parameters / case.assumptions.host_link_bytes_per_s
        total_s, messages_s = phase.seconds + copy_s, phase.messages_s + copy_s
        phases.append(replace(phase, seconds=total_s, messages_s=messages_s))
    return phases


def _forward_times(case: Scenario, work: Workload) -> tuple[float, float, float]:
    """Return the seconds of a micro-batch: in layers, in their attention, and for the pass."""
    reached_flops = case.assumptions.reached_flops * case.layout.gpus * work.micro_batches
    if case.assumptions.layers == "local":
        reached_flops /= LOCAL_TIME_RATIO
    head_s = work.head_flops_per_update / reached_flops
    attention_s = work.attention_flops_per_update / reached_flops
    layers_s = work.forward_flops_per_update / reached_flops - head_s
    # The last stage has the head on top of its layers, and the others wait for it.
    return layers_s, attention_s, layers_s + case.layout.pipeline * head_s


def _sent_by_pass(case: Scenario, tokens: int, rounds: int, *, trains: bool) -> dict[Group, float]:
    """Return the bytes that one GPU sends for a micro-batch, with ``rounds`` of KV tensors."""
    sent: dict[Group, float] = {
        "tensor": tensor_bytes(case, tokens, trains=trains),
        "context": rounds * context_bytes(case, tokens),
        "pipeline": (1 + trains) * pipeline_bytes(case, tokens),
    }
    if case.layout.expert > 1:
        sent["expert"] = expert_bytes(case, tokens, trains=trains)
    return sent


def _phase(
    case: Scenario,
    name: str,
    times: float,
    compute_s: float,
    sent: dict[Group, float],
    hidden_s: dict[Group, float],
    waiting: float,
) -> PhaseTime:
    """Add up a phase of ``times`` equal parts; only what exceeds ``hidden_s`` costs time."""
    links_s = {group: size / case.link_bytes_per_s(group) for group, size in sent.items()}
    messages_s = sum(max(0.0, s - hidden_s.get(group, 0.0)) for group, s in links_s.items())
    parts = (times * compute_s, times * messages_s, times * (compute_s + messages_s) * waiting)
    return PhaseTime(name, sum(parts), *parts, {group: times * b for group, b in sent.items()})


def rollout_time(case: Scenario, work: Workload, memory: RolloutMemory) -> tuple[PhaseTime, float]:
    """Estimate generation; also returns the tokens per second of one rollout GPU.

    A decoding step reads the weights and the KV cache of the running sequences, as many as fit and
    as there are, reads and writes their states, and computes two operations per parameter and
    sequence; the slower of the two counts. Without partial rollouts a step ends with its longest
    response, decoded alone; with ``partial_tokens``, after so many tokens.
    """
    assumptions, rollout = case.assumptions, case.config.rollout
    rate, bandwidth = assumptions.rollout_tokens_per_s, assumptions.reached_memory_bytes_per_s
    if rate is None:
        servers = max(1, assumptions.rollout_gpus // memory.gpus_per_server)
        limit = rollout.server.max_running_requests or memory.mean_sequences
        running = max(1, min(memory.mean_sequences, limit, -(-work.samples_per_step // servers)))
        context = assumptions.prompt_tokens + assumptions.response_tokens / 2
        weights = _read_bytes(case, memory, running)
        read = weights + running * (context * memory.kv_bytes_per_token + 2 * memory.state_bytes)
        operations = 2 * visited_parameters(case.hf) * running / memory.gpus_per_server
        decoding_s = max(read / bandwidth, operations / assumptions.reached_flops)
        rate = running / decoding_s / memory.gpus_per_server
    seconds = work.response_tokens_per_step / (rate * assumptions.rollout_gpus)
    if not rollout.partial or rollout.oversample_groups == 0:
        alone_s = _read_bytes(case, memory, 1) / bandwidth
        longest = rollout.partial_tokens or rollout.max_response_tokens
        seconds = max(seconds, longest * alone_s)
    return PhaseTime("rollout", seconds, seconds, 0.0, 0.0, {}), rate


def _read_bytes(case: Scenario, memory: RolloutMemory, sequences: int) -> float:
    """Weights that one GPU of a server reads to decode a token of each sequence."""
    share = visited_parameters(case.hf, sequences) / model_parameters(case.hf)
    return memory.weights_bytes * share


def weight_sync_time(case: Scenario) -> PhaseTime:
    """Estimate a sync of all weights, or of the adapters alone.

    With ``disk`` rank 0 writes them to the shared file system and the servers read them. Otherwise
    they pass once through rank 0's link to the servers, which pass them on to each other meanwhile:
    the network, or NVLink where the GPUs of the trainer and of the rollout are one node. A GPU that
    trains and samples in turns reads and writes them in its own memory.
    """
    assumptions = case.assumptions
    size = case.element_bytes * model_parameters(case.hf)
    if case.config.sends_adapters:
        size = FLOAT32_BYTES * adapter_parameters(case.hf, case.config.model.lora)
    if case.config.rollout.weight_sync.method == "disk":
        seconds = 2 * size / assumptions.disk_bytes_per_s
    elif assumptions.placement == "colocated" and case.layout.gpus == 1:
        seconds = 2 * size / assumptions.reached_memory_bytes_per_s
    else:
        is_one_node = (
            assumptions.placement != "elsewhere"
            or case.layout.gpus + assumptions.rollout_gpus <= assumptions.node_gpus
        )
        seconds = size / assumptions.link_bytes_per_s(within_node=is_one_node)
    return PhaseTime("weight sync", seconds, 0.0, seconds, 0.0, {})
