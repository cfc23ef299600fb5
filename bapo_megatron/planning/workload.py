"""The work of one training step: samples, updates, micro-batches, operations.

Lengths are not known before the rollout. They are taken to be uniform between 0 and twice the mean,
so that the mean of the square is 4/3 of the square of the mean.
"""

import math
from dataclasses import dataclass

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.config.check import packing_multiples
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.planning.hardware import Assumptions
from bapo_megatron.planning.layout import Layout
from bapo_megatron.policy.hf_config import HfConfig


@dataclass(frozen=True, slots=True)
class Workload:
    """One step, as a layout divides it."""

    samples_per_step: int
    tokens_per_step: int
    """Prompts and responses, each sample once."""
    response_tokens_per_step: int
    updates_per_step: int
    """Optimizer updates: updates_per_batch × epochs."""
    samples_per_update: int
    tokens_per_update: int
    micro_batches: int
    """Per data-parallel rank and update."""
    micro_batch_tokens: int
    """Mean, on one rank."""
    max_micro_batch_tokens: int
    """Limit of one rank: memory must hold so many."""
    forward_passes_per_step: float
    """Forward-only passes over an update's samples: for the bounds, and for ``behaviour:
    recomputed``."""
    forward_flops_per_update: float
    """One forward pass over an update's samples, summed over all ranks."""
    attention_flops_per_update: float
    """The part of it in causal attention."""
    head_flops_per_update: float
    """The part of it in the output layer."""


def check_lengths(
    config: RunConfig, prompt_tokens: int | None, response_tokens: int | None
) -> None:
    """Refuse lengths that do not fit; None is a mean that nobody asked for.

    Raises:
        ValueError: A mean above the longest, or a longest sequence above a micro-batch.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    for option, mean, key, longest in (
        ("--prompt-tokens", prompt_tokens, "data.max_prompt_tokens", prompt),
        ("--response-tokens", response_tokens, "rollout.max_response_tokens", response),
    ):
        if mean is not None and mean > longest:
            raise ValueError(f"{option}: must be at most {key} = {longest}, got {mean}; lower it")
    room = config.train.max_tokens_per_micro_batch * config.parallel.context
    if room < prompt + response:
        raise ValueError(
            "train.max_tokens_per_micro_batch × parallel.context: must hold data.max_prompt_tokens "
            f"+ rollout.max_response_tokens = {prompt + response}, got {room}; raise it"
        )


def plan_workload(
    config: RunConfig, hf: HfConfig, layout: Layout, assumptions: Assumptions
) -> Workload:
    """Count what a step of a configuration is made of in a layout."""
    rollout, algorithm = config.rollout, config.algorithm
    samples = rollout.groups_per_step * rollout.samples_per_group
    samples_per_update = samples // algorithm.updates_per_batch
    prompt, response = assumptions.prompt_tokens, assumptions.response_tokens
    length = prompt + response
    capacity = _rank_tokens(config, layout)
    per_micro_batch = max(1, capacity * layout.context // length)
    micro_batches = math.ceil(samples_per_update / (per_micro_batch * layout.data))
    if layout.virtual > 1:  # the interleaved schedule runs them in rounds of one per stage
        micro_batches = math.ceil(micro_batches / layout.pipeline) * layout.pipeline
    mean_tokens = samples_per_update * length / (micro_batches * layout.data * layout.context)
    flops = hf.sequence_flops
    # The mean of (prompt + response)², the response uniform between 0 and twice its mean.
    mean_square = prompt**2 + 2 * prompt * response + 4 / 3 * response**2
    attention = samples_per_update * flops.per_pair * mean_square
    return Workload(
        samples_per_step=samples,
        tokens_per_step=samples * length,
        response_tokens_per_step=samples * response,
        updates_per_step=algorithm.updates_per_batch * algorithm.epochs,
        samples_per_update=samples_per_update,
        tokens_per_update=samples_per_update * length,
        micro_batches=micro_batches,
        micro_batch_tokens=math.ceil(mean_tokens),
        max_micro_batch_tokens=capacity,
        forward_passes_per_step=_forward_passes(config),
        forward_flops_per_update=samples_per_update * flops.per_token * length + attention,
        attention_flops_per_update=attention,
        head_flops_per_update=2.0 * samples_per_update * length * hf.vocab_size * hf.hidden_size,
    )


def _rank_tokens(config: RunConfig, layout: Layout) -> int:
    """Return the tokens of the largest micro-batch on one rank.

    Other layouts than the configured one keep the micro-batch over all context-parallel ranks, so
    that the longest sequence fits them as well.
    """
    total = config.train.max_tokens_per_micro_batch * config.parallel.context
    multiple = packing_multiples(layout.parallel, config.megatron)[1] // layout.context
    return math.ceil(total / layout.context / multiple) * multiple


def _forward_passes(config: RunConfig) -> float:
    """Forward-only passes of a step, each over the samples of one update (``trainer.step``)."""
    algorithm = config.algorithm
    collects = load_objective(algorithm).collects
    passes = algorithm.updates_per_batch * algorithm.epochs if collects else 0
    if algorithm.behaviour == "recomputed":  # the first update finds its log-probs there
        passes += algorithm.updates_per_batch - (1 if collects else 0)
    return float(passes)
