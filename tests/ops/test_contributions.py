"""The torch face of the table, and the extension's loader."""

from __future__ import annotations

import math

import pytest
import torch

from bapo_megatron.config.schema import BapoConfig
from bapo_megatron.ops import extension
from bapo_megatron.ops.contributions import (
    ContributionTable,
    accumulate,
    search_bounds,
    search_path,
)
from bapo_megatron.types import ClipBounds

NARROW = BapoConfig.model_validate(
    {
        "lower": {"start": 0.75, "max": 1.0, "step": 0.25},
        "upper": {"start": 1.0, "max": 1.25, "step": 0.25},
        "target": 0.45,
    }
)


def fill(table: ContributionTable, ratio: list[float], advantage: list[float]) -> None:
    logprob_T = torch.tensor(ratio).log()
    accumulate(
        table,
        logprob_T,
        torch.zeros_like(logprob_T),
        torch.tensor(advantage),
        torch.ones_like(logprob_T),
    )


def test_the_bounds_of_a_batch_computed_by_hand() -> None:
    table = ContributionTable(NARROW)
    fill(table, [2.0, 0.5], [1.0, -2.0])
    # shares 1/2.5 and 1.25/2.75
    bounds = search_bounds(table, NARROW)
    assert bounds == ClipBounds(
        low=0.75,
        high=1.25,
        positive_share_start=pytest.approx(0.4, abs=1e-15),
        positive_share=pytest.approx(5 / 11, abs=1e-15),
        exit="met",
    )


def test_two_ranks_that_sum_their_tensors_decide_as_one() -> None:
    whole, first, second = (ContributionTable(NARROW) for _ in range(3))
    fill(whole, [2.0, 0.5, 1.1], [1.0, -2.0, -0.25])
    fill(first, [0.5], [-2.0])
    fill(second, [1.1, 2.0], [-0.25, 1.0])
    first.tensor += second.tensor
    assert torch.equal(first.tensor, whole.tensor)
    assert search_bounds(first, NARROW) == search_bounds(whole, NARROW)


def test_an_empty_table_gives_the_start_of_both_ranges() -> None:
    table = ContributionTable(NARROW)
    fill(table, [], [])
    bounds = search_bounds(table, NARROW)
    assert (bounds.low, bounds.high, bounds.exit) == (0.75, 1.0, "start")
    assert table.trained_tokens == 0


def test_strided_tensors_and_tensors_with_gradient_are_taken() -> None:
    table, plain = ContributionTable(NARROW), ContributionTable(NARROW)
    wide = torch.tensor([[0.3, 9.0], [-0.2, 9.0]], requires_grad=True)
    zero, ones = torch.zeros(2), torch.ones(2)
    accumulate(table, wide[:, 0], zero, torch.tensor([1.0, -1.0]), ones)
    accumulate(plain, torch.tensor([0.3, -0.2]), zero, torch.tensor([1.0, -1.0]), ones)
    assert torch.equal(table.tensor, plain.tensor)


def test_the_recipe_preset_adds_up_its_candidates_and_moves_the_lower_bound_first() -> None:
    config = BapoConfig.model_validate({"preset": "recipe"})
    path = ContributionTable(config).grid.path
    assert len(path) == 21
    assert path[1] == (pytest.approx(0.65, abs=1e-7), pytest.approx(1.2, abs=1e-7))


def test_the_dual_clip_shapes_the_table_in_gradient_mode_only() -> None:
    gradient = BapoConfig.model_validate({"contribution": "gradient"})
    surrogate = BapoConfig.model_validate({})
    assert ContributionTable(gradient, dual_clip=3.0).grid.dual_clip == 3.0
    assert ContributionTable(surrogate, dual_clip=3.0).grid.dual_clip is None
    table = ContributionTable(gradient, dual_clip=3.0)
    fill(table, [4.0, 2.0], [-1.0, -1.0])
    assert search_path(table, gradient).candidates[0].negative == pytest.approx(2.0, abs=1e-6)


def test_a_nonfinite_token_is_counted_and_the_search_refused() -> None:
    table = ContributionTable(NARROW)
    fill(table, [1.0, math.nan], [1.0, 1.0])
    assert table.nonfinite_tokens == 1
    with pytest.raises(ValueError, match="counted 1 tokens"):
        search_bounds(table, NARROW)


def test_a_wrong_dtype_or_another_config_is_refused() -> None:
    table = ContributionTable(NARROW)
    zero = torch.zeros(2)
    with pytest.raises(ValueError, match=r"advantage must be float32, got torch\.float64"):
        accumulate(table, zero, zero, zero.double(), zero)
    with pytest.raises(ValueError, match="config must be the one"):
        search_bounds(table, BapoConfig.model_validate({}))


def test_build_info_names_version_compiler_flags_and_instruction_set() -> None:
    info = extension.build_info()
    assert info["version"] == "0.1.0"
    assert "-ffp-contract=off" in info["flags"]
    assert "-march" not in info["flags"]
    assert info["isa"] == info["available_isas"][-1]
    assert info["available_isas"][0] == "portable"
    assert info["compiler"]
    assert info["git_commit"]


def test_an_extension_of_another_version_is_refused_with_the_remedy() -> None:
    with pytest.raises(ImportError, match=r"compiled from version 0\.0\.9.*run `pip install -e .`"):
        extension.check_build("0.0.9")
