"""YaRN's frequencies and factor of attention: ours, transformers' and SGLang's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bapo_megatron.policy.families.base import YarnRope
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.policy.megatron_setup import _scale_frequencies
from tests.policy.test_hf_config import YARN_ROPE, write

pytestmark = pytest.mark.exhaustive

SPELLINGS: dict[str, dict[str, Any]] = {
    "transformers 4": {"rope_scaling": YARN_ROPE},
    "transformers 5": {
        "rope_theta": "absent",
        "rope_parameters": YARN_ROPE | {"rope_theta": 1e4, "rope_type": "yarn"},
    },
    "original positions by default": {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
    "every field": {
        "rope_scaling": YARN_ROPE
        | {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.194464876}
        | {"mscale": 2.0, "mscale_all_dim": 0.5},
    },
    "no scaling at all": {"rope_scaling": YARN_ROPE | {"factor": 1.0}},
}

SGLANG = """
import json, sys, torch
from sglang.srt.layers.rotary_embedding.factory import get_rope
from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length, get_rope_config
for directory in sys.argv[1:]:
    config = get_config(directory, trust_remote_code=False)
    theta, scaling = get_rope_config(config)
    rope = get_rope(64, 64, config.max_position_embeddings, theta, True, scaling, torch.float32)
    inv_freq = rope._compute_inv_freq(rope.scaling_factor).tolist()
    print("\\n" + json.dumps([inv_freq, rope.mscale, get_context_length(config)]))
"""
"""Prints what SGLang makes of each model directory; heads have 64 channels."""


def ours(path: Path) -> tuple[list[float], float]:
    hf = read_hf_config_file(path)
    assert isinstance(hf.rope_scaling, YarnRope)
    powers = torch.arange(0, hf.head_dim, 2, dtype=torch.float32) / hf.head_dim
    rope: Any = SimpleNamespace(inv_freq=1 / hf.rope_theta**powers)  # as Megatron begins
    _scale_frequencies(rope, hf)
    return rope.inv_freq.tolist(), hf.rope_scaling.attention_factor


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_frequencies_and_factor_are_those_of_transformers_bit_by_bit(
    tmp_path: Path, spelling: str
) -> None:
    path = write(tmp_path, SPELLINGS[spelling])
    inv_freq, factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(tmp_path), "cpu")
    assert ours(path) == (inv_freq.tolist(), pytest.approx(factor, rel=1e-9))


@pytest.mark.slow
def test_frequencies_and_factor_are_those_of_sglang_bit_by_bit(tmp_path: Path) -> None:
    directories = [tmp_path / spelling for spelling in SPELLINGS]
    for directory, fields in zip(directories, SPELLINGS.values(), strict=True):
        directory.mkdir()
        write(directory, fields)
    done = subprocess.run(
        [sys.executable, "-c", SGLANG, *directories],
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    for directory, (inv_freq, factor, positions) in zip(directories, printed, strict=True):
        assert ours(directory / "config.json") == (inv_freq, pytest.approx(factor, rel=1e-9))
        assert positions == 32768, directory  # config.json's max_position_embeddings
