"""Nemotron-H and Nemotron-3-Nano: layers of one block each, most of them Mamba-2.

A layer is Mamba-2, attention without rotary embeddings, an MLP with relu², or experts with it.
"""

import math
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from bapo_megatron.policy.architecture import Experts, Family, HfConfig, Positive
from bapo_megatron.policy.families.config_json import (
    Channels,
    ConfigJson,
    Count,
    ExpertsPerToken,
    understand_common,
)
from bapo_megatron.policy.families.layers import decoder_layer
from bapo_megatron.policy.mixers.attention import Attention
from bapo_megatron.policy.mixers.base import NoMixer
from bapo_megatron.policy.mixers.mamba import Mamba

_KINDS = {"linear_attention": "M mamba", "full_attention": "* attention", "mlp": "-", "moe": "E"}
"""Blocks of ``layers_block_type``, with their other names in it and in ``hybrid_override_pattern``.
"""
_BLOCKS = {name: kind for kind, names in _KINDS.items() for name in (kind, *names.split())}
_INFINITIES: tuple[Any, ...] = (math.inf, {"__float__": "Infinity"})
_NAMES = (
    ("model.embed_tokens.", "model.embeddings."),
    ("model.norm.", "model.norm_f."),
    ("input_layernorm.", "norm."),
    ("post_attention_layernorm.", "norm."),
    *((f"{block}.", "mixer.") for block in ("mamba", "self_attn", "mlp")),
)


class NemotronHJson(ConfigJson):
    """The fields of config.json."""

    num_hidden_layers: Count | None = None  # type: ignore[assignment]
    hybrid_override_pattern: Annotated[str, Field(pattern=r"^[M*E-]+$")] | None = None
    layers_block_type: list[str] | None = None
    head_dim: Count = Field(128, validation_alias=AliasChoices("head_dim", "attention_head_dim"))
    rms_norm_eps: Positive = Field(
        1e-5, validation_alias=AliasChoices("layer_norm_epsilon", "rms_norm_eps", "norm_eps")
    )
    mlp_hidden_act: Literal["relu2"]
    mamba_hidden_act: Literal["silu"] = "silu"
    mamba_num_heads: Count
    mamba_head_dim: Count
    n_groups: Count = Field(8, validation_alias=AliasChoices("n_groups", "mamba_num_groups"))
    ssm_state_size: Count
    conv_kernel: Count = 4
    use_conv_bias: Literal[True] = True
    n_routed_experts: Count = 8
    num_experts_per_tok: ExpertsPerToken = 2
    moe_intermediate_size: Channels = 7688
    moe_shared_expert_intermediate_size: Channels = 7688
    n_shared_experts: Literal[1] = 1
    n_group: Literal[1] = 1
    topk_group: Literal[1] = 1
    norm_topk_prob: Literal[True] = True
    routed_scaling_factor: Positive = 1.0
    auto_map: dict[str, str] | None = None
    mamba_ssm_cache_dtype: Literal["float32"] = "float32"
    time_step_limit: list[Any] | None = None
    """Of Δ; only transformers has another lower one, ``time_step_min``, and in prefills alone."""


def _blocks(fields: NemotronHJson) -> list[str]:
    named = fields.layers_block_type or [*(fields.hybrid_override_pattern or "")]
    blocks = [_BLOCKS.get(name, name) for name in named]
    if (
        not blocks
        or {*blocks} - {*_KINDS}
        or len(blocks) != (fields.num_hidden_layers or len(blocks))
    ):
        raise ValueError(
            "'layers_block_type' or 'hybrid_override_pattern' must name 'num_hidden_layers' "
            f"{fields.num_hidden_layers} blocks of {', '.join(_KINDS)}, got "
            f"{len(blocks)} of {', '.join(sorted({*blocks}))}"
        )
    return blocks


def _understand(fields: NemotronHJson) -> HfConfig:
    blocks = _blocks(fields)
    if fields.time_step_limit not in (None, *([0.0, no] for no in _INFINITIES)):
        raise ValueError(f"'time_step_limit' must be [0.0, Infinity], got {fields.time_step_limit}")
    if fields.mamba_num_heads % fields.n_groups:
        raise ValueError(
            f"'mamba_num_heads' must be a multiple of 'n_groups' {fields.n_groups}, got "
            f"{fields.mamba_num_heads}"
        )
    common = understand_common(
        fields.model_copy(update={"num_hidden_layers": len(blocks)}),
        rotary_share=fields.partial_rotary_factor or 1.0,
    )
    mamba = Mamba(
        num_heads=fields.mamba_num_heads,
        value_dim=fields.mamba_head_dim,
        num_groups=fields.n_groups,
        key_dim=fields.ssm_state_size,
        kernel_size=fields.conv_kernel,
    )
    kinds = {"linear_attention": mamba, "full_attention": Attention()}
    experts = Experts(
        num=fields.n_routed_experts,
        per_token=fields.num_experts_per_tok,
        intermediate_size=fields.moe_intermediate_size,
        scoring="sigmoid",
        scale=fields.routed_scaling_factor,
        has_bias=True,
        shared_intermediate_size=fields.moe_shared_expert_intermediate_size,
        dense_layers=frozenset(layer for layer, kind in enumerate(blocks) if kind != "moe"),
    )
    return replace(
        common,
        mixers=tuple(kinds.get(block, NoMixer()) for block in blocks),
        rotary_share=0.0,
        activation="relu2",
        has_single_blocks=True,
        experts=experts if "moe" in blocks else None,
        tensor_prefix="backbone",
        tensor_names=_NAMES,
    )


FAMILIES = (
    Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        NemotronHJson,
        _understand,
        decoder_layer,
        is_kept=lambda hf, name: name.startswith("mtp."),
    ),
)
