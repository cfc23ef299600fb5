"""Models with gated delta nets: refused layouts, vision models, and experts in fused tensors."""

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
from tests.distributed_launch import run_ranks
from tests.policy.convert_models import assert_same, copy_with, run_convert, weights
from tests.policy.layouts import SUITES, by_rank, check_logits, layouts_of, run_layouts
from tests.policy.oracle import Gradients, Oracle
from tests.policy.parity_ranks import export
from tests.policy.tiny_models import (
    Models,
    load_reference,
    make_model,
    make_problems,
    make_vision_model,
)

pytestmark = [pytest.mark.distributed, pytest.mark.exhaustive]

BATCHES = SUITES["hybrids"].batches


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


def test_the_language_model_of_a_vision_model_trains_and_the_rest_is_exported_as_it_was(
    tmp_path: Path,
) -> None:
    model, layouts = make_vision_model(tmp_path / "model"), layouts_of("one rank")
    arguments = ({"qwen3_5": model}, tmp_path / "trained", BATCHES)
    of_ranks = by_rank(run_layouts, layouts, *arguments)["one rank, qwen3_5"]
    oracle = Oracle.of("qwen3_5", model)
    check_logits(of_ranks, oracle, BATCHES)
    exact, float32 = (
        {name: gradient for name, gradient in whole.items() if not name.startswith("model.visual.")}
        for whole in oracle.both_gradients(make_problems(batches=BATCHES))
    )
    Gradients.of(exact, float32).check(of_ranks[0]["gradients"])
    run_ranks(export, 1, model, tmp_path / "export")
    exported, before, after = weights(tmp_path / "export"), weights(model), of_ranks[0]["weights"]
    assert_same(exported, before)
    assert len(exported.keys() - after.keys()) == 22
    assert all(n.startswith(("mtp.", "model.visual.")) for n in exported.keys() - after.keys())
    name = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
    assert not torch.equal(after[name], before[name])
    assert type(load_reference("qwen3_5", tmp_path / "export")) is type(oracle.float32)


def test_conversion_keeps_what_is_not_trained(tmp_path: Path) -> None:
    model = make_vision_model(tmp_path / "model")
    run_convert(model, tmp_path / "megatron")
    run_convert(tmp_path / "megatron", tmp_path / "back")
    assert_same(weights(tmp_path / "back"), weights(model))


@pytest.mark.parametrize("size", [1, 2])
def test_experts_that_a_file_has_in_two_tensors_are_read_one_by_one(
    tmp_path: Path, size: int
) -> None:
    """As published checkpoints of Qwen3.5 with experts have them."""
    model = make_model("qwen3_5_moe_text", tmp_path / "model", num_hidden_layers=4)
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
