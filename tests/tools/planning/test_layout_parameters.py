"""Parameters of a plan against the model that Megatron builds on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.tools.planning.layout import (
    chunk_parameters,
    layer_parameters,
    model_parameters,
)
from tests.tools.planning.cases import MODELS, PARAMETERS, layout_of


@pytest.mark.slow
@pytest.mark.parametrize("case", PARAMETERS)
def test_every_chunk_of_every_stage_has_the_parameters_that_megatron_builds(
    case: str, measured: dict[str, Any]
) -> None:
    model, parallel = PARAMETERS[case]
    hf = read_hf_config_file(MODELS / f"{model}.json")
    layout = layout_of(parallel)
    planned = [
        [chunk_parameters(hf, layout, stage, chunk) for chunk in range(layout.virtual)]
        for stage in range(layout.pipeline)
    ]
    assert planned == measured["parameters"][case]


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # The sizes of the published safetensors, in elements.
        ("deepseek-r1-distill-qwen-7b", 7_615_616_512),
        ("deepseek-r1-distill-qwen-32b", 32_763_876_352),
        ("octothinker-3b", 3_212_749_824),
        ("qwen3-0.6b", 596_049_920),
    ],
)
def test_a_whole_model_has_its_published_number_of_parameters(model: str, parameters: int) -> None:
    assert model_parameters(read_hf_config_file(MODELS / f"{model}.json")) == parameters


def test_the_layer_of_the_7b_model_by_hand() -> None:
    hf = read_hf_config_file(MODELS / "deepseek-r1-distill-qwen-7b.json")
    query, key_value, output = 3584 * 3584 + 3584, 2 * (512 * 3584 + 512), 3584 * 3584
    mlp, norms = 3 * 3584 * 18944, 2 * 3584
    assert layer_parameters(hf, 1) == query + key_value + output + mlp + norms
    assert layer_parameters(hf, 4) == (query + key_value + output + mlp) // 4 + norms
