"""Mistral without its sliding window."""

from bapo_megatron.policy.architecture import Family, HfConfig
from bapo_megatron.policy.families.config_json import ConfigJson, understand_common
from bapo_megatron.policy.families.layers import decoder_layer


def _understand(fields: ConfigJson) -> HfConfig:
    # Qwen's window needs use_sliding_window, Mistral's is there by default.
    if fields.sliding_window or "sliding_window" not in fields.model_fields_set:
        raise ValueError(
            "'sliding_window' must be null with model_type mistral, which has a window by default, "
            f"got {fields.sliding_window or 'none'}"
        )
    return understand_common(fields)


FAMILIES = (Family("mistral", "MistralForCausalLM", ConfigJson, _understand, decoder_layer),)
