"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from bapo_megatron.policy.families.base import Family, HfConfig
from bapo_megatron.policy.families.config_json import (
    ConfigJson,
    refuse_attention_bias,
    understand_common,
)
from bapo_megatron.policy.families.layers import decoder_layer


def _understand(fields: ConfigJson) -> HfConfig:
    refuse_attention_bias(fields)
    return understand_common(fields, qkv_bias=True)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", ConfigJson, _understand, decoder_layer)
