"""Models with gated delta nets: refused layouts, and experts in fused tensors."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.policy.hf_config import check_division, read_hf_config_file
from bapo_megatron.policy.hf_weights import find_tensors, reading_shards
from bapo_megatron.policy.weight_table import weight_table
from tests.policy.convert_models import copy_with
from tests.policy.tiny_models import Models


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"context": 4},
            r"^parallel.context: tensor × context must divide the 2 key heads .* got 4 ",
        ),
        (
            {"tensor": 2, "sequence": True, "context": 2},
            r"^parallel.context: tensor × context must divide the 2 key heads .* = 4;",
        ),
        ({"tensor": 2}, r"^parallel.sequence: must be true for a model with gated delta nets"),
    ],
)
def test_layouts_that_do_not_fit_delta_nets_are_refused(
    deep_models: Models, parallel: dict[str, Any], message: str
) -> None:
    hf = read_hf_config_file(deep_models["qwen3_5_text"] / "config.json")
    with pytest.raises(ConfigError, match=message):
        check_division(hf, ParallelConfig(**parallel))


@pytest.mark.parametrize("size", [1, 2])
def test_experts_that_a_file_has_in_two_tensors_are_read_one_by_one(
    deep_models: Models, tmp_path: Path, size: int
) -> None:
    """As published checkpoints of Qwen3.5 with experts have them."""
    model = deep_models["qwen3_5_moe_text"]
    fused = tmp_path / "fused"

    def fuse(tensors: dict[str, Tensor]) -> None:
        for layer in (f"model.layers.{number}.mlp.experts" for number in range(4)):
            gate, up, down = (
                torch.stack([tensors.pop(f"{layer}.{e}.{kind}_proj.weight") for e in range(8)])
                for kind in ("gate", "up", "down")
            )
            tensors[f"{layer}.gate_up_proj"] = torch.cat((gate, up), dim=1)
            tensors[f"{layer}.down_proj"] = down

    copy_with(model, fused, fuse)
    hf = read_hf_config_file(model / "config.json")
    (files, dtypes), (fused_files, fused_dtypes) = find_tensors(hf, model), find_tensors(hf, fused)
    assert dtypes == fused_dtypes
    with reading_shards(files, hf) as read, reading_shards(fused_files, hf) as read_fused:
        for weight, rank in product(weight_table(hf), range(size)):
            assert torch.equal(read_fused(weight, rank, size), read(weight, rank, size))
