"""Memory of a trainer GPU of each pipeline stage, and of a rollout GPU. Bytes throughout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bapo_megatron.planning.activations import (
    FLOAT32_BYTES,
    Shape,
    chunk_bytes,
    chunks_in_flight,
    logits_bytes,
    recomputed_bytes,
    workspace_bytes,
)
from bapo_megatron.planning.parameters import model_parameters, stage_parameters

if TYPE_CHECKING:
    from bapo_megatron.config.megatron import MegatronConfig
    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.planning.hardware import Assumptions
    from bapo_megatron.planning.layout import Layout
    from bapo_megatron.planning.workload import Workload
    from bapo_megatron.policy.hf_config import HfConfig

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One GPU of a pipeline stage at the peak of a backward pass."""

    stage: int
    parameters: int
    """Held by the GPU."""
    weights_bytes: float
    gradients_bytes: float
    """float32, all of the rank's parameters: each rank sums over its own micro-batches."""
    optimizer_bytes: float
    """float32 master weights (with bfloat16) and Adam's two moments, divided over data × context
    ranks by the distributed optimizer."""
    chunks_in_flight: int
    """Forward passes of a chunk of layers that wait for their backward pass."""
    activations_bytes: float
    """What they keep."""
    logits_bytes: float
    """Last stage: final norm, logits and the gradients that the head makes."""
    workspace_bytes: float
    """One layer's (or recomputed block's) backward pass; not at the same time as the logits."""

    @property
    def total_bytes(self) -> float:
        """The peak, without what is reserved."""
        fixed = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return fixed + self.activations_bytes + max(self.logits_bytes, self.workspace_bytes)


@dataclass(frozen=True, slots=True)
class RolloutMemory:
    """One GPU of a rollout server."""

    gpus_per_server: int
    weights_bytes: float
    kv_bytes_per_token: float
    """Keys and values of all layers of one token, on this GPU."""
    kv_cache_bytes: float
    """What ``rollout.server.mem_fraction`` leaves beside the weights, or max_total_tokens need."""
    kv_cache_tokens: int
    """Tokens that the server holds; its GPUs divide each."""
    mean_sequences: int
    """Sequences of mean length, half generated on average, that fit."""
    longest_sequences: int
    """Sequences of the greatest length that fit."""


def plan_memory(
    config: RunConfig,
    hf: HfConfig,
    layout: Layout,
    megatron: MegatronConfig,
    workload: Workload,
    assumptions: Assumptions,
) -> list[StageMemory]:
    """Return the memory of a GPU of each pipeline stage.

    Args:
        config: The run.
        hf: The model.
        layout: How ranks divide it.
        megatron: The section to plan with (other recomputation than the configured one, say).
        workload: The step in this layout.
        assumptions: Which layers run.
    """
    element_bytes = ELEMENT_BYTES[config.model.dtype]
    shape = Shape(hf, layout, element_bytes, assumptions.layers)
    chunk = chunk_bytes(shape, megatron.recompute, megatron.recompute_layers)
    layers = layout.layers_per_chunk(hf)
    chunk *= max(0, layers - megatron.activation_offload_layers) / layers
    if layout.pipeline > 1 and assumptions.layers == "local":
        chunk += shape.hidden_bytes  # what a stage received; Transformer Engine keeps it anyway
    returning = recomputed_bytes(shape, megatron.recompute, megatron.recompute_layers)
    tokens = workload.max_micro_batch_tokens
    stages = []
    for stage in range(layout.pipeline):
        parameters = stage_parameters(hf, layout, stage)
        in_flight = chunks_in_flight(layout, stage, workload.micro_batches)
        is_last = stage == layout.pipeline - 1
        stages.append(
            StageMemory(
                stage=stage,
                parameters=parameters,
                weights_bytes=element_bytes * parameters,
                gradients_bytes=FLOAT32_BYTES * parameters,
                optimizer_bytes=_optimizer_bytes(parameters, element_bytes, layout, megatron),
                chunks_in_flight=in_flight,
                activations_bytes=in_flight * chunk * tokens,
                logits_bytes=(
                    logits_bytes(shape, tokens, config.ops.logits_chunk_tokens) if is_last else 0.0
                ),
                workspace_bytes=(returning + workspace_bytes(shape)) * tokens,
            )
        )
    return stages


