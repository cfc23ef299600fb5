"""Settings that are passed to Megatron."""

from __future__ import annotations

from typing import Any

import pytest

from bapo_megatron.config.megatron import MegatronConfig
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
