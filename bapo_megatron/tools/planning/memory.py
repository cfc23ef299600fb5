"""Memory of a trainer GPU per pipeline stage and of a rollout GPU, and disk use, in bytes.

Parameters are counted exactly: they are those of the model that Megatron builds.

Korthikanti et al. 2022 (arXiv 2205.05198) count the tensors that a layer's operations save for the
backward pass. The same count for these models, in bytes per token of a rank: no dropout (no masks),
grouped queries, SwiGLU, RMSNorm, and attention that saves one number per head and token instead of
its scores. Symbols, all per rank:

    h  hidden size                            s  tensor-parallel size with sequence parallel, else 1
    q  query channels / tensor-parallel size  k  key (and value) channels / tensor-parallel size
    f  MLP channels / tensor-parallel size    H  heads / tensor-parallel size, of D channels
    e  bytes of an element (2 or 4)

In a layer with experts f is k·(channels of one)/s for a token's k experts, each of which has a copy
of it, plus those of the shared experts; a rank's share of the tokens is taken to be balanced.

A gated delta net's tensors are counted by ``delta_tensors``; a chunk has as many of each kind of
layer as it has on average.

``transformer-engine`` is read off the saved tensors of its LayerNormLinear, Linear, RMSNorm and
flash attention, and Megatron's fused SwiGLU; ``local`` off ours (``policy.layer_spec``), and
measured by the tests.
"""

import functools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bapo_megatron.config.check import check_heads
from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.policy.adapters import adapted, adapter_weights
from bapo_megatron.policy.families.base import HfConfig, Weight
from bapo_megatron.policy.hf_config import padded_vocab_size
from bapo_megatron.policy.weight_table import layer_weights, shard_shape
from bapo_megatron.tools.planning.scenario import FrozenSpec, Layout, Scenario, Workload

FLOAT32_BYTES = 4
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
        frozen, hidden, scoring, host = 0.0, 0.0, 0.0, offload_share * optimizer
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