def worst_stage(stages: list[StageMemory]) -> StageMemory:
    """Return the stage that needs most."""
    return max(stages, key=lambda stage: stage.total_bytes)


def fits(stages: list[StageMemory], assumptions: Assumptions) -> bool:
    """Return whether every stage leaves the reserve free."""
    room = assumptions.gpu_memory_bytes - assumptions.reserve_bytes
    return worst_stage(stages).total_bytes <= room


def plan_rollout_memory(config: RunConfig, hf: HfConfig, assumptions: Assumptions) -> RolloutMemory:
    """Return the memory of a rollout GPU.

    A server has ``rollout.server.tensor`` GPUs, or twice, four times, … as many where that leaves
    no room for the longest sequence: servers that run elsewhere are sized there.

    Raises:
        ValueError: The server cannot be divided so, or no node has room for one sequence.
    """
    asked = config.rollout.server.tensor
    if hf.num_kv_heads % asked:
        raise ValueError(
            f"rollout.server.tensor: must divide the model's {hf.num_kv_heads} key/value heads, "
            f"got {asked}; choose a divisor"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    gpus = asked
    while True:
        memory = _server_memory(config, hf, assumptions, gpus)
        if memory.kv_cache_tokens >= longest:
            return memory
        gpus *= 2
        if gpus > assumptions.node_gpus or hf.num_kv_heads % gpus:
            raise ValueError(
                f"rollout.server.mem_fraction: {config.rollout.server.mem_fraction} of "
                f"{gpus // 2} GPUs leaves room for the keys and values of "
                f"{memory.kv_cache_tokens} tokens, fewer than one sequence of {longest}; raise it, "
                "lower rollout.max_response_tokens, or plan with another --gpu"
            )


def _server_memory(
    config: RunConfig, hf: HfConfig, assumptions: Assumptions, gpus: int
) -> RolloutMemory:
    """Memory of a server of so many GPUs, which divide weights, keys and values.

    Keys and values of a token take 2 · layers · key channels · element bytes.
    """
    server = config.rollout.server
    element_bytes = ELEMENT_BYTES[config.model.dtype]
    weights = element_bytes * model_parameters(hf) / gpus
    per_token = 2 * hf.num_layers * hf.num_kv_heads * hf.head_dim * element_bytes / gpus
    cache = max(0.0, server.mem_fraction * assumptions.gpu_memory_bytes - weights)
    tokens = int(cache // per_token)
    if server.max_total_tokens is not None and server.max_total_tokens < tokens:
        tokens = server.max_total_tokens
        cache = tokens * per_token
    running = assumptions.prompt_tokens + assumptions.response_tokens / 2
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return RolloutMemory(
        gpus_per_server=gpus,
        weights_bytes=weights,
        kv_bytes_per_token=per_token,
        kv_cache_bytes=cache,
        kv_cache_tokens=tokens,
        mean_sequences=int(tokens // running),
        longest_sequences=tokens // longest,
    )


def _optimizer_bytes(
    parameters: int, element_bytes: int, layout: Layout, megatron: MegatronConfig
) -> float:
    """Master weights (unless the weights are float32 themselves) and two moments, on the GPU."""
    per_parameter = FLOAT32_BYTES * (3 if element_bytes < FLOAT32_BYTES else 2)
    ranks = layout.replicas if megatron.distributed_optimizer else 1
    on_gpu = 1 - megatron.optimizer_offload_share
    return per_parameter * parameters / ranks * on_gpu
