"""The models, layouts and runs that plans are compared with Megatron on, without importing it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.policy.architecture import Experts, HfConfig
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.policy.mixers.attention import Attention
from bapo_megatron.policy.mixers.latent import LatentAttention
from bapo_megatron.tools.planning.plan import PlanOptions, make_assumptions
from bapo_megatron.tools.planning.scenario import LayerKind, Layout, Passes, Scenario

MODELS = Path(__file__).parent / "models"
"""config.json files as published."""

LENGTHS = (128, 256, 128)
"""Sequences of the micro-batch that small models run."""

PARAMETERS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{model} {' '.join(f'{key}={value}' for key, value in parallel.items())}": (model, parallel)
    for model, layouts in {
        "deepseek-r1-distill-qwen-7b": (
            {},
            {"tensor": 2, "sequence": True},
            {"tensor": 4, "sequence": True},
            {"tensor": 2, "pipeline": 2},
            {"tensor": 4, "pipeline": 2, "virtual_pipeline": 7},
            {"tensor": 4, "sequence": True, "context": 2},
        ),
        "deepseek-r1-distill-qwen-32b": (
            {"tensor": 8, "sequence": True, "pipeline": 2, "context": 4},
            {"tensor": 4, "sequence": True, "pipeline": 4, "virtual_pipeline": 4},
            {"pipeline": 8},
        ),
        "octothinker-3b": (
            {},
            {"tensor": 2, "sequence": True},
            {"tensor": 8, "sequence": True},
            {"tensor": 2, "pipeline": 2},
            {"pipeline": 4, "virtual_pipeline": 7},
        ),
        "qwen3-0.6b": ({"tensor": 2}, {"tensor": 4, "pipeline": 7, "virtual_pipeline": 2}),
        "qwen3-30b-a3b": (
            {"expert": 16},
            {"tensor": 4, "sequence": True, "expert": 8, "expert_tensor": 1, "pipeline": 2},
            {"tensor": 4, "sequence": True, "context": 2, "expert": 8, "expert_tensor": 1},
        ),
        "qwen3.5-27b": (
            {"tensor": 4, "sequence": True, "pipeline": 2},
            {"tensor": 2, "sequence": True, "pipeline": 2, "context": 4},
        ),
        "gemma-3-4b-it": ({"tensor": 4, "sequence": True, "pipeline": 2},),
        "gpt-oss-20b": (
            {"expert": 4},
            {"tensor": 4, "sequence": True, "expert": 8, "expert_tensor": 1, "pipeline": 2},
        ),
        "glm-4.5-air": ({"tensor": 2, "sequence": True, "pipeline": 2, "expert": 16},),
        "moonlight-16b-a3b": (
            {"expert": 8},
            {"tensor": 4, "sequence": True, "expert": 8, "expert_tensor": 1, "pipeline": 3},
        ),
    }.items()
    for parallel in layouts
}
"""Published models, with tied and untied embeddings, in layouts of every kind."""

SAVED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "none": ("qwen2", "bfloat16", {}, {}),
    "float32": ("qwen2", "float32", {}, {}),
    "selective": ("qwen2", "bfloat16", {}, {"recompute": "selective"}),
    "full": ("qwen2", "bfloat16", {}, {"recompute": "full"}),
    "full by two": ("qwen2", "bfloat16", {}, {"recompute": "full", "recompute_layers": 2}),
    "norms of heads": ("qwen3", "bfloat16", {}, {}),
    "tensor": ("qwen2", "bfloat16", {"tensor": 2}, {}),
    "sequence": ("qwen3", "bfloat16", {"tensor": 2, "sequence": True}, {}),
    "sequence, full": ("qwen2", "bfloat16", {"tensor": 2, "sequence": True}, {"recompute": "full"}),
    "norms after": ("gemma3_text", "bfloat16", {"tensor": 2, "sequence": True}, {}),
    "experts": ("qwen3_moe", "bfloat16", {}, {}),
    "clamped experts": ("gpt_oss", "bfloat16", {}, {}),
    "only norms after": ("olmo2", "bfloat16", {"tensor": 2, "sequence": True}, {}),
    "latents": ("deepseek_v3", "bfloat16", {}, {}),
    "latents, selective": ("deepseek_v3", "bfloat16", {}, {"recompute": "selective"}),
}
"""Small models whose kept activations are measured."""

MESSAGES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
}
"""Layouts whose collectives within the model are recorded."""

STATE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one rank": ("bfloat16", {}, {}),
    "divided": ("bfloat16", {"tensor": 2, "context": 2}, {}),
    "float32": ("float32", {"context": 2}, {}),
}
"""Small models whose buffers are measured."""

FROZEN: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {}),
    "tied, divided": ("qwen3", {"tensor": 2, "sequence": True, "pipeline": 2}),
    "untied, interleaved": ("qwen2", {"pipeline": 2, "virtual_pipeline": 2}),
}
"""Tiny models of four layers (``tests.policy.tiny_models``) that are built as frozen ones."""

IN_FLIGHT = [(1, 1, 8), (2, 1, 8), (4, 1, 8), (4, 1, 2), (2, 2, 8), (4, 2, 8), (4, 4, 4), (4, 2, 4)]
"""(pipeline, virtual_pipeline, micro-batches)."""


EXPERTS = ("qwen3_moe", "gpt_oss", "deepseek_v3")


def published(name: str) -> HfConfig:
    """A published model."""
    return read_hf_config_file(MODELS / f"{name}.json")


def small_model(family: str, layers: int) -> HfConfig:
    """A model that runs on a CPU; MLP and heads are no multiples of the hidden size."""
    experts = Experts(num=8, per_token=3, intermediate_size=96) if family in EXPERTS else None
    if experts and family == "gpt_oss":
        experts = replace(experts, swiglu_limit=7.0, has_linear_biases=True)
    is_latent = family == "deepseek_v3"
    mixer = LatentAttention(80, 48, 24, 8, 20) if is_latent else Attention()
    return HfConfig(
        model_type=family,
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        mixers=(mixer,) * layers,
        num_heads=8,
        num_kv_heads=8 if is_latent else 4 if family == "olmo2" else 2,
        head_dim=64 if family == "qwen3" else 32,
        rms_norm_eps=1e-6,
        max_position_embeddings=131072,
        rope_theta=1e4,
        rope_scaling=None,
        tied_embeddings=False,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe", "olmo2"),
        joint_qk_norm=family == "olmo2",
        norms_before=family != "olmo2",
        norms_after=family in ("gemma3_text", "olmo2"),
        activation="gelu" if family == "gemma3_text" else "silu",
        experts=experts,
    )


def layout_of(parallel: dict[str, Any]) -> Layout:
    """The layout that a ``parallel`` section describes, with one data-parallel rank."""
    names = {"virtual_pipeline": "virtual"}
    return Layout(**{names.get(key, key): value for key, value in parallel.items()})


def run_config(**settings: Any) -> RunConfig:
    """A run with the sections given, the rest by default."""
    sections = {"name": "run", "run_dir": "runs/run", "model": {"path": "models/none"}, **settings}
    return RunConfig.model_validate_json(json.dumps(sections))


def scenario(
    hf: HfConfig, layout: Layout, layers: LayerKind = "transformer-engine", **settings: Any
) -> Scenario:
    """Such a run of a model in a layout, whose steps have nothing but a loss pass per update."""
    config = run_config(**settings)
    assumptions = make_assumptions(config, layout.gpus, PlanOptions(layers=layers))
    return Scenario(config, hf, layout, assumptions, Passes(forward_only=0, repeated=0.0))


_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
QWEN3_SHAPES: dict[str, dict[str, Any]] = {
    size: {**dict(zip(_SHAPE, shape, strict=True)), "tie_word_embeddings": size in ("1.7B", "4B")}
    for size, shape in {
        "1.7B": (2048, 6144, 28, 16),
        "4B": (2560, 9728, 36, 32),
        "8B": (4096, 12288, 36, 32),
        "14B": (5120, 17408, 40, 40),
        "32B": (5120, 25600, 64, 64),
    }.items()
} | {"0.6B": {}}
"""What the config.json of a dense Qwen3 changes in that of the smallest."""


def qwen3(size: str, folder: Path) -> HfConfig:
    """A dense Qwen3, whose config.json ``folder`` gets."""
    fields = json.loads((MODELS / "qwen3-0.6b.json").read_text()) | QWEN3_SHAPES[size]
    (folder / "config.json").write_text(json.dumps(fields))
    return read_hf_config_file(folder / "config.json")
