"""Tiny models of all families: each is entered here once, and every test of families has it.

Which tests and layouts see a model follows from its fields.
"""

from collections.abc import Iterable
from typing import Any

import pytest

VOCAB_SIZE = 97  # prime, so that padding is needed for every tensor-parallel size


def _rope(kind: str, theta: float, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **fields}


_YARN = _rope("yarn", 100.0, factor=4.0, original_max_position_embeddings=8)
_LLAMA3 = _rope("llama3", 10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
_EXPERTS = {
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
_SHARED_EXPERTS = _EXPERTS | {
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_MISTRAL = {"tie_word_embeddings": False, "sliding_window": None, "rope_parameters": _YARN}
_DEEPSEEK = {
    **_SHARED_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
}
# A gated delta net before each attention.
_HYBRID = {
    "tie_word_embeddings": False,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "initializer_range": 0.12,
    # A delta net's output, a product of queries and keys that may cancel, is divided by its size:
    # with 1e-6 transformers in float32 is up to 2e-5 off transformers in float64.
    "rms_norm_eps": 1e-3,
}
_HYBRID_EXPERTS = _HYBRID | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
TINY: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
    "llama": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 16},
    },
    "mistral": _MISTRAL,
    "qwen3_moe": _EXPERTS | {"head_dim": 16, "num_experts": 8},
    "glm4_moe": _SHARED_EXPERTS
    | {
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
    },
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID_EXPERTS,
    "deepseek_v3": _DEEPSEEK,
    "gemma3_text": {
        "pad_token_id": None,  # transformers keeps its embedding out of training
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "sliding_attention": _rope("default", 100.0),
            "full_attention": _rope("linear", 10000.0, factor=4.0),
        },
    },
    "olmo2": {"pad_token_id": None, "eos_token_id": None},  # of its own vocabulary
    "minimax_m2": {
        "tie_word_embeddings": False,
        "head_dim": 16,
        "rotary_dim": 8,
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-E",  # a layer of each kind
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 12,
        # transformers limits steps of its prefill to time_step_min, nobody else
        "time_step_min": 1e-9,
        "time_step_floor": 0.3,
        "time_step_max": 1.0,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 2.5,
    },
    "gpt_oss": {
        "tie_word_embeddings": False,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 8,
        "sliding_window": 4,
        "swiglu_limit": 1.0,  # many values are beyond
        "rope_parameters": _YARN | {"truncate": False},
    },
    # No latent of queries, no groups, no YaRN.
    "moonlight": _DEEPSEEK
    | {"q_lora_rank": None, "n_group": 1, "n_shared_experts": 2}
    | {"rope_parameters": _rope("default", 50000.0)},
    "mistral_window": _MISTRAL | {"sliding_window": 4},
    "glm4_moe_lite": _DEEPSEEK
    | {
        "n_group": 1,
        "rms_norm_eps": 1e-6,  # which transformers fixes for the norms of latents
        "rope_parameters": _rope("default", 50000.0),
    },
    "qwen3_5_moe_text": _HYBRID_EXPERTS | {"intermediate_size": "absent"},
}
"""Fields of each model's configuration beside ``SIZES``: every part that the family has."""
MODEL_TYPES = {"moonlight": "deepseek_v3", "mistral_window": "mistral"}
"""Families of models with other names."""

FAMILIES = (*TINY,)


def _with(field: str) -> tuple[str, ...]:
    return tuple(name for name, fields in TINY.items() if fields.get(field) is not None)


WITH_EXPERTS = _with("num_experts_per_tok")
WITH_WINDOWS = _with("sliding_window")
RECURRENT = _with("linear_num_key_heads") + _with("mamba_num_heads")
COVERING = ("qwen3", "deepseek_v3", "gpt_oss", "qwen3_5_text")
"""Those that ``make test`` checks; CI checks all."""


def marks(family: str) -> list[pytest.MarkDecorator]:
    """Marks of a test of one family."""
    return [] if family in COVERING else [pytest.mark.exhaustive]


def params(families: Iterable[str] = FAMILIES) -> list[Any]:
    """Parameters of a test that each of these families has."""
    return [pytest.param(family, marks=marks(family)) for family in families]
