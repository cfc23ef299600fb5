"""MiniMax-M2 to M2.7: experts as in GLM-4.5 in every layer, and norms over all heads' queries.

Drafts for speculative decoding (``use_mtp``) are not trained; exports have them as they were.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bapo_megatron.policy.architecture import Experts, Family, HfConfig
from bapo_megatron.policy.families.config_json import (
    ConfigJson,
    Count,
    ExpertsPerToken,
    understand_common,
)
from bapo_megatron.policy.families.layers import decoder_layer, is_draft

_NAMES = (
    ("mlp.", "block_sparse_moe."),
    ("gate.e_score", "e_score"),
    ("gate_proj", "w1"),
    ("up_proj", "w3"),
    ("down_proj", "w2"),
)
One = Annotated[float, Field(ge=1, le=1)]


class MiniMaxM2Json(ConfigJson):
    """The fields of config.json."""

    default_rope_theta: ClassVar[float] = 5_000_000.0
    head_dim: Count
    num_local_experts: Count
    num_experts_per_tok: ExpertsPerToken
    rotary_dim: Count
    use_qk_norm: Literal[True] = True
    qk_norm_type: Literal["per_layer"] = "per_layer"
    use_routing_bias: Literal[True] = True
    scoring_func: Literal["sigmoid"] = "sigmoid"
    attn_type_list: list[Literal[1]] | None = None
    layernorm_full_attention_beta: One = 1.0
    layernorm_mlp_beta: One = 1.0
    auto_map: dict[str, str] | None = None
    """Code beside the weights, which nothing runs."""


def _understand(minimax: MiniMaxM2Json) -> HfConfig:
    experts = Experts(
        num=minimax.num_local_experts,
        per_token=minimax.num_experts_per_tok,
        intermediate_size=minimax.intermediate_size,
        scoring="sigmoid",
        has_bias=True,
    )
    share = minimax.rotary_dim / minimax.head_dim
    common = understand_common(minimax, qk_norm=True, rotary_share=share)
    return replace(common, joint_qk_norm=True, experts=experts, tensor_names=_NAMES)


FAMILIES = (
    Family(
        "minimax_m2", "MiniMaxM2ForCausalLM", MiniMaxM2Json, _understand, decoder_layer, is_draft
    ),
)
