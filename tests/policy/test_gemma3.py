"""Gemma 3: spellings of config.json, and the language model beside a vision tower."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.policy.hf_config import read_hf_config_file
from tests.distributed_launch import run_ranks
from tests.policy.convert_models import assert_same, run_convert, weights
from tests.policy.layouts import by_rank, check_logits, layouts_of, run_layouts
from tests.policy.oracle import Gradients, Oracle
from tests.policy.parity_ranks import export
from tests.policy.tiny_models import load_reference, make_gemma_vision_model, make_problems
from tests.tools.planning.cases import MODELS, published

BATCHES = (((7, 3), (5,), (11, 9, 40, 2, 8)), ((96, 5, 1, 2, 3, 4, 6, 7, 8), (50, 51)))


@pytest.mark.parametrize("size", ["1b", "4b", "27b"])
def test_files_of_transformers_4_and_5_describe_one_architecture(tmp_path: Path, size: str) -> None:
    from transformers import AutoConfig

    name = f"gemma-3-{size}-it"
    (tmp_path / "config.json").write_text((MODELS / f"{name}.json").read_text())
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "new")
    new = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "rope_local_base_freq" not in new.get("text_config", new)
    assert read_hf_config_file(tmp_path / "new" / "config.json") == published(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is unknown .* got 50.0"),
        ({"final_logit_softcapping": 30.0}, "'final_logit_softcapping' is unknown .* got 30.0"),
        ({"use_bidirectional_attention": True}, "'use_bidirectional_attention' is unknown"),
        ({"hidden_activation": "gelu"}, "hidden_activation.*gelu_pytorch_tanh"),
        ({"layer_types": ["full_attention"] * 3}, "'layer_types' must have 26 entries, got 3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'rope_type' must be default or"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 20000.0}}},
            "layers with a window must have rope_type default and one base",
        ),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.*rope_theta"),
    ],
)
def test_what_is_not_supported_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    fields = json.loads((MODELS / "gemma-3-1b-it.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(ValueError, match=message):
        read_hf_config_file(tmp_path / "config.json")


@pytest.mark.distributed
def test_the_language_model_beside_a_vision_tower_trains_and_the_rest_is_exported_as_it_was(
    tmp_path: Path,
) -> None:
    model = make_gemma_vision_model(tmp_path / "model")
    arguments = ({"gemma3": model}, tmp_path / "trained", BATCHES)
    (result,) = by_rank(run_layouts, layouts_of("one rank"), *arguments)["one rank, gemma3"]
    oracle = Oracle.of("gemma3", model)
    check_logits([result], oracle, BATCHES)
    exact, float32 = (
        {
            name.replace("model.language_model.", "language_model.model."): gradient
            for name, gradient in whole.items()
            if ".language_model." in name
        }
        for whole in oracle.both_gradients(make_problems(batches=BATCHES))
    )
    Gradients.of(exact, float32).check(result["gradients"])
    run_ranks(export, 1, model, tmp_path / "export")
    before = weights(model)
    assert_same(weights(tmp_path / "export"), before)
    kept = before.keys() - result["weights"].keys()
    assert all(n.startswith(("vision_tower.", "multi_modal_projector.")) for n in kept)
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(result["weights"][name], before[name])
    assert type(load_reference("gemma3", tmp_path / "export")) is type(oracle.float32)


def test_conversion_keeps_the_vision_tower(tmp_path: Path) -> None:
    model = make_gemma_vision_model(tmp_path / "model")
    run_convert(model, tmp_path / "megatron")
    run_convert(tmp_path / "megatron", tmp_path / "back")
    assert_same(weights(tmp_path / "back"), weights(model))
