"""Llama 2 and 3, and models of their architecture, such as SmolLM2."""

from functools import partial

from bapo_megatron.policy.architecture import Family
from bapo_megatron.policy.families.config_json import ConfigJson, understand_common
from bapo_megatron.policy.families.layers import decoder_layer

_understand = partial(understand_common, optional_biases=("qkv", "output"))
FAMILIES = (Family("llama", "LlamaForCausalLM", ConfigJson, _understand, decoder_layer),)
