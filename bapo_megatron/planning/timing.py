"""The messages of a step and the time of its phases, estimated from the ``hardware`` assumed.

Time of products and attention = operations / (GPUs × peak × MFU). Messages that nothing hides come
on top, for each micro-batch, and a pipeline of p stages with v chunks each and m micro-batches
makes all of it longer by the bubble, 1 + (p − 1)/(v·m) (Narayanan et al. 2021).

A ring moves (g − 1)/g of the whole tensor through each GPU for an all-gather or a reduce-scatter
over g ranks, and twice that for an all-reduce; latencies are left out.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.config.megatron import MegatronConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.planning.hardware import Assumptions
from bapo_megatron.planning.layout import (
    Layout,
    embedding_parameters,
    model_parameters,
    stage_parameters,
)
from bapo_megatron.planning.memory import (
    ELEMENT_BYTES,
    FLOAT32_BYTES,
    RolloutMemory,
    StageMemory,
)
from bapo_megatron.planning.workload import Workload
from bapo_megatron.policy.hf_config import HfConfig

Operation = Literal["all-gather", "reduce-scatter", "all-reduce", "send"]
Group = Literal["tensor", "context", "pipeline", "data"]
Hidden = Literal["nothing", "attention", "backward", "forward"]
Phase = Literal["forward", "backward", "update", "sync"]
"""When: in each forward pass over a micro-batch, in its backward pass, once per update, or once per
step when the servers get new weights."""

PARTIALS_BYTES = 4 * FLOAT32_BYTES
"""Bytes per response token in the loss stage's all-gather (``ops.logprob``)."""

INT64_BYTES = 8

