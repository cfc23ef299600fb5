"""Qwen3.5, dense: three gated delta nets to one gated attention.

Published checkpoints (``qwen3_5``) have a vision tower and a head for multi-token prediction, which
are not trained; exports have them as they were.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

from bapo_megatron.policy.architecture import Family, HfConfig, Weight
from bapo_megatron.policy.families.config_json import (
    ConfigJson,
    Count,
    alternating,
    check_layers,
    understand_common,
)
from bapo_megatron.policy.families.layers import decoder_layer
from bapo_megatron.policy.mixers.attention import Attention
from bapo_megatron.policy.mixers.delta_net import DeltaNet, delta_input

ROTARY_SHARE = 0.25
DELTA_INPUT = delta_input(
    {
        "in_proj_qkv": "recurrent_keys+recurrent_keys+recurrent_values",
        "in_proj_z": "recurrent_values",
        "in_proj_b": "recurrent_heads",
        "in_proj_a": "recurrent_heads",
    },
    "sections",
)


class HybridJson(ConfigJson):
    """The fields of config.json of a model with gated delta nets."""

    layer_types: list[Literal["linear_attention", "full_attention"]] | None = None  # type: ignore[assignment]
    full_attention_interval: Count = 4
    linear_num_key_heads: Count
    linear_num_value_heads: Count
    linear_key_head_dim: Count
    linear_value_head_dim: Count
    linear_conv_kernel_dim: Count
    attn_output_gate: Literal[True] = True
    output_gate_type: Literal["swish", "silu"] | None = None
    """Activation of the gate of a delta net's output."""
    mamba_ssm_dtype: Literal["float32"] | None = None


def understand_hybrid(hybrid: HybridJson, delta_input: Weight = DELTA_INPUT) -> HfConfig:
    """Return the architecture that the fields describe, without experts.

    Raises:
        ValueError: Fields contradict each other, or name what is not supported.
    """
    common = understand_common(hybrid, qk_norm=True, rotary_share=ROTARY_SHARE)
    if common.rope_scaling is not None:
        raise ValueError(f"'rope_type' must be default with model_type {hybrid.model_type}")
    interval, num_layers = hybrid.full_attention_interval, common.num_layers
    kinds = hybrid.layer_types or alternating(
        "linear_attention", "full_attention", interval, num_layers
    )
    check_layers("layer_types", kinds, num_layers)
    if hybrid.linear_num_value_heads % hybrid.linear_num_key_heads:
        raise ValueError(
            "'linear_num_value_heads' must be a multiple of 'linear_num_key_heads' "
            f"{hybrid.linear_num_key_heads}, got {hybrid.linear_num_value_heads}"
        )
    net = DeltaNet(
        num_groups=hybrid.linear_num_key_heads,
        num_heads=hybrid.linear_num_value_heads,
        key_dim=hybrid.linear_key_head_dim,
        value_dim=hybrid.linear_value_head_dim,
        kernel_size=hybrid.linear_conv_kernel_dim,
        input=delta_input,
    )
    if hybrid.model_type in ("qwen3_5", "qwen3_5_moe"):  # beside a vision tower
        common = replace(common, tensor_prefix="model.language_model")
    mixers = tuple(net if kind == "linear_attention" else Attention() for kind in kinds)
    return replace(common, output_gate=True, zero_centered_norms=True, mixers=mixers)


Hybrid5 = partial(
    Family,
    layer=decoder_layer,
    is_kept=lambda hf, name: name.startswith(("mtp.", "model.visual.")),
)
FAMILIES = (
    Hybrid5("qwen3_5_text", "Qwen3_5ForCausalLM", HybridJson, understand_hybrid),
    Hybrid5("qwen3_5", "Qwen3_5ForConditionalGeneration", HybridJson, understand_hybrid),
)
