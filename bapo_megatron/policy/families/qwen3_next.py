"""Qwen3-Next, such as 80B-A3B: Qwen3.5's layers, but for the order of a projection's rows."""

from dataclasses import replace
from functools import partial
from typing import Literal, cast

from bapo_megatron.policy.families.base import Experts, Family, HfConfig
from bapo_megatron.policy.families.config_json import Channels, ConfigJson, Count
from bapo_megatron.policy.families.layers import delta_input, hybrid_layer
from bapo_megatron.policy.families.qwen3_5 import HybridJson, understand_hybrid

DELTA_INPUT = delta_input(
    {
        "in_proj_qkvz": "delta_key+delta_key+delta_value+delta_value",
        "in_proj_ba": "delta_heads+delta_heads",
    },
    "sections_by_head",
)


class Qwen3NextJson(HybridJson):
    """The fields of config.json."""

    num_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Channels
    shared_expert_intermediate_size: Channels
    norm_topk_prob: bool
    decoder_sparse_step: Literal[1] = 1
    mlp_only_layers: list[int] | None = None


def _understand(fields: ConfigJson) -> HfConfig:
    moe = cast(Qwen3NextJson, fields)
    experts = Experts(
        num=moe.num_experts,
        per_token=moe.num_experts_per_tok,
        intermediate_size=moe.moe_intermediate_size,
        normalizes=moe.norm_topk_prob,
        shared_intermediate_size=moe.shared_expert_intermediate_size,
        has_shared_gate=True,
        dense_layers=frozenset(moe.mlp_only_layers or ()),
    )
    return replace(understand_hybrid(fields), experts=experts)


FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    Qwen3NextJson,
    _understand,
    partial(hybrid_layer, delta_input=DELTA_INPUT),
    kept_tensors=("mtp.",),
)
