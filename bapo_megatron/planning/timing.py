"""How long each phase of a step takes, by the assumptions of ``hardware``.

Time of products and attention = operations / (GPUs × peak × MFU). Messages that nothing hides come
on top, for each micro-batch, and a pipeline of p stages with v chunks each and m micro-batches
makes all of it longer by the bubble, 1 + (p − 1)/(v·m) (Narayanan et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bapo_megatron.planning.memory import ELEMENT_BYTES
from bapo_megatron.planning.parameters import model_parameters

if TYPE_CHECKING:
    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.planning.communication import Collective, Messages
    from bapo_megatron.planning.hardware import Assumptions
    from bapo_megatron.planning.memory import RolloutMemory, StageMemory
    from bapo_megatron.policy.hf_config import HfConfig

ADAM_TRAFFIC_BYTES = 30
"""Read and written for each parameter of a rank's share: gradient 4, master weight, two moments
2 · 12, weight 2."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase of a step."""

    name: str
    seconds: float
    compute_s: float
    """Of it, operations (or, of the optimizer and of decoding, memory traffic)."""
    messages_s: float
    """Of it, messages and files that nothing hides."""
    bubble_s: float
    """Of it, waiting for other pipeline stages."""


@dataclass(frozen=True, slots=True)
class TrainingTime:
    """The phases of a step that depend on the layout."""

    forward: PhaseTime
    forward_backward: PhaseTime
    optimizer: PhaseTime
    bubble_share: float
    """Of the time of a pass."""

    @property
    def seconds(self) -> float:
        """All of them, per step."""
        return self.forward.seconds + self.forward_backward.seconds + self.optimizer.seconds


def training_time(messages: Messages, stages: list[StageMemory]) -> TrainingTime:
    """Estimate what the updates of a step take.

    Args:
        messages: The collectives of the layout.
        stages: The memory of its stages.
    """
    work, layout = messages.workload, messages.layout
    updates = work.updates_per_step
    # The last stage has the head on top of its layers, and the others wait for it.
    head_s = layout.pipeline * _compute_s(messages, work.head_flops_per_update)
    forward_s = _layers_s(messages) + head_s
    backward_s = 2 * forward_s + _recompute_s(messages)
    attention_s = _compute_s(messages, work.attention_flops_per_update)
    hiding = {
        "nothing": 0.0,
        "attention": attention_s,
        "forward": forward_s,
        "backward": backward_s,
    }
    listed = messages.all()
    repeated = [c for c in listed if messages.is_recomputed(c)]
    forward_messages_s = _exposed_s(listed, "forward", hiding)
    backward_messages_s = _exposed_s(repeated, "forward", hiding)
    backward_messages_s += _exposed_s(listed, "backward", hiding | {"attention": 2 * attention_s})
    m = work.micro_batches
    waiting = (layout.pipeline - 1) / (layout.virtual * m)
    passes = work.forward_passes_per_step
    update_messages_s = _exposed_s(listed, "update", hiding)
    return TrainingTime(
        forward=_phase(
            "forward-only", passes * m * forward_s, passes * m * forward_messages_s, waiting
        ),
        forward_backward=_phase(
            "forward + backward",
            updates * m * (forward_s + backward_s),
            updates * m * (forward_messages_s + backward_messages_s),
            waiting,
        ),
        optimizer=_phase(
            "optimizer",
            updates * _optimizer_s(messages, stages),
            updates * update_messages_s,
            0.0,
        ),
        bubble_share=waiting / (1 + waiting),
    )


def rollout_time(
    config: RunConfig, memory: RolloutMemory, messages: Messages, hf: HfConfig
) -> tuple[PhaseTime, float]:
    """Estimate generation; also returns the tokens per second of one rollout GPU.

    A decoding step reads the weights and the keys and values of the running sequences, and computes
    two operations per parameter and sequence; the slower of the two counts. Without partial
    rollouts a step ends with its longest response, decoded alone at the end.
    """
    assumptions, work = messages.assumptions, messages.workload
    rate = assumptions.rollout_tokens_per_s
    if rate is None:
        rate = _decoding_rate(config, memory, assumptions, hf, work.samples_per_step)
    seconds = work.response_tokens_per_step / (rate * assumptions.rollout_gpus)
    if not config.rollout.partial or config.rollout.oversample_groups == 0:
        alone_s = memory.weights_bytes / (assumptions.memory_bytes_per_s * assumptions.memory_share)
        seconds = max(seconds, config.rollout.max_response_tokens * alone_s)
    return PhaseTime("rollout", seconds, seconds, 0.0, 0.0), rate


