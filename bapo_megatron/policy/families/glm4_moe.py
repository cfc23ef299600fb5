"""GLM-4.5, 4.6 and 4.7: sigmoid routing with a bias, shared experts, half of a head rotated.

The first layers are dense. Published checkpoints end with draft layers for speculative decoding
(``num_nextn_predict_layers``), which are not trained; exports have them as they were.
"""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from bapo_megatron.policy.architecture import Experts, Family, HfConfig, Positive
from bapo_megatron.policy.families.config_json import (
    Channels,
    ConfigJson,
    Count,
    ExpertsPerToken,
    understand_common,
)
from bapo_megatron.policy.families.layers import decoder_layer, is_draft

ROTARY_SHARE = 0.5


class SigmoidMoeJson(ConfigJson):
    """The fields of experts with sigmoid routing, DeepSeek-V3's too."""

    n_routed_experts: Count
    num_experts_per_tok: ExpertsPerToken
    moe_intermediate_size: Channels
    n_shared_experts: Count
    first_k_dense_replace: Annotated[int, Field(ge=0)]
    norm_topk_prob: Literal[True]
    routed_scaling_factor: Positive

    def experts(self) -> Experts:
        """Return the experts that the fields describe, in one group."""
        return Experts(
            num=self.n_routed_experts,
            per_token=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            scoring="sigmoid",
            scale=self.routed_scaling_factor,
            has_bias=True,
            shared_intermediate_size=self.n_shared_experts * self.moe_intermediate_size,
            dense_layers=frozenset(range(self.first_k_dense_replace)),
        )


class Glm4MoeJson(SigmoidMoeJson):
    """The fields of config.json."""

    n_group: Literal[1] = 1
    topk_group: Literal[1] = 1
    use_qk_norm: bool = False


def _understand(glm: Glm4MoeJson) -> HfConfig:
    common = understand_common(
        glm, optional_biases=("qkv",), qk_norm=glm.use_qk_norm, rotary_share=ROTARY_SHARE
    )
    return replace(common, experts=glm.experts())


FAMILIES = (
    Family("glm4_moe", "Glm4MoeForCausalLM", Glm4MoeJson, _understand, decoder_layer, is_draft),
)
