"""Transformer Engine's layers, whose Python sources are imported without their compiled parts.

This shows names and shapes only; nothing is computed.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.policy.convert import _empty_states, _parts, _stacked
from bapo_megatron.policy.weight_table import EMBEDDING, OUTPUT, shard_shape, weight_table
from tests.policy.transformer_engine_names import CASES, LAYOUTS, published

FOLDER = Path(sys.prefix) / "transformer-engine-2.20.2"

MODULES = ("RMSNorm", "TELayerNormColumnParallelLinear", "TERowParallelLinear")
EXPERTS = ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear", "TopKRouter")
FURTHER_MODULES = {
    "qwen3_5": ("Conv1d", "PackedGatedDeltaNet"),
    "qwen3 with experts": EXPERTS,
    "gpt-oss": (*EXPERTS, "TEDotProductAttention"),  # its sinks
    "glm with experts": (*EXPERTS, "TEColumnParallelLinear"),  # of the shared experts
    "minimax": (*EXPERTS, "JointRMSNorm"),
    "olmo2": ("JointRMSNorm",),
    "moonlight": (*EXPERTS, "TEColumnParallelLinear", "TELinear"),
    "moonlight with a latent of queries": (*EXPERTS, "TEColumnParallelLinear", "TELinear"),
}

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (FOLDER / ".complete").exists(),
        reason=f"no {FOLDER}; run requirements/beside.sh {sys.prefix}",
    ),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What each model holds in each layout, as its own process found it."""
    result = tmp_path_factory.mktemp("names") / "held.json"
    command = [sys.executable, "-m", "tests.policy.transformer_engine_names", FOLDER, result]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    return dict(zip(CASES, json.loads(result.read_text()), strict=True))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_parameters_of_transformer_engine_are_those_of_our_table(
    built: dict[tuple[str, str], dict[str, Any]], family: str, layout: str
) -> None:
    hf, parallel, actual = published(family), LAYOUTS[layout], built[family, layout]
    table = list(weight_table(hf))
    if hf.tied_embeddings and "pipeline" in parallel:
        table.append(replace(EMBEDDING, megatron=OUTPUT.megatron))  # the last stage's copy
    modules = [*MODULES, *FURTHER_MODULES.get(family, ())]
    if not hf.norms_before:
        modules = [name.replace("TELayerNormColumn", "TEColumn") for name in modules]
    assert actual["modules"] == sorted(modules)
    tensor = parallel.get("tensor", 1)
    sizes = {False: tensor, True: parallel.get("expert_tensor", tensor)}
    num_experts = hf.experts.num // parallel.get("expert", 1) if hf.experts else 0
    assert actual["parameters"] == {
        weight.megatron: {
            "shape": list(shard_shape(weight, hf, sizes[weight.expert is not None])),
            "axis": weight.axis,
            "sees part of the tokens": parallel.get("sequence", False)
            and weight.axis is None
            and weight.expert is None
            and not weight.is_buffer,
        }
        for weight in table
        if weight.expert is None or weight.expert < num_experts
    }


@pytest.mark.parametrize(("family", "layout"), [case for case in CASES if case[1] != "experts"])
def test_checkpoints_of_transformer_engine_are_those_that_we_convert(
    built: dict[tuple[str, str], dict[str, Any]], family: str, layout: str
) -> None:
    hf, actual = published(family), built[family, layout]
    places = [_stacked(part, hf) for weight in weight_table(hf) for part in _parts(weight)]
    assert actual["tensors"] == {key: list(shape) for key, shape, _ in places}
    # Loading ignores a state too many; other releases of Megatron ask for attention's.
    states = _empty_states(hf)
    assert {*actual["states"]} <= {*states}
    assert all("core_attention" in key for key in {*states} - {*actual["states"]})
