"""Values that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from bapo_megatron.algorithm.objective import first_nonfinite, is_finite


def test_nan_and_infinity_are_not_finite() -> None:
    values = torch.tensor([0.0, -3e38, math.nan, math.inf, -math.inf, 1e-45])
    assert is_finite(values).tolist() == [True, True, False, False, False, True]


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
