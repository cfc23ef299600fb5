"""OLMo-2: norms after attention and MLP, and over the queries and keys of all heads."""

from dataclasses import replace

from bapo_megatron.policy.architecture import Family, HfConfig
from bapo_megatron.policy.families.config_json import ConfigJson, understand_common
from bapo_megatron.policy.families.layers import decoder_layer


def _understand(fields: ConfigJson) -> HfConfig:
    common = understand_common(fields, qk_norm=True)
    return replace(common, joint_qk_norm=True, norms_before=False, norms_after=True)


FAMILIES = (Family("olmo2", "Olmo2ForCausalLM", ConfigJson, _understand, decoder_layer),)
