"""The model families, one per file; ``base`` says what a family is."""

from bapo_megatron.policy.families import (
    deepseek_v3,
    glm4_moe,
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)

_MODULES = (qwen2, qwen3, llama, mistral, qwen3_moe, glm4_moe, deepseek_v3, qwen3_next)
FAMILIES = {
    family.model_type: family
    for family in (
        *(module.FAMILY for module in _MODULES),
        *qwen3_5.FAMILIES,
        *qwen3_5_moe.FAMILIES,
    )
}
"""By config.json's ``model_type``."""
