"""Qwen3 with experts, such as 30B-A3B and 235B-A22B."""

from dataclasses import replace
from typing import Literal

from bapo_megatron.policy.architecture import Experts, Family, HfConfig
from bapo_megatron.policy.families.config_json import Channels, ConfigJson, Count, understand_common
from bapo_megatron.policy.families.layers import decoder_layer


class Qwen3MoeJson(ConfigJson):
    """The fields of config.json."""

    num_experts: Count | None = None
    num_local_experts: Count | None = None
    """transformers 5 writes this name."""
    num_experts_per_tok: Count
    moe_intermediate_size: Channels
    norm_topk_prob: bool
    decoder_sparse_step: Literal[1] = 1
    mlp_only_layers: list[int] | None = None


def _understand(moe: Qwen3MoeJson) -> HfConfig:
    counts = {moe.num_experts, moe.num_local_experts} - {None}
    if len(counts) != 1:
        raise ValueError(
            f"'num_experts' must be given once, got {moe.num_experts} and, as 'num_local_experts', "
            f"{moe.num_local_experts}"
        )
    experts = Experts(
        num=counts.pop() or 0,
        per_token=moe.num_experts_per_tok,
        intermediate_size=moe.moe_intermediate_size,
        normalizes=moe.norm_topk_prob,
        dense_layers=frozenset(moe.mlp_only_layers or ()),
    )
    return replace(understand_common(moe, qk_norm=True), experts=experts)


FAMILIES = (Family("qwen3_moe", "Qwen3MoeForCausalLM", Qwen3MoeJson, _understand, decoder_layer),)
