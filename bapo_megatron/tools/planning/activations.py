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

Those of attention and of recurrences are counted by ``policy.mixers``; a chunk has as many of each
as it has on average.

``transformer-engine`` is read off the saved tensors of its LayerNormLinear, Linear, RMSNorm and
flash attention, and Megatron's fused SwiGLU; ``local`` off ours (``policy.local_layers``), and
measured by the tests.
"""

import functools
from typing import Literal

from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.policy.adapters import adapted
from bapo_megatron.policy.architecture import HfConfig
from bapo_megatron.policy.hf_config import padded_vocab_size
from bapo_megatron.policy.mixers.base import FLOAT32_BYTES, Mixer
from bapo_megatron.policy.weight_table import layer_weights
from bapo_megatron.tools.planning.scenario import Scenario

Recompute = Literal["none", "selective"]


def chunk_bytes(case: Scenario) -> float:
    """Return the bytes per token that a chunk's layers keep between forward and backward pass.

    ``recompute: full`` keeps the input of each block of ``recompute_layers`` layers.
    """
    megatron, layers = case.config.megatron, case.layout.layers_per_chunk(case.hf)
    if megatron.recompute == "full":
        return -(-layers // megatron.recompute_layers) * case.hidden_bytes
    of_layer = _layer_bytes(case, megatron.recompute)
    return layers * sum(of_layer[mixer] for mixer in case.hf.mixers) / case.hf.num_layers


def recomputed_bytes(case: Scenario) -> float:
    """Return the bytes per token that a block's backward pass recomputes and holds meanwhile."""
    megatron = case.config.megatron
    if megatron.recompute == "full":
        block = min(megatron.recompute_layers, case.layout.layers_per_chunk(case.hf))
        return block * max(_layer_bytes(case, "none").values())
    kept = _layer_bytes(case, megatron.recompute)
    return max(whole - kept[mixer] for mixer, whole in _layer_bytes(case, "none").items())


def layer_tensors(case: Scenario, recompute: Recompute, mixer: Mixer) -> dict[str, float]:
    """Return the bytes per token that one layer keeps, by tensor."""
    hf, mlp = case.hf, mlp_bytes(case)
    has_mlp = not (hf.has_single_blocks and mixer.is_mixing)
    blocks = mixer.is_mixing + has_mlp
    inputs = case.share.norm(hf.hidden_size) if hf.norms_before else case.hidden_bytes
    tensors = {
        "norms and inputs of the two products": blocks * inputs,
        **mixer.saved(case.share, is_recomputed=recompute == "selective"),
    }
    if has_mlp:
        tensors["gate and up"] = (2 if hf.is_gated else 1) * mlp
        tensors["input of the down product"] = mlp
    if hf.norms_after:  # never Transformer Engine's; their outputs are only added
        element_bytes = FLOAT32_BYTES if hf.zero_centered_norms else case.element_bytes
        num_bytes = element_bytes * hf.hidden_size + FLOAT32_BYTES
        tensors["inputs of the norms after"] = 2 * num_bytes / case.layout.sequence_ranks
    if has_mlp and hf.experts is not None:
        ranks, visits = case.layout.sequence_ranks, hf.experts.per_token
        tensors["tokens of experts"] = visits * case.hidden_bytes
        # 8 bytes per expert, and for each visit two indices and two floats.
        tensors["indices and weights of the router"] = (8 * hf.experts.num + 24 * visits) / ranks
        if case.assumptions.layers == "local":
            tensors["weighted input of the down product"] = mlp
        elif hf.experts.swiglu_limit is not None:
            tensors["clamped gate and up"] = 2 * mlp
    if case.config.model.lora.rank:
        _change_for_adapters(tensors, case)
    return tensors


def _change_for_adapters(tensors: dict[str, float], case: Scenario) -> None:
    """Products with frozen weights keep no input; adapters keep it, and what they reduce it to.

    Before a fused product, adapters norm the input once more.
    """
    hf, lora, ranks = case.hf, case.config.model.lora, case.layout.sequence_ranks
    if case.assumptions.layers == "local" and hf.norms_before:
        tensors["norms and inputs of the two products"] += 2 * FLOAT32_BYTES / ranks
    mean = _visited_adapters(hf, lora) / hf.num_layers
    tensors["outputs of A"] = lora.rank * mean * case.element_bytes


@functools.cache
def _visited_adapters(hf: HfConfig, lora: LoraConfig) -> int:
    """Return the adapters of all layers that a token passes."""
    visits = hf.experts.per_token if hf.experts else 0
    return sum(
        times * len(adapted(weight, hf, lora))
        for layer in range(hf.num_layers)
        for parts in (layer_weights(hf, layer),)
        for times, group in ((1, parts.shared), (visits, parts.expert))
        for weight in group
    )


def mlp_bytes(case: Scenario) -> float:
    """Return the bytes per token of an MLP's channels, of all experts that the token visits."""
    experts = case.hf.experts
    if experts is None:
        return case.share.divided(case.hf.intermediate_size)
    visited = case.element_bytes * experts.per_token * experts.intermediate_size
    shared = case.share.divided(experts.shared_intermediate_size)
    return visited / case.layout.sequence_ranks + shared


def _layer_bytes(case: Scenario, recompute: Recompute) -> dict[Mixer, float]:
    """Return the bytes per token that a layer keeps, by its token mixer."""
    kinds = case.hf.mixer_kinds
    return {mixer: sum(layer_tensors(case, recompute, mixer).values()) for mixer in kinds}


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
    row = case.share.divided(padded_vocab_size(case.hf.vocab_size, layout.tensor))
    final_norm = tokens * case.share.norm(hidden)
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
    layer = tokens * max(_layer_bytes(case, "none").values())
    if not is_last:
        return layer
    row = case.share.divided(padded_vocab_size(case.hf.vocab_size, case.layout.tensor))
    chunk = min(case.config.ops.logits_chunk_tokens or tokens, tokens)
    return max(layer, tokens * case.whole_hidden_bytes + chunk * row)