def weight_sync_time(
    config: RunConfig, hf: HfConfig, gpus: int, assumptions: Assumptions
) -> PhaseTime:
    """Estimate a push of all weights.

    With ``disk`` rank 0 writes them to the shared file system and the servers read them. Else they
    pass once through rank 0's link to the servers, which pass them on to each other meanwhile: the
    network, or NVLink where all ``gpus`` of the trainer and those of the rollout are one node.
    Gathering the shards goes on beside it.
    """
    size = ELEMENT_BYTES[config.model.dtype] * model_parameters(hf)
    if config.rollout.weight_sync.method == "disk":
        seconds = 2 * size / assumptions.disk_bytes_per_s
    else:
        is_one_node = gpus + assumptions.rollout_gpus <= assumptions.node_gpus
        seconds = size / assumptions.link_bytes_per_s(within_node=is_one_node)
    return PhaseTime("weight sync", seconds, 0.0, seconds, 0.0)


def _layers_s(messages: Messages) -> float:
    """Of one micro-batch: a stage's layers, forward."""
    work = messages.workload
    return _compute_s(messages, work.forward_flops_per_update - work.head_flops_per_update)


def _compute_s(messages: Messages, flops_per_update: float) -> float:
    """Of one micro-batch on one rank, its share of an update's operations."""
    work, assumptions = messages.workload, messages.assumptions
    rank_flops = flops_per_update / messages.layout.gpus / work.micro_batches
    return rank_flops / (assumptions.peak_flops * assumptions.mfu_share)


def _recompute_s(messages: Messages) -> float:
    """Of one micro-batch: the forward pass of the layers, or of their attention, once more."""
    work = messages.workload
    if messages.megatron.recompute == "full":
        return _layers_s(messages)
    if messages.megatron.recompute == "selective":
        return _compute_s(messages, work.attention_flops_per_update)
    return 0.0


def _exposed_s(listed: list[Collective], phase: str, hiding: dict[str, float]) -> float:
    return sum(max(0.0, c.seconds - hiding[c.hidden_by]) for c in listed if c.phase == phase)


def _optimizer_s(messages: Messages, stages: list[StageMemory]) -> float:
    """Adam is bound by memory: each rank reads and writes its share of the state."""
    ranks = messages.layout.replicas if messages.megatron.distributed_optimizer else 1
    share = max(stage.parameters for stage in stages) / ranks
    assumptions = messages.assumptions
    bandwidth = assumptions.memory_bytes_per_s * assumptions.memory_share
    return share * ADAM_TRAFFIC_BYTES / bandwidth


def _phase(name: str, compute_s: float, messages_s: float, waiting: float) -> PhaseTime:
    bubble_s = (compute_s + messages_s) * waiting
    return PhaseTime(name, compute_s + messages_s + bubble_s, compute_s, messages_s, bubble_s)


def _decoding_rate(
    config: RunConfig,
    memory: RolloutMemory,
    assumptions: Assumptions,
    hf: HfConfig,
    samples: int,
) -> float:
    """Tokens per second of one rollout GPU, with as many sequences as fit and as there are."""
    servers = max(1, assumptions.rollout_gpus // memory.gpus_per_server)
    limit = config.rollout.server.max_running_requests or memory.mean_sequences
    running = max(1, min(memory.mean_sequences, limit, -(-samples // servers)))
    context = assumptions.prompt_tokens + assumptions.response_tokens / 2
    read = memory.weights_bytes + running * context * memory.kv_bytes_per_token
    reading_s = read / (assumptions.memory_bytes_per_s * assumptions.memory_share)
    operations = 2 * model_parameters(hf) * running / memory.gpus_per_server
    computing_s = operations / (assumptions.peak_flops * assumptions.mfu_share)
    return running / max(reading_s, computing_s) / memory.gpus_per_server
