"""Mistral, with a sliding window in every layer or none."""

from dataclasses import replace

from bapo_megatron.policy.architecture import Family, HfConfig
from bapo_megatron.policy.families.config_json import ConfigJson, understand_common
from bapo_megatron.policy.families.layers import decoder_layer
from bapo_megatron.policy.mixers.attention import Attention

DEFAULT_WINDOW = 4096


def _understand(fields: ConfigJson) -> HfConfig:
    common, window = understand_common(fields), fields.sliding_window
    if "sliding_window" not in fields.model_fields_set:
        window = DEFAULT_WINDOW
    return replace(common, mixers=(Attention(window or None),) * common.num_layers)


FAMILIES = (Family("mistral", "MistralForCausalLM", ConfigJson, _understand, decoder_layer),)
