"""Qwen3: RMSNorm over each head's query and key."""

from bapo_megatron.policy.families.base import Family, HfConfig
from bapo_megatron.policy.families.config_json import ConfigJson, understand_common
from bapo_megatron.policy.families.layers import decoder_layer


def _understand(fields: ConfigJson) -> HfConfig:
    has_bias = bool(fields.attention_bias)
    return understand_common(fields, qkv_bias=has_bias, output_bias=has_bias, qk_norm=True)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", ConfigJson, _understand, decoder_layer)
