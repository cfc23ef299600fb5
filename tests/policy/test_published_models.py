"""The config.json of published models: read, and with as many parameters as transformers' class."""

import json
import math

import pytest
import torch
import transformers

from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.policy.weight_table import hf_shapes, weight_table
from tests.tools.planning.cases import MODELS

VISION = ("visual.", "vision_tower.", "multi_modal_projector.")
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_transformers(name: str) -> None:
    path = MODELS / f"{name}.json"
    hf = read_hf_config_file(path)
    counted = sum(
        math.prod(shape)
        for weight in weight_table(hf)
        if not weight.is_buffer
        for shape in hf_shapes(weight, hf).values()
    )
    fields = json.loads(path.read_text())
    kind = getattr(transformers, fields["architectures"][0])
    # transformers does not know kimi_k2, whose architecture is DeepSeek-V3's.
    config = kind.config_class.from_dict({**fields, "model_type": kind.config_class.model_type})
    with torch.device("meta"):
        model = kind(config)
    assert counted == sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if not any(part in name for part in VISION)
    )
