"""Memory of a trainer GPU per pipeline stage and of a rollout GPU, and disk use, in bytes.

Parameters are counted exactly: they are those of the model that Megatron builds. Activations
are counted by ``activations``.
"""

import functools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from bapo_megatron.config.check import check_heads
from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.policy.adapters import adapter_weights
from bapo_megatron.policy.architecture import HfConfig, Weight
from bapo_megatron.policy.hf_config import padded_vocab_size
from bapo_megatron.policy.mixers.base import FLOAT32_BYTES
from bapo_megatron.policy.weight_table import layer_weights, shard_shape
from bapo_megatron.tools.planning.activations import (
    chunk_bytes,
    logits_bytes,
    recomputed_bytes,
    scoring_bytes,
    workspace_bytes,
)
from bapo_megatron.tools.planning.scenario import (
    FrozenSpec,
    Layout,
    Scenario,
    Workload,
)

OPTIMIZER_BYTES = 12
"""Per parameter: float32 master weights and two moments."""
DUMP_TOKEN_BYTES = 7.8
"""Per response token of a dump with its texts (docs/benchmarks/data_path_cpu_202611.md)."""
_BYTE_EXPERTS = 128
"""Experts whose numbers are bytes in a file of routes (``data.routes``)."""
BUFFER_TOKEN_BYTES = 5.6
"""Per response token of an unfinished sample, without texts (``tests.benchmarks.bench_buffer``)."""


@functools.cache
def layer_parameters(hf: HfConfig, layer: int, tensor: int = 1) -> int:
    """Return the parameters of a layer, outside experts, on one of ``tensor`` ranks."""
    return _elements(hf, layer_weights(hf, layer).shared, tensor)


@functools.cache
def expert_parameters(hf: HfConfig, layer: int, ranks: int = 1) -> int:
    """Return the parameters of a layer's experts on each of ``ranks`` ranks that divide them."""
    num = hf.experts.num if hf.experts else 0
    return num * _elements(hf, layer_weights(hf, layer).expert, 1) // ranks


def _elements(hf: HfConfig, weights: Iterable[Weight], size: int) -> int:
    shapes = (shard_shape(weight, hf, size) for weight in weights if not weight.is_buffer)
    return sum(math.prod(shape) for shape in shapes)


def embedding_parameters(hf: HfConfig, tensor: int) -> int:
    """Return the parameters of the embedding, or of the output layer: padded vocabulary · h / t."""
    return padded_vocab_size(hf.vocab_size, tensor) // tensor * hf.hidden_size


def stage_parameters(hf: HfConfig, layout: Layout, stage: int) -> int:
    """Return the parameters of a stage on one rank.

    The first stage has the embedding; the last one the final norm and the output layer, which tied
    models have only where it is not on the rank of the embedding.
    """
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    num_embeddings = is_first + (is_last and not (hf.tied_embeddings and is_first))
    total = num_embeddings * embedding_parameters(hf, layout.tensor) + is_last * hf.hidden_size
    layers = _stage_layers(hf, layout, stage)
    total += sum(layer_parameters(hf, layer, layout.tensor) for layer in layers)
    return total + stage_experts(hf, layout, stage)


def _stage_layers(hf: HfConfig, layout: Layout, stage: int) -> list[int]:
    per_chunk = layout.layers_per_chunk(hf)
    firsts = ((chunk * layout.pipeline + stage) * per_chunk for chunk in range(layout.virtual))
    return [first + number for first in firsts for number in range(per_chunk)]


def stage_experts(hf: HfConfig, layout: Layout, stage: int) -> int:
    """Return the parameters of experts among those of a stage on one rank."""
    layers = _stage_layers(hf, layout, stage)
    return sum(expert_parameters(hf, layer, layout.expert_ranks) for layer in layers)


@functools.cache
def stage_adapters(hf: HfConfig, lora: LoraConfig, layout: Layout, stage: int) -> tuple[int, int]:
    """Return the adapters' parameters of a stage on one rank: of experts, and others."""
    experts_of_rank = hf.experts.num // layout.expert if hf.experts else 0

    def count(weights: Iterable[Weight], size: int) -> int:
        pairs = (pair for weight in weights for pair in adapter_weights(weight, hf, lora))
        return _elements(hf, (entry for pair in pairs for entry in pair), size)

    parts = [layer_weights(hf, layer) for layer in _stage_layers(hf, layout, stage)]
    expert_tensor = layout.parallel.expert_tensor_size
    experts = experts_of_rank * sum(count(part.expert, expert_tensor) for part in parts)
    return experts, sum(count(part.shared, layout.tensor) for part in parts)


