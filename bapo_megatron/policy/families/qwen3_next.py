"""Qwen3-Next, such as 80B-A3B: Qwen3.5's layers, but for the order of a projection's rows."""

from dataclasses import replace
from typing import Literal

from bapo_megatron.policy.architecture import Family, HfConfig
from bapo_megatron.policy.families.layers import decoder_layer
from bapo_megatron.policy.families.qwen3_5 import understand_hybrid
from bapo_megatron.policy.families.qwen3_5_moe import HybridMoeJson
from bapo_megatron.policy.mixers.delta_net import delta_input

DELTA_INPUT = delta_input(
    {
        "in_proj_qkvz": "recurrent_keys+recurrent_keys+recurrent_values+recurrent_values",
        "in_proj_ba": "recurrent_heads+recurrent_heads",
    },
    "sections_by_head",
)


class Qwen3NextJson(HybridMoeJson):
    """The fields of config.json."""

    norm_topk_prob: bool
    decoder_sparse_step: Literal[1] = 1
    mlp_only_layers: list[int] | None = None


def _understand(moe: Qwen3NextJson) -> HfConfig:
    experts = replace(
        moe.experts(),
        normalizes=moe.norm_topk_prob,
        dense_layers=frozenset(moe.mlp_only_layers or ()),
    )
    return replace(understand_hybrid(moe, DELTA_INPUT), experts=experts)


FAMILIES = (
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        Qwen3NextJson,
        _understand,
        decoder_layer,
        is_kept=lambda hf, name: name.startswith("mtp."),
    ),
)
