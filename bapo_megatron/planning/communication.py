"""Every collective of a training step, with its bytes and its time.

A ring moves (g − 1)/g of the whole tensor through each GPU for an all-gather or a reduce-scatter
over g ranks, and twice that for an all-reduce; latencies are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.planning.activations import FLOAT32_BYTES
from bapo_megatron.planning.memory import ELEMENT_BYTES
from bapo_megatron.planning.parameters import (
    embedding_parameters,
    model_parameters,
    stage_parameters,
)

if TYPE_CHECKING:
    from bapo_megatron.config.megatron import MegatronConfig
    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.planning.hardware import Assumptions
    from bapo_megatron.planning.layout import Layout
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