def adapter_parameters(hf: HfConfig, lora: LoraConfig) -> int:
    """Return the parameters of all adapters of the whole model."""
    return sum(stage_adapters(hf, lora, Layout(), 0))


def visited_parameters(hf: HfConfig, sequences: int = 1) -> float:
    """Return the parameters that as many tokens at once visit on average, experts drawn evenly.

    The whole model but the experts that none of them is sent to: of E, each with a chance of
    (1 − k/E)^sequences.
    """
    experts = hf.experts
    if experts is None:
        return model_parameters(hf)
    idle = (1 - experts.per_token / experts.num) ** sequences
    of_experts = sum(expert_parameters(hf, layer) for layer in range(hf.num_layers))
    return model_parameters(hf) - idle * of_experts


@functools.cache
def model_parameters(hf: HfConfig) -> int:
    """Return the parameters of the whole model as published, its vocabulary without padding."""
    embeddings = 1 if hf.tied_embeddings else 2
    layers = range(hf.num_layers)
    total = sum(layer_parameters(hf, layer) + expert_parameters(hf, layer) for layer in layers)
    return total + hf.hidden_size + embeddings * hf.vocab_size * hf.hidden_size


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One GPU of a pipeline stage at the peak of a backward pass."""

    stage: int
    parameters: int
    """Held by the GPU."""
    trained_parameters: int
    """Those that the optimizer updates on it, without experts; with ``model.lora`` adapters."""
    trained_experts: int
    """Parameters of experts that the optimizer updates on it."""
    weights_bytes: float
    gradients_bytes: float
    """float32, of what the rank trains: each rank sums over its own micro-batches."""
    optimizer_bytes: float
    """float32 master weights (with bfloat16) and Adam's two moments, divided over data × context
    ranks by the distributed optimizer."""
    chunks_in_flight: int
    """Forward passes of a chunk of layers that wait for their backward pass."""
    activations_bytes: float
    """Bytes that these forward passes keep."""
    logits_bytes: float
    """Last stage: final norm, logits (a teacher's included) and the gradients of the head."""
    workspace_bytes: float
    """One layer's (or recomputed block's) backward pass; not at the same time as the logits."""
    frozen_bytes: float
    """Weights of frozen models that stay on the GPU."""
    teacher_hidden_bytes: float
    """Last stage: the inputs of the teacher's head for the step's response tokens."""
    scoring_bytes: float
    """The largest pass of a frozen model, with the weights that it copies from host memory; not at
    the same time as activations, logits and workspace."""
    host_bytes: float
    """Host memory for the weights of frozen models and the states of an optimizer there."""
    total_bytes: float
    """The peak, without the reserve."""


def waiting_parameters(model: FrozenSpec, layout: Layout, stage: int) -> int:
    """Return the parameters of a frozen model that one rank of a stage keeps in host memory."""
    if not model.waits_in_host:
        return 0
    keeps_head = model.keeps_hidden and stage == layout.pipeline - 1
    head = embedding_parameters(model.hf, layout.tensor) if keeps_head else 0
    return stage_parameters(model.hf, layout, stage) - head


def plan_memory(case: Scenario, work: Workload) -> list[StageMemory]:
    """Return the memory of a GPU of each pipeline stage."""
    layout, megatron, tokens = case.layout, case.config.megatron, work.max_micro_batch_tokens
    chunk = chunk_bytes(case)
    if layout.pipeline > 1 and case.assumptions.layers == "local":
        chunk += case.hidden_bytes  # what a stage received; Transformer Engine keeps it anyway
    workspace = (recomputed_bytes(case) + workspace_bytes(case)) * tokens + stacked_bytes(case)
    head_bytes = logits_bytes(case, tokens)
    lora = case.config.model.lora
    # Master weights, unless what is trained is float32 itself, and two moments.
    copies = 3 if case.element_bytes < FLOAT32_BYTES and not lora.rank else 2
    state_bytes, offload_share = FLOAT32_BYTES * copies, megatron.optimizer_offload_share
    stages = []
    for stage in range(layout.pipeline):
        is_last = stage == layout.pipeline - 1
        parameters = stage_parameters(case.hf, layout, stage)
        in_flight = chunks_in_flight(layout, stage, work.micro_batches)
        weights = case.element_bytes * parameters
        experts = stage_experts(case.hf, layout, stage)
        trained_experts, trained = experts, parameters - experts
        if lora.rank:
            trained_experts, trained = stage_adapters(case.hf, lora, layout, stage)
            weights += FLOAT32_BYTES * (trained_experts + trained)
        gradients = FLOAT32_BYTES * (trained_experts + trained)
        optimizer = state_bytes * trained / case.layout.replicas
        optimizer += state_bytes * trained_experts / case.layout.expert_replicas
        activations = in_flight * chunk * tokens
        logits = head_bytes if is_last else 0.0
        frozen, hidden, scoring, host = 0.0, 0.0, 0.0, 0.0
        if offload_share:  # float32 weights, two moments, and gradients, all pinned
            host = offload_share * 4 / copies * optimizer
        for model in case.frozen:
            waiting_bytes = case.element_bytes * waiting_parameters(model, layout, stage)
            frozen += case.element_bytes * stage_parameters(model.hf, layout, stage) - waiting_bytes
            host += waiting_bytes
            scored = case.of_model(model.hf)
            scoring = max(scoring, waiting_bytes + scoring_bytes(scored, tokens, is_last=is_last))
            if model.keeps_hidden and is_last:
                response_tokens = -(-work.response_tokens_per_step // layout.replicas)
                hidden += response_tokens * scored.whole_hidden_bytes
        training = activations + max(logits, workspace)
        kept = weights + gradients + (1 - offload_share) * optimizer + frozen + hidden
        stages.append(
            StageMemory(
                stage=stage,
                parameters=parameters,
                trained_parameters=trained,
                trained_experts=trained_experts,
                weights_bytes=weights,
                gradients_bytes=gradients,
                optimizer_bytes=(1 - offload_share) * optimizer,
                chunks_in_flight=in_flight,
                activations_bytes=activations,
                logits_bytes=logits,
                workspace_bytes=workspace,
                frozen_bytes=frozen,
                teacher_hidden_bytes=hidden,
                scoring_bytes=scoring,
                host_bytes=host,
                total_bytes=kept + max(training, scoring),
            )
        )
    return stages


def stacked_bytes(case: Scenario) -> float:
    """Return the copy of a layer's gate and up weights that a grouped product of experts takes."""
    layout, hf = case.layout, case.hf
    if not case.groups_experts:
        return 0.0
    layers = range(hf.num_layers)
    largest = max(expert_parameters(hf, layer, layout.expert_ranks) for layer in layers)
    return case.element_bytes * largest * 2 / 3


def chunks_in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Return how many chunks of layers of a stage hold activations at a time.

    Megatron's schedules with p stages of v chunks run w forward passes before the first backward
    pass, and then alternate (Narayanan et al. 2021, arXiv 2104.04473): one more than

        w = p − 1 − stage                            without interleaving,
        w = 2·(p − 1 − stage) + (v − 1)·p            with it.
    """
    behind = layout.pipeline - 1 - stage
    warm_up = behind if layout.virtual == 1 else 2 * behind + (layout.virtual - 1) * layout.pipeline
    return min(warm_up + 1, micro_batches * layout.virtual)


@dataclass(frozen=True, slots=True)
class RolloutMemory:
    """One GPU of a rollout server."""

    gpus_per_server: int
    weights_bytes: float
    kv_bytes_per_token: float
    """KV cache of one token, over all layers, on this GPU."""
    state_bytes: float
    """State of one sequence's recurrences, on this GPU, whatever its length."""
    kv_cache_bytes: float
    """What ``rollout.server.mem_fraction`` leaves beside the weights, or max_total_tokens need."""
    kv_cache_tokens: int
    """Tokens that the server holds; its GPUs divide each."""
    mean_sequences: int
    """Sequences of mean length, half generated on average, that fit."""
    longest_sequences: int
    """Sequences of maximum length that fit."""


class NoRoomError(ValueError):
    """A server has no room for one sequence."""


def rollout_memory(case: Scenario) -> RolloutMemory:
    """Return the memory of a rollout GPU.

    A server has ``rollout.server.tensor`` GPUs, doubled until the longest sequence fits, since
    servers elsewhere may have more. They divide the weights, the states of recurrences and, without
    MLA, the KV cache, of layers · cached channels · element bytes per token.

    Raises:
        NoRoomError: Neither a node nor ``max_total_tokens`` has room for one sequence.
        ConfigError: The model cannot be divided so.
    """
    hf, server, assumptions = case.hf, case.config.rollout.server, case.assumptions
    longest = case.config.data.max_prompt_tokens + case.config.rollout.max_response_tokens
    running = assumptions.prompt_tokens + assumptions.response_tokens / 2
    gpus, limit = server.tensor, server.max_total_tokens or sys.maxsize
    check_heads(hf.division_fields, "rollout.server.tensor", gpus)
    if limit < longest:
        raise NoRoomError(
            "rollout.server.max_total_tokens: must hold data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {longest}, got {limit}; raise it"
        )
    while True:
        weights = case.element_bytes * model_parameters(hf) / gpus
        size = case.element_bytes
        per_token = sum(
            size * mixer.cached_channels(hf) / (gpus if mixer.divides_cache else 1)
            for mixer in hf.mixers
        )
        state = sum(mixer.state_bytes(size) for mixer in hf.mixers) / gpus
        cache = max(0.0, server.mem_fraction * assumptions.gpu_memory_bytes - weights)
        tokens = int(cache // per_token)
        if limit < tokens:
            tokens, cache = limit, limit * per_token
        if tokens * per_token >= longest * per_token + state:
            return RolloutMemory(
                gpus_per_server=gpus,
                weights_bytes=weights,
                kv_bytes_per_token=per_token,
                state_bytes=state,
                kv_cache_bytes=cache,
                kv_cache_tokens=tokens,
                mean_sequences=int(tokens * per_token // (running * per_token + state)),
                longest_sequences=int(tokens * per_token // (longest * per_token + state)),
            )
        gpus *= 2
        if gpus > assumptions.node_gpus or hf.num_kv_heads % gpus:
            raise NoRoomError(
                f"rollout.server.mem_fraction: {server.mem_fraction} of {gpus // 2} GPUs leaves "
                f"KV cache for {tokens} tokens, fewer than one sequence of {longest}; raise it, "
                "lower rollout.max_response_tokens, or plan with another --gpu"
            )


@dataclass(frozen=True, slots=True)
class DiskUse:
    """One kind of files."""

    what: str
    each_bytes: float
    number: int
    """At the end of the run, and while another one is written."""

    @property
    def total_bytes(self) -> float:
        """All of them."""
        return self.each_bytes * self.number


def disk_use(case: Scenario, work: Workload) -> list[DiskUse]:
    """Return what the run's files need under ``run_dir``, without logs and metrics."""
    config, checkpoint, rollout = case.config, case.config.checkpoint, case.config.rollout
    parameters, steps, every = model_parameters(case.hf), config.train.steps, checkpoint.every_steps
    saves = steps // every if every else 0
    saves += checkpoint.at_end and saves * every < steps
    if checkpoint.best:  # any step may have the best score
        saves = steps
    # The newest and the one being written, the best, and those of ``keep_every``.
    num_checkpoints = min(saves, checkpoint.keep_last + 1) + bool(checkpoint.best)
    if checkpoint.keep_every and every:
        num_checkpoints += steps // math.lcm(every, checkpoint.keep_every)
    num_batches = rollout.num_rounds - 1 + rollout.steps_ahead
    waiting = rollout.oversample_groups + num_batches * rollout.groups_per_step
    waiting = waiting * rollout.partial + config.replay.batches * rollout.groups_per_step
    buffer_tokens = waiting * rollout.samples_per_group * case.assumptions.response_tokens
    distillation = config.algorithm.distillation
    num_values = config.algorithm.kl.is_used + distillation.is_used
    if distillation.is_used:
        num_values += 2 * distillation.num_top  # ids and log-probs
    num_likeliest = 2 * config.algorithm.centering.num_top
    token_bytes = DUMP_TOKEN_BYTES + FLOAT32_BYTES * (num_values + num_likeliest)
    route_bytes = 0
    buffer_bytes = (BUFFER_TOKEN_BYTES + FLOAT32_BYTES * num_likeliest) * buffer_tokens
    if (experts := case.hf.experts) is not None and config.algorithm.router_replay == "rollout":
        routes = case.hf.num_layers * experts.per_token
        route_bytes = routes * (1 if experts.num <= _BYTE_EXPERTS else 2)
        buffer_bytes += 2 * routes * buffer_tokens
    dumps = min(steps, rollout.keep_dumps or steps) if rollout.dump else 0
    checkpoint_bytes = (case.element_bytes + OPTIMIZER_BYTES) * parameters
    if (lora := config.model.lora).rank:
        checkpoint_bytes = (FLOAT32_BYTES + OPTIMIZER_BYTES) * adapter_parameters(case.hf, lora)
    uses = [
        DiskUse("checkpoint", checkpoint_bytes, num_checkpoints),
        DiskUse("its unfinished samples", buffer_bytes, num_checkpoints),
        DiskUse("dump", token_bytes * work.response_tokens_per_step, dumps),
        DiskUse("export", case.element_bytes * parameters, int(checkpoint.at_end)),
    ]
    if route_bytes:
        uses.append(DiskUse("its experts", route_bytes * work.tokens_per_step, max(dumps, 1)))
    return uses
