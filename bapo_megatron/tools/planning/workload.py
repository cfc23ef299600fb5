"""The work of one training step: samples, updates, micro-batches, operations.

Lengths are not known before the rollout. They are taken to be uniform between 0 and twice the mean,
so that the mean of the square is 4/3 of the square of the mean.
"""

import math
from dataclasses import dataclass

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.config.check import packing_multiples
from bapo_megatron.config.schema import AlgorithmConfig, RunConfig
from bapo_megatron.policy.hf_config import HfConfig
from bapo_megatron.tools.planning.hardware import Assumptions
from bapo_megatron.tools.planning.layout import Group, Layout


@dataclass(frozen=True, slots=True)
class Passes:
    """What a step makes beside a loss pass per update, each over the samples of one update."""

    forward_only: int
    """For bounds that are not predicted, and for ``behaviour: recomputed``."""
    repeated: float
    """Loss passes that are made again, because the predicted bounds were wrong."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run in one layout on the hardware assumed."""

    config: RunConfig
    """With the recomputation to plan with."""
    hf: HfConfig
    layout: Layout
    assumptions: Assumptions
    passes: Passes
    """Those of the run."""

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of weights and activations."""
        return 4 if self.config.model.dtype == "float32" else 2

    @property
    def whole_hidden_bytes(self) -> int:
        """One hidden state of a token as matrix products take it: e·h."""
        return self.element_bytes * self.hf.hidden_size

    @property
    def hidden_bytes(self) -> float:
        """One hidden state of a token, where sequence parallel divides: e·h/s."""
        return self.whole_hidden_bytes / self.layout.sequence_ranks

    def divided_bytes(self, channels: int) -> int:
        """Bytes of channels that tensor-parallel ranks divide (query, key, MLP, vocabulary)."""
        return self.element_bytes * channels // self.layout.tensor

    @property
    def recomputes_all(self) -> bool:
        """Whether the backward pass repeats the forward pass of every layer."""
        return self.config.megatron.recompute == "full"

    @property
    def optimizer_ranks(self) -> int:
        """Ranks that divide the optimizer's state and work."""
        return self.layout.replicas if self.config.megatron.distributed_optimizer else 1

    def link_bytes_per_s(self, group: Group) -> float:
        """Bandwidth between the ranks of a group."""
        within_node = self.layout.within_node(group, self.assumptions.node_gpus)
        return self.assumptions.link_bytes_per_s(within_node=within_node)


@dataclass(frozen=True, slots=True)
class Workload:
    """One step, as a layout divides it."""

    samples_per_step: int
    tokens_per_step: int
    """Prompts and responses, each sample once."""
    response_tokens_per_step: int
    updates_per_step: int
    """Optimizer updates: updates_per_batch × epochs."""
    tokens_per_update: int
    micro_batches: int
    """Per data-parallel rank and update."""
    micro_batch_tokens: int
    """Mean, on one rank."""
    max_micro_batch_tokens: int
    """Limit of one rank: memory must hold so many."""
    passes: Passes
    """Per step, beside a loss pass per update."""
    forward_flops_per_update: float
    """One forward pass over an update's samples, summed over all ranks."""
    attention_flops_per_update: float
    """The part of it in causal attention."""
    head_flops_per_update: float
    """The part of it in the output layer."""


def plan_workload(case: Scenario) -> Workload:
    """Count what a step is made of."""
    config, layout, assumptions = case.config, case.layout, case.assumptions
    samples = config.rollout.groups_per_step * config.rollout.samples_per_group
    samples_per_update = samples // config.algorithm.updates_per_batch
    prompt, response = assumptions.prompt_tokens, assumptions.response_tokens
    length = prompt + response
    # Other layouts than the configured one keep the micro-batch over all context-parallel ranks, so
    # that the longest sequence fits them as well.
    total = config.train.max_tokens_per_micro_batch * config.parallel.context
    multiple = packing_multiples(layout.parallel, config.megatron)[1] // layout.context
    capacity = math.ceil(total / layout.context / multiple) * multiple
    per_micro_batch = max(1, capacity * layout.context // length)
    micro_batches = math.ceil(samples_per_update / (per_micro_batch * layout.data))
    if layout.virtual > 1:  # the interleaved schedule runs them in rounds of one per stage
        micro_batches = math.ceil(micro_batches / layout.pipeline) * layout.pipeline
    mean_tokens = samples_per_update * length / (micro_batches * layout.data * layout.context)
    hf, flops = case.hf, case.hf.sequence_flops
    # The mean of (prompt + response)², the response uniform between 0 and twice its mean.
    mean_square = prompt**2 + 2 * prompt * response + 4 / 3 * response**2
    attention = samples_per_update * flops.per_pair * mean_square
    return Workload(
        samples_per_step=samples,
        tokens_per_step=samples * length,
        response_tokens_per_step=samples * response,
        updates_per_step=config.algorithm.updates_per_batch * config.algorithm.epochs,
        tokens_per_update=samples_per_update * length,
        micro_batches=micro_batches,
        micro_batch_tokens=math.ceil(mean_tokens),
        max_micro_batch_tokens=capacity,
        passes=case.passes,
        forward_flops_per_update=samples_per_update * flops.per_token * length + attention,
        attention_flops_per_update=attention,
        head_flops_per_update=2.0 * samples_per_update * length * hf.vocab_size * hf.hidden_size,
    )


def plan_passes(algorithm: AlgorithmConfig, miss_share: float) -> Passes:
    """Count the passes of ``trainer.step``; ``miss_share`` of predicted decisions are wrong."""
    loaded = load_objective(algorithm)
    objective, updates = loaded.objective, algorithm.updates_per_batch * algorithm.epochs
    behaviour = algorithm.updates_per_batch if algorithm.behaviour == "recomputed" else 0
    # The first update finds its log-probs in the pass for the behaviour.
    searches = updates - (behaviour > 0) if loaded.collects else 0
    if objective.decisive is not None and objective.speculate != "never":
        return Passes(behaviour, searches * miss_share)
    return Passes(behaviour + searches, 0.0)
