"""How long each phase of a step takes, by the assumptions of ``hardware``.

Time of products and attention = operations / (GPUs × peak × MFU). Messages that nothing hides come
on top, for each micro-batch, and a pipeline of p stages with v chunks each and m micro-batches
makes all of it longer by the bubble, 1 + (p − 1)/(v·m) (Narayanan et al. 2021).

Every collective of a training step, with its bytes and its time.

A ring moves (g − 1)/g of the whole tensor through each GPU for an all-gather or a reduce-scatter
over g ranks, and twice that for an all-reduce; latencies are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.planning.layout import (
    embedding_parameters,
    model_parameters,
    stage_parameters,
)
from bapo_megatron.planning.memory import ELEMENT_BYTES, FLOAT32_BYTES

if TYPE_CHECKING:
    from bapo_megatron.config.megatron import MegatronConfig
    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.planning.hardware import Assumptions
    from bapo_megatron.planning.layout import Layout
    from bapo_megatron.planning.memory import RolloutMemory, StageMemory
    from bapo_megatron.planning.workload import Workload
    from bapo_megatron.policy.hf_config import HfConfig


Operation = Literal["all-gather", "reduce-scatter", "all-reduce", "send"]
Group = Literal["tensor", "context", "pipeline", "data"]
Hidden = Literal["nothing", "attention", "backward", "forward"]
Phase = Literal["forward", "backward", "update", "sync"]
"""When: in each forward pass over a micro-batch, in its backward pass, once per update, or once per
step when the servers get new weights."""

PARTIALS_BYTES = 4 * FLOAT32_BYTES
"""Of one response token in the loss stage's all-gather (``ops.logprob``)."""

