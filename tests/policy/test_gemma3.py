"""Gemma 3: spellings of config.json, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.policy.hf_config import read_hf_config_file
from tests.tools.planning.cases import MODELS, published


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
