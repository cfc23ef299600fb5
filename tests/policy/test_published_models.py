"""Parameters that ``plan`` counts are those of transformers: of tiny and of published models."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.tools.planning.memory import model_parameters
from tests.policy.families import params
from tests.policy.tiny_models import Models
from tests.tools.planning.cases import MODELS

VISION = ("visual.", "vision_tower.", "multi_modal_projector.")


def assert_counted(config_json: Path) -> None:
    kind = getattr(transformers, json.loads(config_json.read_text())["architectures"][0])
    with torch.device("meta"):
        model = kind(kind.config_class.from_json_file(config_json))
    assert model_parameters(read_hf_config_file(config_json)) == sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if not any(part in name for part in VISION)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.json")))
def test_of_a_published_model(name: str) -> None:
    assert_counted(MODELS / f"{name}.json")


@pytest.mark.parametrize("family", params())
def test_of_the_tiny_model_of_a_family(models: Models, family: str) -> None:
    assert_counted(models[family] / "config.json")
