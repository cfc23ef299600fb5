"""Qwen3: RMSNorm over each head's query and key."""

from functools import partial

from bapo_megatron.policy.architecture import Family
from bapo_megatron.policy.families.config_json import ConfigJson, understand_common
from bapo_megatron.policy.families.layers import decoder_layer

_understand = partial(understand_common, optional_biases=("qkv", "output"), qk_norm=True)
FAMILIES = (Family("qwen3", "Qwen3ForCausalLM", ConfigJson, _understand, decoder_layer),)