def chunk_bytes(case: Scenario) -> float:
    """Return the bytes per token that a chunk's layers keep between forward and backward pass.

    ``recompute: full`` keeps the input of each block of ``recompute_layers`` layers.
    """
    megatron, layers = case.config.megatron, case.layout.layers_per_chunk(case.hf)
    if megatron.recompute == "full":
        return -(-layers // megatron.recompute_layers) * case.hidden_bytes
    hf = case.hf
    attention = hf.num_attention_layers / hf.num_layers
    kinds = _kind_bytes(case, megatron.recompute)
    return layers * (attention * kinds[0] + (1 - attention) * kinds[-1])


def recomputed_bytes(case: Scenario) -> float:
    """Return the bytes per token that a block's backward pass recomputes and holds meanwhile."""
    megatron = case.config.megatron
    if megatron.recompute == "full":
        block = min(megatron.recompute_layers, case.layout.layers_per_chunk(case.hf))
        return block * max(_kind_bytes(case, "none"))
    pairs = zip(_kind_bytes(case, "none"), _kind_bytes(case, megatron.recompute), strict=True)
    return max(whole - kept for whole, kept in pairs)


def layer_tensors(
    case: Scenario, recompute: Literal["none", "selective"], *, has_attention: bool = True
) -> dict[str, float]:
    """Return the bytes per token that one layer keeps, with attention or a delta net, by tensor."""
    hf, mlp = case.hf, mlp_bytes(case)
    tensors = {
        "norms and inputs of the two products": 2 * norm_bytes(case),
        **(_attention_tensors(case, recompute) if has_attention else delta_tensors(case)),
        "gate and up": 2 * mlp,
        "input of the down product": mlp,
    }
    if hf.experts is not None:
        ranks, visits = case.layout.sequence_ranks, hf.experts.per_token
        tensors["tokens of experts"] = visits * case.hidden_bytes
        # 8 bytes per expert, and for each visit two indices and two floats.
        tensors["indices and weights of the router"] = (8 * hf.experts.num + 24 * visits) / ranks
        if case.assumptions.layers == "local":
            tensors["weighted input of the down product"] = mlp
    if case.config.model.lora.rank:
        _change_for_adapters(tensors, case)
    return tensors


def _change_for_adapters(tensors: dict[str, float], case: Scenario) -> None:
    """Products with frozen weights keep no input; adapters keep it, and what they reduce it to.

    Before a fused product, adapters norm the input once more.
    """
    hf, lora, ranks = case.hf, case.config.model.lora, case.layout.sequence_ranks
    if case.assumptions.layers == "local":
        tensors["norms and inputs of the two products"] += 2 * FLOAT32_BYTES / ranks
    visits = hf.experts.per_token if hf.experts else 0
    num_adapters = sum(
        times * len(adapted(weight, hf, lora))
        for layer in range(hf.num_layers)
        for parts in (layer_weights(hf, layer),)
        for times, group in ((1, parts.shared), (visits, parts.expert))
        for weight in group
    )
    tensors["outputs of A"] = lora.rank * num_adapters / hf.num_layers * case.element_bytes


def _attention_tensors(case: Scenario, recompute: Literal["none", "selective"]) -> dict[str, float]:
    """The output of the QKV product lives on through the values, which are a part of it.

    Queries and keys are kept once more after their rotation.
    """
    hf = case.hf
    query = case.divided_bytes(hf.num_heads * hf.head_dim)
    key = case.divided_bytes(hf.num_kv_heads * hf.head_dim)
    tensors: dict[str, float] = {
        "queries, keys, values": query + 2 * key,
        "rotated queries, keys": query + key,
        "attention's output": query,
    }
    if hf.latent:
        tensors = _latent_tensors(case, recompute)
    if hf.output_gate:
        tensors["gate of attention's output"] = 2 * query  # as projected, and the output before it
    if hf.qk_norm:
        tensors["norms of queries and keys"] = _head_norm_bytes(case)
    if recompute == "none" and (hf.latent or case.assumptions.layers == "local"):
        tensors["attention's output, by sequence"] = query  # with MLA, as wide as keys
    if recompute == "none":
        tensors["log-sums of attention"] = FLOAT32_BYTES * (hf.num_heads // case.layout.tensor)
    return tensors


def _latent_tensors(case: Scenario, recompute: Literal["none", "selective"]) -> dict[str, float]:
    """Multi-head latent attention: it pads values to the width of keys, and cuts its output."""
    assert case.hf.latent is not None
    latent, heads = case.hf.latent, case.hf.num_heads
    ranks = (latent.query_rank or 0, latent.key_value_rank)
    norms = sum(_normed_bytes(case, rank) for rank in ranks if rank)
    if case.assumptions.layers == "local":  # the input is a part of what has the rotated key too
        norms += case.element_bytes * latent.rotary_dim / case.layout.sequence_ranks
    return {
        "latents and their norms": norms,
        "cosines and sines": 2 * latent.rotary_dim * case.element_bytes,
        "queries, keys": 2 * case.divided_bytes(heads * case.hf.head_dim),
        "values": case.divided_bytes(
            heads * (latent.value_dim if recompute == "selective" else case.hf.head_dim)
        ),
        "attention's output": case.divided_bytes(heads * latent.value_dim),
    }


def mlp_bytes(case: Scenario) -> float:
    """Return the bytes per token of an MLP's channels, of all experts that the token visits."""
    experts = case.hf.experts
    if experts is None:
        return case.divided_bytes(case.hf.intermediate_size)
    return _visited_bytes(case) + case.divided_bytes(experts.shared_intermediate_size)


def _visited_bytes(case: Scenario) -> float:
    experts = case.hf.experts
    assert experts is not None
    visited = case.element_bytes * experts.per_token * experts.intermediate_size
    return visited / case.layout.sequence_ranks


def _kind_bytes(case: Scenario, recompute: Literal["none", "selective"]) -> list[float]:
    """Return the bytes per token that a layer with attention keeps, then one with a delta net."""
    kinds = [True] if case.hf.delta_net is None else [True, False]
    return [sum(layer_tensors(case, recompute, has_attention=kind).values()) for kind in kinds]


def delta_tensors(case: Scenario) -> dict[str, float]:
    """Return the bytes per token that a gated delta net keeps, by tensor, read off its modules.

    With FLA: the projection, what the convolution returns, queries and keys repeated for each value
    head, a chunk's 64 × 64 system per head, and the output before and after its gated norm. Our
    twin keeps float32 copies; 48 K + 20 V + K V / 16 + 1295 bytes per token and head were measured.
    """
    net = case.hf.delta_net
    assert net is not None
    heads = net.num_value_heads // (case.layout.tensor * case.layout.context)
    heads *= case.layout.context  # of a context rank's own tokens: all-to-alls exchange the two
    key, value = net.key_head_dim, net.value_head_dim
    keys = case.divided_bytes(2 * net.num_key_heads * key)
    values = case.divided_bytes(net.num_value_heads * value)
    tensors: dict[str, float] = {
        "projection": keys + 2 * values + 2 * case.element_bytes * heads,
        "output of the convolution": keys + values,
        "normalised queries and keys": keys,
        "queries and keys of value heads": 2 * case.element_bytes * heads * key,
        "output, before and after its norm": 3 * values,
        "gate": values + FLOAT32_BYTES * heads * value,
    }
    if case.assumptions.layers == "local":
        tensors["rule"] = heads * (48 * key + 20 * value + key * value / 16 + 1295)
    else:
        tensors["rule"] = heads * (64 * case.element_bytes + 2 * FLOAT32_BYTES)
    return tensors


def norm_bytes(case: Scenario) -> float:
    """Return the bytes per token that a norm of the hidden states and the GEMM after it keep.

    The norm's input (local zero-centered norms: in float32), its output, which is the product's
    input, and 1/rms in float32.
    """
    return _normed_bytes(case, case.hf.hidden_size)


def _normed_bytes(case: Scenario, channels: int) -> float:
    input_bytes = case.element_bytes
    if case.assumptions.layers == "local" and case.hf.zero_centered_norms:
        input_bytes = FLOAT32_BYTES
    num_bytes = (input_bytes + case.element_bytes) * channels + FLOAT32_BYTES
    return num_bytes / case.layout.sequence_ranks


def _head_norm_bytes(case: Scenario) -> float:
    """The norms over each head's query and key (Qwen3), whose inputs are parts of QKV's output.

    Transformer Engine copies these parts, which are not contiguous; its output is only rotated, not
    kept. Local: keys are read where they are; Megatron copies the queries of several groups.
    """
    hf, tensor = case.hf, case.layout.tensor
    copied = hf.num_heads if hf.num_kv_heads > tensor else 0
    if case.assumptions.layers != "local":
        # With adapters none: they were for the norm's own gradient.
        copied = 0 if case.config.model.lora.rank else hf.num_heads + hf.num_kv_heads
    inverses = FLOAT32_BYTES * ((hf.num_heads + hf.num_kv_heads) // tensor)
    return case.divided_bytes(copied * hf.head_dim) + inverses


def workspace_bytes(case: Scenario) -> float:
    """Return the bytes per token that a layer's backward pass needs besides what was kept.

    In the MLP: the gradients of the down product's input (f) and of gate and up (2f), the gathered
    input of the gate and up product and its gradient (h each), and the residual's gradient.
    """
    mlp = mlp_bytes(case)
    return 3 * mlp + 2 * case.whole_hidden_bytes + case.hidden_bytes


def logits_bytes(case: Scenario, tokens: int) -> float:
    """Return the bytes of the last stage's head and loss for a micro-batch of ``tokens``.

    All logits at once: [N, V/t] in the model's type, in whose memory their gradient is made, beside
    the gradient of the head's weight in that type (its sum is float32 and counted with the
    gradients) and the gathered input and its gradient.

    Chunked (``ops.logits_chunk_tokens``): logits of a chunk, the gathered hidden states, their
    gradient in float32, the parts of both that belong to the chunk, and a teacher's logits.
    """
    hidden, layout = case.hf.hidden_size, case.layout
    row = case.divided_bytes(padded_vocab_size(case.hf.vocab_size, layout.tensor))
    final_norm = tokens * norm_bytes(case)
    gathered = tokens * case.whole_hidden_bytes if layout.sequence_ranks > 1 else 0
    if case.config.ops.logits_chunk_tokens:
        chunk = min(case.config.ops.logits_chunk_tokens, tokens)
        gradient = FLOAT32_BYTES * tokens * hidden + tokens * case.hidden_bytes
        parts = chunk * (case.whole_hidden_bytes + FLOAT32_BYTES * hidden)
        return final_norm + gathered + gradient + parts + (1 + case.keeps_hidden) * chunk * row
    weight_gradient = row * hidden
    input_gradient = tokens * case.whole_hidden_bytes
    return final_norm + gathered + input_gradient + weight_gradient + tokens * row


def scoring_bytes(case: Scenario, tokens: int, *, is_last: bool) -> float:
    """Return the bytes of a forward-only pass over a micro-batch of ``tokens``.

    An upper bound: the tensors that one layer keeps for training, or on the last stage the gathered
    hidden states with the logits, if these are larger.
    """
    layer = tokens * max(_kind_bytes(case, "none"))
    if not is_last:
        return layer
    row = case.divided_bytes(padded_vocab_size(case.hf.vocab_size, case.layout.tensor))
    chunk = min(case.config.ops.logits_chunk_tokens or tokens, tokens)
    return max(layer, tokens * case.whole_hidden_bytes + chunk * row)


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
    """State of one sequence's gated delta nets, on this GPU, whatever its length."""
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
    servers elsewhere may have more. They divide the weights, the states of gated delta nets and,
    without MLA, the KV cache, of layers · cached channels · element bytes per token.

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
        # Tensor parallelism replicates latents.
        holders = 1 if hf.latent else gpus
        channels = hf.num_attention_layers * hf.cached_channels
        per_token, state = channels * case.element_bytes / holders, state_bytes(case) / gpus
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


def state_bytes(case: Scenario) -> float:
    """Return the bytes of a sequence's gated delta nets: float32 states, and convolved inputs."""
    net = case.hf.delta_net
    if net is None:
        return 0.0
    states = FLOAT32_BYTES * net.num_value_heads * net.key_head_dim * net.value_head_dim
    channels = 2 * net.num_key_heads * net.key_head_dim + net.num_value_heads * net.value_head_dim
    return len(net.layers) * (states + case.element_bytes * channels * (net.kernel_size - 1))


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
    if distillation.is_used and distillation.loss == "top_k":
        num_values += 2 * distillation.top_k  # ids and log-probs
    token_bytes = DUMP_TOKEN_BYTES + FLOAT32_BYTES * num_values
    route_bytes = 0
    buffer_bytes: float = BUFFER_TOKEN_BYTES * buffer_tokens
    if (experts := case.hf.experts) is not None and config.algorithm.router_replay == "rollout":
        routes = case.hf.num_layers * experts.per_token
        route_bytes = routes * (1 if experts.num <= _BYTE_EXPERTS else 2)
        buffer_bytes += 2 * routes * buffer_tokens
    dumps = min(steps, rollout.keep_dumps or steps) if rollout.dump else 0
    checkpoint_bytes = (case.element_bytes + OPTIMIZER_BYTES) * parameters
    if (lora := config.model.lora).rank:
        adapters = sum(stage_adapters(case.hf, lora, Layout(), 0))
        checkpoint_bytes = (FLOAT32_BYTES + OPTIMIZER_BYTES) * adapters
    uses = [
        DiskUse("checkpoint", checkpoint_bytes, num_checkpoints),
        DiskUse("its unfinished samples", buffer_bytes, num_checkpoints),
        DiskUse("dump", token_bytes * work.response_tokens_per_step, dumps),
        DiskUse("export", case.element_bytes * parameters, int(checkpoint.at_end)),
    ]
    if route_bytes:
        uses.append(DiskUse("its experts", route_bytes * work.tokens_per_step, max(dumps, 1)))
    return uses
