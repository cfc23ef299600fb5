"""The files in configs/, for every test that loops over them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.load import load_config

if TYPE_CHECKING:
    from bapo_megatron.config.schema import RunConfig

FOLDER = Path(__file__).parents[2] / "configs"

FRAGMENTS = {
    "base": ("name=x", "run_dir=runs/x", "model.path=models/x"),
    "paper": ("name=x", "model.path=models/x"),
}
"""Files that others inherit and that are no runs, with what makes them complete."""

NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
PAPER_RUNS = [name for name in NAMES if name.startswith(("r1-", "bp-", "octothinker-"))]
CONTROLS = {"grpo": (0.8, 1.2), "clip-higher": (0.8, 1.28)}
"""Suffix of a control's name → its fixed clip."""

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
HF_CONFIGS: dict[str, dict[str, Any]] = {
    "DeepSeek-R1-Distill-Qwen-7B": {
        **_QWEN2,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rope_theta": 10000,
    },
    "DeepSeek-R1-Distill-Qwen-32B": {
        **_QWEN2,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
    "OctoThinker-3B-Long-Zero": {  # that of Llama 3.2 3B, from which it was trained
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
}
"""config.json of the models that the paper's runs start from, as published."""


def load_shipped(name: str) -> RunConfig:
    """The resolved configuration of ``configs/<name>.yaml``."""
    return load_config(FOLDER / f"{name}.yaml", FRAGMENTS.get(name, ()))


def hf_config(config: RunConfig) -> dict[str, Any]:
    """config.json of the model of one of the paper's runs."""
    return HF_CONFIGS[config.model.path.name]