INT64_BYTES = 8


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of message."""

    name: str
    group: Group
    operation: Operation
    phase: Phase
    count: int
    """How often in that phase, on one rank (of the stage that has most)."""
    tensor_bytes: float
    """Of the whole tensor each time: what is gathered, reduced or sent."""
    ranks: int
    within_node: bool
    seconds: float
    """All ``count`` of them, at the assumed link."""
    hidden_by: Hidden = "nothing"
    """What runs meanwhile; only what is longer than that costs time."""

    @property
    def bytes_sent(self) -> float:
        """What one GPU sends in the phase."""
        return self.count * sent_bytes(self.operation, self.tensor_bytes, self.ranks)


def sent_bytes(operation: Operation, tensor_bytes: float, ranks: int) -> float:
    """Return what each GPU of a ring sends."""
    if operation == "send":
        return tensor_bytes
    share = (ranks - 1) / ranks
    return tensor_bytes * share * (2 if operation == "all-reduce" else 1)


@dataclass(frozen=True, slots=True)
class Messages:
    """Makes the collectives of one layout."""

    config: RunConfig
    hf: HfConfig
    layout: Layout
    megatron: MegatronConfig
    workload: Workload
    assumptions: Assumptions

    def all(self) -> list[Collective]:
        """Every collective of a step that has two ranks or more."""
        listed = [
            *self._tensor(),
            *self._ends(),
            *self._context(),
            *self._pipeline(),
            *self._loss(),
            *self._data(),
            *self._sync(),
        ]
        return [collective for collective in listed if collective.ranks > 1]

    def per_step(self, collective: Collective) -> float:
        """How many times its phase's ``count`` a step has it."""
        work = self.workload
        if collective.phase == "sync":
            return 1.0
        if collective.phase == "update":
            return float(work.updates_per_step)
        backward = work.updates_per_step * work.micro_batches
        if collective.phase == "backward":
            return float(backward)
        recomputed = backward if self.is_recomputed(collective) else 0
        return work.forward_passes_per_step * work.micro_batches + backward + recomputed

    def is_recomputed(self, collective: Collective) -> bool:
        """Whether a backward pass repeats it: what lies within layers, with ``full``."""
        within_layers = collective.phase == "forward" and collective.name.startswith("layers")
        return self.megatron.recompute == "full" and within_layers

    def _make(
        self,
        name: str,
        group: Group,
        operation: Operation,
        phase: Phase,
        count: int,
        tensor_bytes: float,
        hidden_by: Hidden = "nothing",
    ) -> Collective:
        layout = self.layout
        ranks = {
            "tensor": layout.tensor,
            "context": layout.context,
            "pipeline": layout.pipeline,
            "data": layout.replicas,  # gradients are reduced over context × data
        }[group]
        within_node = layout.within_node(group, self.assumptions.node_gpus)
        bandwidth = self.assumptions.link_bytes_per_s(within_node=within_node)
        seconds = count * sent_bytes(operation, tensor_bytes, ranks) / bandwidth
        return Collective(
            name,
            group,
            operation,
            phase,
            count,
            tensor_bytes,
            ranks,
            within_node,
            seconds,
            hidden_by,
        )

    @property
    def _element_bytes(self) -> int:
        return ELEMENT_BYTES[self.config.model.dtype]

    @property
    def _hidden(self) -> float:
        """The hidden states of a micro-batch on a context-parallel rank: n·h·e bytes."""
        tokens = self.workload.micro_batch_tokens
        return float(tokens * self.hf.hidden_size * self._element_bytes)

    @property
    def _stage_layers(self) -> int:
        return self.hf.num_layers // self.layout.pipeline

    def _tensor(self) -> list[Collective]:
        """Two sums per layer over the hidden states [n, h], of attention and MLP; so backward.

        Sequence parallel makes of an all-reduce a reduce-scatter and an all-gather, which cost the
        same together, and gathers the inputs of the two first products again for their weights'
        gradients.
        """
        twice = 2 * self._stage_layers
        if not self.layout.sequence:
            return [
                self._make("layers: sums", "tensor", "all-reduce", "forward", twice, self._hidden),
                self._make(
                    "layers: grads", "tensor", "all-reduce", "backward", twice, self._hidden
                ),
            ]
        return [
            self._make("layers: inputs", "tensor", "all-gather", "forward", twice, self._hidden),
            self._make("layers: sums", "tensor", "reduce-scatter", "forward", twice, self._hidden),
            self._make(
                "layers: in + grads", "tensor", "all-gather", "backward", 2 * twice, self._hidden
            ),
            self._make(
                "layers: grads", "tensor", "reduce-scatter", "backward", twice, self._hidden
            ),
        ]

    def _ends(self) -> list[Collective]:
        """Sums over the vocabulary's parts: of the embedding, and of the head's gradients.

        With ``ops.logits_chunk_tokens`` the latter are float32.
        """
        sums: Operation = "reduce-scatter" if self.layout.sequence else "all-reduce"
        gradient = self._hidden
        if self.config.ops.logits_chunk_tokens:
            gradient *= FLOAT32_BYTES / self._element_bytes
        ends = [
            self._make("embedding", "tensor", sums, "forward", 1, self._hidden),
            self._make("head: grads", "tensor", sums, "backward", 1, gradient),
        ]
        if self.layout.sequence:
            # The head gathers its input again for its weight's gradient, unless it is chunked.
            again = 0 if self.config.ops.logits_chunk_tokens else 1
            ends += [
                self._make("head: inputs", "tensor", "all-gather", "forward", 1, self._hidden),
                self._make(
                    "ends: in + grads", "tensor", "all-gather", "backward", 1 + again, self._hidden
                ),
            ]
        return ends

    def _context(self) -> list[Collective]:
        """Keys and values of all ranks go round; backward again, with their gradients."""
        layers, tokens = self._stage_layers, self.workload.micro_batch_tokens
        channels = self.hf.num_kv_heads * self.hf.head_dim // self.layout.tensor
        whole = float(self.layout.context * tokens * 2 * channels * self._element_bytes)
        name = "layers: K, V"
        return [
            self._make(name, "context", "all-gather", "forward", layers, whole, "attention"),
            self._make(
                f"{name}, grads",
                "context",
                "all-gather",
                "backward",
                2 * layers,
                whole,
                "attention",
            ),
        ]

    def _pipeline(self) -> list[Collective]:
        """Hidden states to the next chunk's rank, gradients back."""
        hidden = self._hidden / self.layout.sequence_ranks
        virtual = self.layout.virtual
        return [
            self._make("stages: hidden", "pipeline", "send", "forward", virtual, hidden),
            self._make("stages: grads", "pipeline", "send", "backward", virtual, hidden),
        ]

    def _loss(self) -> list[Collective]:
        """One all-gather of four numbers per response token, one all-reduce of the table."""
        response_share = self.assumptions.response_tokens / (
            self.assumptions.response_tokens + self.assumptions.prompt_tokens
        )
        response_tokens = self.workload.micro_batch_tokens * response_share
        gathered = self.layout.tensor * PARTIALS_BYTES * response_tokens
        messages = [self._make("loss: [T, 4]", "tensor", "all-gather", "forward", 1, gathered)]
        return messages + self._objective()

    def _objective(self) -> list[Collective]:
        """What the objective sums up over all tokens (``trainer.loss_stage``)."""
        loaded, rollout = load_objective(self.config.algorithm), self.config.rollout
        responses = rollout.groups_per_step * rollout.samples_per_group
        numbers = {"objective: table": loaded.statistic_size}
        if loaded.objective.needs == "response":
            numbers["objective: table"] = responses
        if loaded.objective.selects_tokens:
            numbers["objective: selected"] = responses
        per_batch = loaded.objective.needs == "micro_batch"
        times = self.workload.micro_batches if per_batch else 1
        return [
            self._make(name, "data", "all-reduce", "update", times, INT64_BYTES * count)
            for name, count in numbers.items()
            if count
        ]

    def _data(self) -> list[Collective]:
        """float32 gradients once per update, and the weights that the ranks updated."""
        parameters = max(
            stage_parameters(self.hf, self.layout, stage) for stage in range(self.layout.pipeline)
        )
        gradients, weights = FLOAT32_BYTES * parameters, self._element_bytes * parameters
        megatron = self.megatron
        meanwhile: Hidden = "backward" if megatron.overlap_grad_reduce else "nothing"
        messages = []
        if not megatron.distributed_optimizer:
            messages.append(
                self._make("gradients", "data", "all-reduce", "update", 1, gradients, meanwhile)
            )
        else:
            gathers: Hidden = "forward" if megatron.overlap_param_gather else "nothing"
            messages += [
                self._make(
                    "gradients", "data", "reduce-scatter", "update", 1, gradients, meanwhile
                ),
                self._make("weights", "data", "all-gather", "update", 1, weights, gathers),
            ]
        if self.hf.tied_embeddings and self.layout.pipeline > 1:
            tied = FLOAT32_BYTES * embedding_parameters(self.hf, self.layout.tensor)
            messages.append(
                self._make("tied embedding", "pipeline", "all-reduce", "update", 1, tied)
            )
        return messages

    def _sync(self) -> list[Collective]:
        """The replica of rank 0 gathers every weight, stage by stage, on its first stage."""
        weights = self._element_bytes * model_parameters(self.hf)
        elsewhere = weights * (1 - 1 / self.layout.pipeline) / self.layout.tensor
        return [
            self._make("weight sync", "tensor", "all-gather", "sync", 1, weights),
            self._make("weight sync", "pipeline", "send", "sync", 1, elsewhere),
        ]


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
