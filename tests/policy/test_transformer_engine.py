"""Transformer Engine's layers, whose Python sources are imported without their compiled parts.

This shows names and shapes only; nothing is computed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.policy.convert import _empty_states, _stacked
from bapo_megatron.policy.weight_table import EMBEDDING, OUTPUT, shard_shape, weight_table
from tests.policy.transformer_engine_names import FAMILIES, LAYOUTS, published

FOLDER = Path(sys.prefix) / "transformer-engine-2.20.2"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (FOLDER / ".complete").exists(),
        reason=f"no {FOLDER}; run requirements/beside.sh {sys.prefix}",
    ),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each model holds in each layout, as its own process found it."""
    result = tmp_path_factory.mktemp("names") / "held.json"
    command = [sys.executable, "-m", "tests.policy.transformer_engine_names", FOLDER, result]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    return dict(json.loads(result.read_text()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_transformer_engine_are_those_of_our_table(
    built: dict[str, dict[str, Any]], family: str, layout: str
) -> None:
    hf, parallel, actual = published(family), LAYOUTS[layout], built[family][layout]
    table = list(weight_table(hf))
    if hf.tied_embeddings and "pipeline" in parallel:
        table.append(replace(EMBEDDING, megatron=OUTPUT.megatron))  # the last stage's copy
    assert actual["modules"] == [
        "RMSNorm",
        "TELayerNormColumnParallelLinear",
        "TERowParallelLinear",
    ]
    assert actual["parameters"] == {
        weight.megatron: {
            "shape": list(shard_shape(weight, hf, parallel.get("tensor", 1))),
            "axis": weight.axis,
            "sees part of the tokens": parallel.get("sequence", False) and weight.axis is None,
        }
        for weight in table
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_transformer_engine_are_those_that_we_convert(
    built: dict[str, dict[str, Any]], family: str, layout: str
) -> None:
    hf, actual = published(family), built[family][layout]
    places = [_stacked(weight, hf) for weight in weight_table(hf)]
    assert actual["tensors"] == {key: list(shape) for key, shape, _ in places}
    # Loading ignores a state too many; other releases of Megatron ask for attention's.
    written = {key for key in _empty_states(hf) if "core_attention" not in key}
    assert sorted(written) == actual["states"]
