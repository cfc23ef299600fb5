"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from functools import partial

from bapo_megatron.policy.architecture import Family
from bapo_megatron.policy.families.config_json import ConfigJson, understand_common
from bapo_megatron.policy.families.layers import decoder_layer

_understand = partial(understand_common, qkv_bias=True)
FAMILIES = (Family("qwen2", "Qwen2ForCausalLM", ConfigJson, _understand, decoder_layer),)
