"""The tensors of a layer, of the head and of a scoring pass, in bytes per token of a rank.

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
flash attention, and Megatron's fused SwiGLU; ``local`` off ours (``policy.local_layers``), and
measured by the tests.
"""

from typing import Literal

from bapo_megatron.policy.adapters import adapted
from bapo_megatron.policy.hf_config import padded_vocab_size
from bapo_megatron.policy.weight_table import layer_weights
from bapo_megatron.tools.planning.scenario import FLOAT32_BYTES, Scenario


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
        "norms and inputs of the two products": 2 * norm_bytes(case, hf.hidden_size),
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
    norms = sum(norm_bytes(case, rank) for rank in ranks if rank)
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
    visited = case.element_bytes * experts.per_token * experts.intermediate_size
    shared = case.divided_bytes(experts.shared_intermediate_size)
    return visited / case.layout.sequence_ranks + shared


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


def norm_bytes(case: Scenario, channels: int) -> float:
    """Return the bytes per token that a norm and the GEMM after it keep.

    The norm's input (local zero-centered norms: in float32), its output, which is the product's
    input, and 1/rms in float32.
    """
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
    final_norm = tokens * norm_bytes(case, hidden)
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
