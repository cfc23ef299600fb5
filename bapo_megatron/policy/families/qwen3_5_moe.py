"""Qwen3.5 with experts, such as 35B-A3B: every layer has experts and a gated shared one."""

from dataclasses import replace

from bapo_megatron.policy.architecture import Experts, HfConfig
from bapo_megatron.policy.families.config_json import Channels, Count
from bapo_megatron.policy.families.qwen3_5 import Hybrid5, HybridJson, understand_hybrid


class HybridMoeJson(HybridJson):
    """The fields of a hybrid with experts and a gated shared one, Qwen3-Next's too."""

    num_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Channels
    shared_expert_intermediate_size: Channels

    def experts(self) -> Experts:
        """Return the experts that the fields describe."""
        return Experts(
            num=self.num_experts,
            per_token=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            shared_intermediate_size=self.shared_expert_intermediate_size,
            has_shared_gate=True,
        )


class MoeJson(HybridMoeJson):
    """The fields of config.json."""

    intermediate_size: Channels = 0
    """Not given: no layer is dense."""


def _understand(moe: MoeJson) -> HfConfig:
    size = moe.shared_expert_intermediate_size
    return replace(understand_hybrid(moe), experts=moe.experts(), intermediate_size=size)


FAMILIES = (
    Hybrid5("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", MoeJson, _understand),
    Hybrid5("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", MoeJson, _understand),
)
