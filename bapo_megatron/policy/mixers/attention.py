"""Causal attention with grouped queries (Ainslie et al. 2023, arXiv 2305.13245).

Optionally within a sliding window (Mistral, arXiv 2310.06825), and with a learnt sink per head, one
more logit of the softmax without a value (gpt-oss, arXiv 2508.10925).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.policy.architecture import HfConfig, Weight, YarnRope
from bapo_megatron.policy.mixers.base import FLOAT32_BYTES, Mixer, Share, weight

_NORM = weight("linear_qkv.layer_norm_weight", "input_layernorm.weight", "hidden")
_NORM_AFTER = weight("linear_proj.post_norm.weight", "post_attention_layernorm.weight", "hidden")
_QKV = Weight(
    "self_attention.linear_qkv.weight",
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ("query hidden", "key hidden", "key hidden"),
    0,
    "qkv",
)
_GATED_QKV = replace(_QKV, shapes=("query+gate hidden", "key hidden", "key hidden"))
_OUTPUT = weight("linear_proj.weight", "self_attn.o_proj.weight", "hidden query", 1)
_QKV_BIAS = Weight(
    "self_attention.linear_qkv.bias",
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ("query", "key", "key"),
    0,
    "qkv",
)
_OUTPUT_BIAS = weight("linear_proj.bias", "self_attn.o_proj.bias", "hidden")
_QK_NORM = tuple(
    weight(f"{part}_layernorm.weight", f"self_attn.{part}_norm.weight", "head") for part in "qk"
)
_JOINT_QK_NORM = tuple(
    replace(norm, shapes=(channels,), axis=0)
    for norm, channels in zip(_QK_NORM, ("query", "key"), strict=True)
)
_SINKS = weight("core_attention.softmax_offset", "self_attn.sinks", "heads", 0)


@dataclass(frozen=True)
class Attention(Mixer):
    """Its other sizes are those of ``HfConfig``."""

    window: int | None = None
    """Tokens that a token attends to, itself and those before it; None: all. One size per model."""
    has_sinks: bool = False

    title = "attention"

    def weights(self, hf: HfConfig) -> tuple[Weight, ...]:
        weights = [_NORM] if hf.norms_before else []
        weights += [_GATED_QKV if hf.output_gate else _QKV, _OUTPUT]
        weights += [_NORM_AFTER] if hf.norms_after else []
        weights += [_QKV_BIAS] if hf.qkv_bias else []
        weights += [_OUTPUT_BIAS] if hf.output_bias else []
        weights += [_SINKS] if self.has_sinks else []
        norms = _JOINT_QK_NORM if hf.joint_qk_norm else _QK_NORM
        return (*weights, *(norms if hf.qk_norm else ()))

    def dimensions(self, hf: HfConfig) -> dict[str, int]:
        return {"heads": hf.num_heads}

    def layout_error(self, parallel: ParallelConfig) -> str | None:
        """See ``Mixer``; Transformer Engine has no ring attention of packed sequences for these."""
        if parallel.context == 1 or (self.window is None and not self.has_sinks):
            return None
        return (
            "parallel.context: must be 1 for a model with sliding windows or attention sinks, got "
            f"{parallel.context}; leave it out"
        )

    def megatron_options(self, hf: HfConfig) -> dict[str, Any]:
        """See ``Mixer``; YaRN scales rotated queries and keys, so their products by the square."""
        options: dict[str, Any] = {"softmax_type": "learnable"} if self.has_sinks else {}
        # With the other switch Megatron sums gradients of norms over tensor-parallel ranks.
        options["qk_l2_norm" if hf.joint_qk_norm else "qk_layernorm"] = hf.qk_norm
        if isinstance(hf.rope_scaling, YarnRope):
            options["softmax_scale"] = hf.rope_scaling.attention_factor**2 * hf.head_dim**-0.5
        if hf.attention_scale is not None:
            options["softmax_scale"] = hf.attention_scale
        if self.window is not None:
            has_window = [isinstance(m, Attention) and m.window is not None for m in hf.mixers]
            options["window_size"] = (self.window - 1, 0)
            options["window_attn_skip_freq"] = [int(has) for has in has_window]
        return options

    def put_into(self, layer: Any, hf: HfConfig, *, is_fused: bool) -> None:
        from bapo_megatron.policy import local_layers

        attention = layer.submodules.self_attention.submodules
        if not is_fused:
            attention.linear_qkv = local_layers.NormColumnParallelLinear
            attention.core_attention = local_layers.PackedCausalAttention
            if hf.qk_norm:
                attention.q_layernorm = attention.k_layernorm = local_layers.RMSNorm
        if hf.joint_qk_norm:
            norm = local_layers.JointRMSNorm
            attention.q_layernorm = partial(norm, num_heads=hf.num_heads)
            attention.k_layernorm = partial(norm, num_heads=hf.num_kv_heads)
        if hf.output_bias:
            # Megatron's own switch gives the MLP biases too.
            linear = attention.linear_proj
            attention.linear_proj = lambda *args, **kw: linear(*args, **{**kw, "bias": True})

    def flops(self, hf: HfConfig) -> tuple[int, int]:
        """See ``Mixer``; queries with keys and scores with values, half of the pairs each.

        A window's limit is not counted.
        """
        return 0, 2 * hf.num_heads * hf.head_dim

    def cached_channels(self, hf: HfConfig) -> int:
        return 2 * hf.num_kv_heads * hf.head_dim

    def saved(self, share: Share, *, is_recomputed: bool) -> dict[str, float]:
        """See ``Mixer``.

        The output of the QKV product lives on through the values, which are a part of it. Queries
        and keys are kept once more after their rotation.
        """
        hf = share.hf
        query = share.divided(hf.num_heads * hf.head_dim)
        key = share.divided(hf.num_kv_heads * hf.head_dim)
        tensors: dict[str, float] = {
            "queries, keys, values": query + 2 * key,
            "rotated queries, keys": query + key,
            "attention's output": query,
        }
        if hf.output_gate:  # as projected, and the output before it
            tensors["gate of attention's output"] = 2 * query
        if hf.qk_norm:
            tensors["norms of queries and keys"] = _head_norms(share)
        if not is_recomputed:
            if share.is_local:
                tensors["attention's output, by sequence"] = query
            tensors["log-sums of attention"] = FLOAT32_BYTES * (hf.num_heads // share.tensor)
        return tensors


def _head_norms(share: Share) -> float:
    """The norms over each head's query and key (Qwen3), whose inputs are parts of QKV's output.

    Transformer Engine copies these parts, which are not contiguous; its output is only rotated, not
    kept. Local: keys are read where they are; Megatron copies the queries of several groups. Norms
    over all heads are never Transformer Engine's, and copy the keys of several groups too.
    """
    hf = share.hf
    if hf.joint_qk_norm:
        is_copied = hf.num_kv_heads > share.tensor
        channels = (hf.num_heads + hf.num_kv_heads) * hf.head_dim
        inverses = 2 * FLOAT32_BYTES * (share.tensor == 1)  # of divided norms they are not kept
        return is_copied * share.divided(channels) + inverses
    copied = hf.num_heads if hf.num_kv_heads > share.tensor else 0
    if not share.is_local:
        # With adapters none: they were for the norm's own gradient.
        copied = 0 if share.has_adapters else hf.num_heads + hf.num_kv_heads
    inverses = FLOAT32_BYTES * ((hf.num_heads + hf.num_kv_heads) // share.tensor)
    return share.divided(copied * hf.head_dim) + inverses
