"""DeepSeek-V3 and models of its architecture, Moonlight and Kimi K2: MLA, and experts.

Experts are GLM-4.5's, optionally in groups.
"""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from bapo_megatron.policy.architecture import Family, HfConfig, YarnRope
from bapo_megatron.policy.families.config_json import Count, understand_common
from bapo_megatron.policy.families.glm4_moe import SigmoidMoeJson
from bapo_megatron.policy.families.layers import decoder_layer, is_draft
from bapo_megatron.policy.mixers.latent import LatentAttention

_SUMMED_PER_GROUP = 2
"""Scores whose sum ranks a group; Megatron sums ``per_token`` / ``groups_per_token``."""


class DeepseekV3Json(SigmoidMoeJson):
    """The fields of config.json."""

    q_lora_rank: Count | None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Annotated[int, Field(ge=4, le=1 << 12, multiple_of=4)]
    qk_head_dim: Count | None = None
    """transformers 5 writes this sum, and ``qk_rope_head_dim`` again as ``head_dim``."""
    v_head_dim: Count
    rope_interleave: Literal[True] = True
    moe_layer_freq: Literal[1] = 1
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    n_group: Count
    topk_group: Count
    auto_map: dict[str, str] | None = None
    """Code beside the weights, which nothing runs."""


def understand_deepseek(deepseek: DeepseekV3Json) -> HfConfig:
    """Return the architecture that the fields describe.

    Raises:
        ValueError: Fields contradict each other, or name what is not supported.
    """
    latent = LatentAttention(
        query_rank=deepseek.q_lora_rank,
        key_value_rank=deepseek.kv_lora_rank,
        unrotated_dim=deepseek.qk_nope_head_dim,
        rotary_dim=deepseek.qk_rope_head_dim,
        value_dim=deepseek.v_head_dim,
    )
    head_dim = latent.unrotated_dim + latent.rotary_dim
    for name, value, allowed in (
        ("head_dim", deepseek.head_dim, latent.rotary_dim),
        ("qk_head_dim", deepseek.qk_head_dim, head_dim),
    ):
        if value not in (None, allowed):
            raise ValueError(f"'{name}' must be {allowed} or absent, got {value}")
    if latent.value_dim > head_dim:
        raise ValueError(f"'v_head_dim' must be at most {head_dim}, got {latent.value_dim}")
    groups, per_token = deepseek.topk_group, deepseek.num_experts_per_tok
    if deepseek.n_group > 1 and per_token != _SUMMED_PER_GROUP * groups:
        raise ValueError(
            f"'num_experts_per_tok' must be {_SUMMED_PER_GROUP} × 'topk_group' {groups} with "
            f"'n_group' {deepseek.n_group}, got {per_token}"
        )
    per_group, rest = divmod(deepseek.n_routed_experts, deepseek.n_group)
    if rest or per_group < _SUMMED_PER_GROUP or groups > deepseek.n_group:
        raise ValueError(
            f"'n_group' must divide 'n_routed_experts' {deepseek.n_routed_experts} into groups of "
            f"2 or more, and be at least 'topk_group' {groups}, got {deepseek.n_group}"
        )
    if per_token > deepseek.n_routed_experts:
        raise ValueError(
            f"'num_experts_per_tok' must be at most 'n_routed_experts' "
            f"{deepseek.n_routed_experts}, got {per_token}"
        )
    experts = replace(deepseek.experts(), num_groups=deepseek.n_group, groups_per_token=groups)
    common = understand_common(deepseek)
    if common.num_kv_heads != common.num_heads:
        raise ValueError(
            f"'num_key_value_heads' must be 'num_attention_heads' {common.num_heads}, got "
            f"{common.num_kv_heads}"
        )
    scaling = common.rope_scaling
    if scaling is not None and not (
        isinstance(scaling, YarnRope)
        and scaling.truncate
        and (scaling.mscale is None) == (scaling.mscale_all_dim is None)
    ):
        raise ValueError(
            "'rope_scaling' must be absent, or yarn with truncate and with both or neither of "
            f"'mscale' and 'mscale_all_dim', got {scaling}"
        )
    mixers = (latent,) * common.num_layers
    return replace(common, head_dim=head_dim, mixers=mixers, experts=experts)


FAMILIES = tuple(
    Family(
        model_type,
        "DeepseekV3ForCausalLM",
        DeepseekV3Json,
        understand_deepseek,
        decoder_layer,
        is_draft,
    )
    for model_type in ("deepseek_v3", "kimi_k2")
)
