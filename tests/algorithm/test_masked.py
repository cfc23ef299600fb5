"""Masked sums: what lies under mask 0 never counts."""

from __future__ import annotations

import math

import pytest
import torch

from bapo_megatron.algorithm.masked import first_nonfinite, masked_max, masked_sum


def test_sums_and_maxima_ignore_nan_under_mask_zero() -> None:
    values_T = torch.tensor([1.0, math.nan, 2.5, math.inf])
    mask_T = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert masked_sum(values_T, mask_T).item() == 3.5
    assert masked_max(values_T, mask_T).item() == 2.5
    assert masked_sum(values_T, mask_T).dtype == torch.float64


def test_nothing_sums_to_zero() -> None:
    empty = torch.zeros(0)
    assert masked_sum(empty, empty).item() == 0.0
    assert masked_max(empty, empty).item() == 0.0
    assert masked_sum(torch.ones(2), torch.zeros(2)).item() == 0.0


def test_booleans_are_counted() -> None:
    counted_T = torch.tensor([True, True, False])
    assert masked_sum(counted_T, torch.tensor([1.0, 0.0, 1.0])).item() == 1.0


@pytest.mark.parametrize(
    ("values", "mask", "index"),
    [
        ([1.0, math.nan, math.inf], [1, 1, 1], 1),
        ([1.0, math.nan, -math.inf], [1, 0, 1], 2),
        ([1.0, math.nan], [1, 0], None),
        ([], [], None),
    ],
)
def test_the_first_nonfinite_value_under_mask_one_is_found(
    values: list[float], mask: list[float], index: int | None
) -> None:
    assert first_nonfinite(torch.tensor(values), torch.tensor(mask)) == index
