"""Settings that are passed to Megatron."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from bapo_megatron.config.megatron import MegatronConfig
from bapo_megatron.policy.layer_spec import uses_transformer_engine
from bapo_megatron.policy.megatron_setup import memory_options


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        (
            {"recompute": "selective"},
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        ),
        (
            {"recompute": "full", "recompute_layers": 2},
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 2,
            },
        ),
        (
            {"fp8": "hybrid", "fp8_recipe": "blockwise"},
            {"fp8": "hybrid", "fp8_recipe": "blockwise"},
        ),
        (
            {"activation_offload_layers": 3},
            {"cpu_offloading": True, "cpu_offloading_num_layers": 3},
        ),
    ],
)
def test_memory_settings_have_megatrons_names(
    settings: dict[str, Any], options: dict[str, Any]
) -> None:
    config = MegatronConfig.model_validate(settings)
    assert memory_options(config, has_transformer_engine=True) == options
    if "cpu_offloading" not in options:  # asks for Transformer Engine at once
        built = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **options)
        assert {name: getattr(built, name) for name in options} == options


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp8": "e4m3"}, r"^megatron.fp8: e4m3 needs a GPU with Transformer Engine"),
        (
            {"activation_offload_layers": 2},
            r"^megatron.activation_offload_layers: 2 needs a GPU with Transformer Engine",
        ),
    ],
)
def test_what_needs_transformer_engine_is_refused_without_it(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        memory_options(MegatronConfig.model_validate(settings), has_transformer_engine=False)


def test_layers_without_a_gpu_or_in_float32_are_ours() -> None:
    assert not uses_transformer_engine(torch.device("cpu"), torch.bfloat16)
    assert not uses_transformer_engine(torch.device("cuda"), torch.float32)


def test_a_transformer_engine_that_megatron_cannot_import_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "transformer_engine")
    monkeypatch.setattr("bapo_megatron.policy.layer_spec.HAVE_TE", False)
    with pytest.raises(ValueError, match=r"^transformer-engine: installed, but Megatron cannot"):
        uses_transformer_engine(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr("bapo_megatron.policy.layer_spec.HAVE_TE", True)
    assert uses_transformer_engine(torch.device("cuda"), torch.bfloat16)
