"""Rules about the model directory and what of it limits other sections; see ``check``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.load import ConfigError

if TYPE_CHECKING:
    from bapo_megatron.config.megatron import MegatronConfig, ModelConfig, ParallelConfig
    from bapo_megatron.config.schema import RunConfig


def check_model(model: ModelConfig) -> dict[str, Any]:
    """The model directory is complete; returns its config.json."""
    if not model.path.is_dir():
        raise ConfigError(
            f"model.path: no such directory '{model.path}'; download a Hugging Face model to it, "
            "or run make-tiny"
        )
    config_file = model.path / "config.json"
    if not config_file.is_file():
        raise ConfigError(
            f"model.path: '{model.path}' has no config.json; give a Hugging Face model directory"
        )
    if not any(model.path.glob("*.safetensors")):
        raise ConfigError(
            f"model.path: '{model.path}' has no *.safetensors; save the model with "
            "save_pretrained(safe_serialization=True)"
        )
    if not (model.path / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"model.path: '{model.path}' has no tokenizer_config.json; save the tokenizer there"
        )
    try:
        hf_config = json.loads(config_file.read_text())
    except ValueError as error:
        raise ConfigError(
            f"model.path: '{config_file}' is not valid JSON ({error}); download the model again"
        ) from error
    if not isinstance(hf_config, dict):
        raise ConfigError(
            f"model.path: '{config_file}' must hold a JSON object; download the model again"
        )
    return hf_config


def check_heads(hf_config: dict[str, Any], key: str, tensor_size: int) -> None:
    """A tensor-parallel size, of the key ``key``, divides the model's heads."""
    for name, what in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key/value heads"),
    ):
        heads = hf_config.get(name) or 0
        if heads % tensor_size:
            raise ConfigError(
                f"{key}: must divide the model's {heads} {what}, got {tensor_size}; "
                "choose a divisor"
            )


def check_layers(
    hf_config: dict[str, Any], parallel: ParallelConfig, megatron: MegatronConfig
) -> None:
    """The pipeline divides the model's layers, and enough of them are left where they must be."""
    layers = hf_config.get("num_hidden_layers")
    parts = parallel.pipeline * parallel.virtual_pipeline
    if isinstance(layers, int) and layers % parts:
        raise ConfigError(
            f"parallel.pipeline: pipeline × virtual_pipeline = {parts} must divide the model's "
            f"{layers} layers; choose other sizes"
        )
    offloaded = megatron.activation_offload_layers
    if offloaded and parallel.pipeline > 1:
        raise ConfigError(
            "megatron.activation_offload_layers: needs parallel.pipeline = 1, got "
            f"{parallel.pipeline}; set one of them to its default"
        )
    if isinstance(layers, int) and offloaded >= layers:
        raise ConfigError(
            f"megatron.activation_offload_layers: must be below the model's {layers} layers, got "
            f"{offloaded}; lower it"
        )


def check_positions(
    hf_config: dict[str, Any], config: RunConfig, section: str, max_response_tokens: int
) -> None:
    """Every sequence that generation may produce fits the model's positions."""
    limit = hf_config.get("max_position_embeddings")
    prompt = config.data.max_prompt_tokens
    if limit is not None and prompt + max_response_tokens > limit:
        raise ConfigError(
            f"{section}.max_response_tokens: must leave room for data.max_prompt_tokens = "
            f"{prompt} in the model's {limit} positions, got {max_response_tokens}; "
            "lower one of them"
        )
