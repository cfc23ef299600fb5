"""The model families, one per file; ``base`` says what a family is."""

from bapo_megatron.policy.families import (
    deepseek_v3,
    glm4_moe,
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_moe,
)

FAMILIES = {
    module.FAMILY.model_type: module.FAMILY
    for module in (qwen2, qwen3, llama, mistral, qwen3_moe, glm4_moe, deepseek_v3)
}
"""By config.json's ``model_type``."""