ADAM_TRAFFIC_BYTES = 30
"""Read and written for each parameter of a rank's share: gradient 4, master weight, two moments
2 · 12, weight 2."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of message."""

    name: str
    group: Group
    operation: Operation
    phase: Phase
    count: int
    """Times per phase on one rank (of the stage that has most)."""
    tensor_bytes: float
    """Size of the whole tensor that is gathered, reduced or sent each time."""
    ranks: int
    within_node: bool
    seconds: float
    """Time of all ``count`` of them on the assumed link."""
    hidden_by: Hidden = "nothing"
    """The work that runs meanwhile; only the excess over it costs time."""

    @property
    def bytes_sent(self) -> float:
        """Bytes that one GPU sends in the phase."""
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
        """How many times a step has its phase's ``count``."""
        work = self.workload
        backward = work.updates_per_step * work.micro_batches
        recomputed = backward if self.is_recomputed(collective) else 0
        return {
            "sync": 1.0,
            "update": float(work.updates_per_step),
            "backward": float(backward),
            "forward": work.forward_passes_per_step * work.micro_batches + backward + recomputed,
        }[collective.phase]

    def is_recomputed(self, collective: Collective) -> bool:
        """Whether a backward pass repeats it: what lies within layers, with ``full``."""
        within_layers = collective.phase == "forward" and collective.name.startswith("layers")
        return self.megatron.recompute == "full" and within_layers

    def _make(
        self,
        group: Group,
        name: str,
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
        return Collective(
            name=name,
            group=group,
            operation=operation,
            phase=phase,
            count=count,
            tensor_bytes=tensor_bytes,
            ranks=ranks,
            within_node=within_node,
            seconds=count * sent_bytes(operation, tensor_bytes, ranks) / bandwidth,
            hidden_by=hidden_by,
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
        make = partial(self._make, "tensor")
        twice, hidden = 2 * self._stage_layers, self._hidden
        if not self.layout.sequence:
            return [
                make("layers: sums", "all-reduce", "forward", twice, hidden),
                make("layers: grads", "all-reduce", "backward", twice, hidden),
            ]
        return [
            make("layers: inputs", "all-gather", "forward", twice, hidden),
            make("layers: sums", "reduce-scatter", "forward", twice, hidden),
            make("layers: in + grads", "all-gather", "backward", 2 * twice, hidden),
            make("layers: grads", "reduce-scatter", "backward", twice, hidden),
        ]

    def _ends(self) -> list[Collective]:
        """Sums over the vocabulary's parts: of the embedding, and of the head's gradients.

        With ``ops.logits_chunk_tokens`` the latter are float32, and the head does not gather its
        input again for its weight's gradient.
        """
        make = partial(self._make, "tensor")
        sums: Operation = "reduce-scatter" if self.layout.sequence else "all-reduce"
        gradient, inputs = self._hidden, 2
        if self.config.ops.logits_chunk_tokens:
            gradient, inputs = gradient * FLOAT32_BYTES / self._element_bytes, 1
        ends = [
            make("embedding", sums, "forward", 1, self._hidden),
            make("head: grads", sums, "backward", 1, gradient),
        ]
        if self.layout.sequence:
            ends += [
                make("head: inputs", "all-gather", "forward", 1, self._hidden),
                make("ends: in + grads", "all-gather", "backward", inputs, self._hidden),
            ]
        return ends

    def _context(self) -> list[Collective]:
        """Keys and values of all ranks go round; backward again, with their gradients."""
        make = partial(self._make, "context", hidden_by="attention")
        layers, tokens = self._stage_layers, self.workload.micro_batch_tokens
        channels = self.hf.num_kv_heads * self.hf.head_dim // self.layout.tensor
        whole = float(self.layout.context * tokens * 2 * channels * self._element_bytes)
        return [
            make("layers: K, V", "all-gather", "forward", layers, whole),
            make("layers: K, V, grads", "all-gather", "backward", 2 * layers, whole),
        ]

    def _pipeline(self) -> list[Collective]:
        """Hidden states to the next chunk's rank, gradients back."""
        make = partial(self._make, "pipeline")
        virtual, hidden = self.layout.virtual, self._hidden / self.layout.sequence_ranks
        return [
            make("stages: hidden", "send", "forward", virtual, hidden),
            make("stages: grads", "send", "backward", virtual, hidden),
        ]

    def _loss(self) -> list[Collective]:
        """Four numbers per response token, and what the objective sums up (``trainer.loss``)."""
        assumptions, rollout = self.assumptions, self.config.rollout
        response_share = assumptions.response_tokens / (
            assumptions.response_tokens + assumptions.prompt_tokens
        )
        response_tokens = self.workload.micro_batch_tokens * response_share
        gathered = self.layout.tensor * PARTIALS_BYTES * response_tokens
        messages = [self._make("tensor", "loss: [T, 4]", "all-gather", "forward", 1, gathered)]
        loaded = load_objective(self.config.algorithm)
        responses = rollout.groups_per_step * rollout.samples_per_group
        numbers = {"objective: table": loaded.statistic_size}
        if loaded.objective.needs == "response":
            numbers["objective: table"] = responses
        if loaded.objective.selects_tokens:
            numbers["objective: selected"] = responses
        times = self.workload.micro_batches if loaded.objective.needs == "micro_batch" else 1
        return messages + [
            self._make("data", name, "all-reduce", "update", times, INT64_BYTES * count)
            for name, count in numbers.items()
            if count
        ]

    def _data(self) -> list[Collective]:
        """float32 gradients once per update, and the weights that the ranks updated."""
        make, megatron = partial(self._make, "data"), self.megatron
        parameters = max(
            stage_parameters(self.hf, self.layout, stage) for stage in range(self.layout.pipeline)
        )
        gradients, weights = FLOAT32_BYTES * parameters, self._element_bytes * parameters
        meanwhile: Hidden = "backward" if megatron.overlap_grad_reduce else "nothing"
        if megatron.distributed_optimizer:
            gathers: Hidden = "forward" if megatron.overlap_param_gather else "nothing"
            messages = [
                make("gradients", "reduce-scatter", "update", 1, gradients, meanwhile),
                make("weights", "all-gather", "update", 1, weights, gathers),
            ]
        else:
            messages = [make("gradients", "all-reduce", "update", 1, gradients, meanwhile)]
        if self.hf.tied_embeddings and self.layout.pipeline > 1:
            tied = FLOAT32_BYTES * embedding_parameters(self.hf, self.layout.tensor)
            messages.append(
                self._make("pipeline", "tied embedding", "all-reduce", "update", 1, tied)
            )
        return messages

    def _sync(self) -> list[Collective]:
        """The replica of rank 0 gathers every weight, stage by stage, on its first stage."""
        weights = self._element_bytes * model_parameters(self.hf)
        elsewhere = weights * (1 - 1 / self.layout.pipeline) / self.layout.tensor
        return [
            self._make("tensor", "weight sync", "all-gather", "sync", 1, weights),
            self._make("pipeline", "weight sync", "send", "sync", 1, elsewhere),
        ]


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase of a step."""

    name: str
    seconds: float
    compute_s: float
    """The part spent on operations (optimizer and decoding: on memory traffic)."""
    messages_s: float
    """The part spent on messages and files that nothing hides."""
    bubble_s: float
    """The part spent waiting for other pipeline stages."""


def training_time(messages: Messages, stages: list[StageMemory]) -> tuple[list[PhaseTime], float]:
    """Estimate what the updates of a step take.

    Args:
        messages: The collectives of the layout.
        stages: The memory of its stages.

    Returns:
        The forward-only passes, forward and backward, and the optimizer; and the bubble's share of
        the time of a pass.
    """
    work, layout, m = messages.workload, messages.layout, messages.workload.micro_batches
    layers_s = _compute_s(messages, work.forward_flops_per_update - work.head_flops_per_update)
    attention_s = _compute_s(messages, work.attention_flops_per_update)
    # The last stage has the head on top of its layers, and the others wait for it.
    forward_s = layers_s + layout.pipeline * _compute_s(messages, work.head_flops_per_update)
    recompute_s = {"none": 0.0, "selective": attention_s, "full": layers_s}
    backward_s = 2 * forward_s + recompute_s[messages.megatron.recompute]
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
    waiting = (layout.pipeline - 1) / (layout.virtual * m)
    passes, updates = work.forward_passes_per_step, work.updates_per_step
    phases = [
        _phase("forward-only", passes * m * forward_s, passes * m * forward_messages_s, waiting),
        _phase(
            "forward + backward",
            updates * m * (forward_s + backward_s),
            updates * m * (forward_messages_s + backward_messages_s),
            waiting,
        ),
        _phase(
            "optimizer",
            updates * _optimizer_s(messages, stages),
            updates * _exposed_s(listed, "update", hiding),
            0.0,
        ),
    ]
    return phases, waiting / (1 + waiting)


def _compute_s(messages: Messages, flops_per_update: float) -> float:
    """Time of one micro-batch on one rank for its share of an update's operations."""
    work, assumptions = messages.workload, messages.assumptions
    rank_flops = flops_per_update / messages.layout.gpus / work.micro_batches
    return rank_flops / (assumptions.peak_flops * assumptions.mfu_share)


def _exposed_s(listed: list[Collective], phase: Phase, hiding: dict[str, float]) -> float:
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


def rollout_time(messages: Messages, memory: RolloutMemory) -> tuple[PhaseTime, float]:
    """Estimate generation; also returns the tokens per second of one rollout GPU.

    Without partial rollouts a step ends with its longest response, decoded alone at the end.
    """
    assumptions, rollout = messages.assumptions, messages.config.rollout
    rate = assumptions.rollout_tokens_per_s
    if rate is None:
        rate = _decoding_rate(messages, memory)
    seconds = messages.workload.response_tokens_per_step / (rate * assumptions.rollout_gpus)
    if not rollout.partial or rollout.oversample_groups == 0:
        alone_s = memory.weights_bytes / (assumptions.memory_bytes_per_s * assumptions.memory_share)
        seconds = max(seconds, rollout.max_response_tokens * alone_s)
    return _phase("rollout", seconds, 0.0, 0.0), rate


def _decoding_rate(messages: Messages, memory: RolloutMemory) -> float:
    """Tokens per second of one rollout GPU, with as many sequences as fit and as there are.

    A decoding step reads the weights and the keys and values of the running sequences, and computes
    two operations per parameter and sequence; the slower of the two counts.
    """
    assumptions, server = messages.assumptions, messages.config.rollout.server
    servers = max(1, assumptions.rollout_gpus // memory.gpus_per_server)
    limit = server.max_running_requests or memory.mean_sequences
    per_server = -(-messages.workload.samples_per_step // servers)
    running = max(1, min(memory.mean_sequences, limit, per_server))
    context = assumptions.prompt_tokens + assumptions.response_tokens / 2
    read = memory.weights_bytes + running * context * memory.kv_bytes_per_token
    reading_s = read / (assumptions.memory_bytes_per_s * assumptions.memory_share)
    operations = 2 * model_parameters(messages.hf) * running / memory.gpus_per_server
    computing_s = operations / (assumptions.peak_flops * assumptions.mfu_share)
    return running / max(reading_s, computing_s) / memory.gpus_per_server


def weight_sync_time(messages: Messages) -> PhaseTime:
    """Estimate a push of all weights.

    With ``disk`` rank 0 writes them to the shared file system and the servers read them. Otherwise
    they pass once through rank 0's link to the servers, which pass them on to each other meanwhile:
    the network, or NVLink where the GPUs of the trainer and of the rollout are one node. Gathering
    the shards goes on beside it.
    """
    assumptions = messages.assumptions
    size = ELEMENT_BYTES[messages.config.model.dtype] * model_parameters(messages.hf)
    if messages.config.rollout.weight_sync.method == "disk":
        seconds = 2 * size / assumptions.disk_bytes_per_s
    else:
        is_one_node = messages.layout.gpus + assumptions.rollout_gpus <= assumptions.node_gpus
        seconds = size / assumptions.link_bytes_per_s(within_node=is_one_node)
    return _phase("weight sync", 0.0, seconds, 0.0)
