"""The torch face of the table and its bounds, and what the extension says about itself."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithm.objectives.bapo import BapoConfig
from bapo_megatron.ops import extension
from bapo_megatron.ops.contributions import BOUNDS_FIELDS, EXIT_NAMES, BoundSearch, count_tokens
from tests.ops.kernel_calls import plain_candidates

NARROW = BapoConfig.model_validate(
    {
        "lower": {"start": 0.75, "max": 1.0, "step": 0.25},
        "upper": {"start": 1.0, "max": 1.25, "step": 0.25},
        "target": 0.45,
    }
)


def filled(search: BoundSearch, ratio: list[float], advantage: list[float]) -> Tensor:
    logprob_T = torch.tensor(ratio).log()
    return search.contributions(
        logprob_T, torch.zeros_like(logprob_T), torch.tensor(advantage), torch.ones_like(logprob_T)
    )


def bounds_of(search: BoundSearch, table: Tensor) -> SimpleNamespace:
    fields = dict(zip(BOUNDS_FIELDS, search.bounds(table).tolist(), strict=True))
    return SimpleNamespace(**{**fields, "exit": EXIT_NAMES[int(fields["exit"])]})


def test_the_bounds_of_a_batch_computed_by_hand() -> None:
    search = NARROW.search()
    table = filled(search, [2.0, 0.5, 1.0], [1.0, -2.0, 0.0])
    bounds = search.bounds(table)
    assert (bounds.dtype, bounds.shape) == (torch.float64, (len(BOUNDS_FIELDS),))
    # shares 1/2.5 and 1.25/2.75
    assert bounds_of(search, table) == SimpleNamespace(
        low=0.75,
        high=1.25,
        positive_share_start=pytest.approx(0.4, abs=1e-15),
        positive_share=pytest.approx(5 / 11, abs=1e-15),
        exit="met",
        nonfinite_tokens=0,
        out_of_range_tokens=0,
        tokens=2,
    )


def test_two_ranks_that_sum_their_tables_decide_as_one() -> None:
    search = NARROW.search()
    whole = filled(search, [2.0, 0.5, 1.1], [1.0, -2.0, -0.25])
    first = filled(search, [0.5], [-2.0])
    second = filled(search, [1.1, 2.0], [-0.25, 1.0])
    assert torch.equal(first + second, whole)
    assert torch.equal(search.bounds(first + second), search.bounds(whole))


@pytest.mark.parametrize(("ratio", "advantage"), [([], []), ([1.0, 2.0], [0.0, 0.0])])
def test_without_a_signed_token_the_bounds_are_the_start_of_both_ranges(
    ratio: list[float], advantage: list[float]
) -> None:
    search = NARROW.search()
    bounds = bounds_of(search, filled(search, ratio, advantage))
    assert (bounds.low, bounds.high, bounds.exit, bounds.tokens) == (0.75, 1.0, "unsearched", 0)
    assert math.isnan(bounds.positive_share_start)
    assert math.isnan(bounds.positive_share)


def test_the_bounds_are_those_of_the_path_that_a_person_can_look_at() -> None:
    generator = torch.Generator().manual_seed(7)
    search = BapoConfig().search()
    ratio_T = torch.exp(0.4 * torch.randn(500, generator=generator))
    advantage_T = torch.randn(500, generator=generator) - 0.1
    table = filled(search, ratio_T.tolist(), advantage_T.tolist())
    path, bounds = search.path(table), bounds_of(search, table)
    assert path.index > 0
    assert (bounds.low, bounds.high, bounds.exit) == (path.clip_low, path.clip_high, path.exit)
    assert bounds.positive_share_start == pytest.approx(path.positive_share_start, abs=1e-15)
    assert bounds.positive_share == pytest.approx(path.positive_share, abs=1e-15)
    counts = count_tokens(table)
    assert bounds.tokens == counts.positive_tokens + counts.negative_tokens == 500


def test_strided_tensors_and_tensors_with_gradient_are_taken() -> None:
    search = NARROW.search()
    wide = torch.tensor([[0.3, 9.0], [-0.2, 9.0]], requires_grad=True)
    zero, ones, advantage = torch.zeros(2), torch.ones(2), torch.tensor([1.0, -1.0])
    strided = search.contributions(wide[:, 0], zero, advantage, ones)
    plain = search.contributions(torch.tensor([0.3, -0.2]), zero, advantage, ones)
    assert torch.equal(strided, plain)


def test_the_recipe_preset_adds_up_its_candidates_and_moves_the_lower_bound_first() -> None:
    search = BapoConfig.model_validate({"preset": "recipe"}).search()
    path = search.path(filled(search, [], [])).candidates
    assert len(path) == 21
    assert (path[1].clip_low, path[1].clip_high) == (
        pytest.approx(0.65, abs=3e-7),  # float32, rounded to 6e-8
        pytest.approx(1.2, abs=3e-7),
    )


def test_the_dual_clip_shapes_the_table_in_gradient_mode_only() -> None:
    gradient = BapoConfig.model_validate({"contribution": "gradient"}).search(dual_clip=3.0)
    surrogate = BapoConfig().search(dual_clip=3.0)
    assert plain_candidates(gradient.grid)[2] == 3.0
    assert plain_candidates(surrogate.grid)[2] is None
    table = filled(gradient, [4.0, 2.0], [-1.0, -1.0])
    assert gradient.path(table).candidates[0].negative == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize(
    ("advantage", "nonfinite", "out_of_range"), [(math.nan, 1, 0), (math.inf, 1, 0), (256.0, 0, 1)]
)
def test_a_table_that_cannot_be_trusted_gives_bounds_that_say_so(
    advantage: float, nonfinite: int, out_of_range: int
) -> None:
    search = NARROW.search()
    table = filled(search, [1.0, 1.0], [1.0, advantage])
    bounds = bounds_of(search, table)
    assert (bounds.low, bounds.high, bounds.exit) == (0.0, math.inf, "refused")
    assert math.isnan(bounds.positive_share)
    assert (bounds.nonfinite_tokens, bounds.out_of_range_tokens) == (nonfinite, out_of_range)
    counts = count_tokens(table)
    assert (counts.nonfinite_tokens, counts.out_of_range_tokens) == (nonfinite, out_of_range)
    with pytest.raises(ValueError, match="counted 1 tokens"):
        search.path(table)


def test_masked_tokens_are_skipped_whatever_they_hold() -> None:
    search = NARROW.search()
    nan_T = torch.full((3,), math.nan)
    assert torch.count_nonzero(search.contributions(nan_T, nan_T, nan_T, torch.zeros(3))) == 0


def test_build_info_names_version_compiler_flags_and_instruction_set() -> None:
    info = extension.build_info()
    assert info["version"] == "0.2.0"
    assert "-ffp-contract=off" in info["flags"]
    assert "-march" not in info["flags"]
    assert info["isa"] == info["available_isas"][-1]
    assert info["available_isas"][0] == "portable"
    assert info["compiler"]
    assert info["git_commit"]
