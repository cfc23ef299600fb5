"""Candidates and paths, by hand."""

from typing import Any

import numpy as np
import pytest

from bapo_megatron.ops.extension import ClipGrid
from tests.ops.kernel_calls import path_of, plain_candidates

RECIPE = ((0.6, 0.8, 0.05), (1.2, 2.0, 0.05))


def test_the_paper_grid_has_sixteen_lower_and_thirty_seven_upper_candidates() -> None:
    grid = ClipGrid((0.6, 0.9, 0.02), (1.2, 3.0, 0.05))
    lower, upper, _ = plain_candidates(grid)
    assert lower == [float(np.float32(0.6 + k * 0.02)) for k in range(16)]
    assert upper == [float(np.float32(1.2 + k * 0.05)) for k in range(37)]
    assert (lower[-1], upper[-1]) == (float(np.float32(0.9)), 3.0)
    assert len(path_of(grid)) == 52
    # 38 upper and 17 lower bins of 4 slots, 4 counters.
    assert grid.num_slots == 38 * 4 + 17 * 4 + 4 == 224


@pytest.mark.parametrize(
    ("order", "path"),
    [
        ("upper_first", [(0.5, 1.0), (0.5, 1.5), (0.5, 2.0), (0.75, 2.0), (1.0, 2.0)]),
        ("lower_first", [(0.5, 1.0), (0.75, 1.0), (1.0, 1.0), (1.0, 1.5), (1.0, 2.0)]),
    ],
)
def test_the_path_moves_the_first_bound_to_its_end_and_then_the_other(
    order: str, path: list[tuple[float, float]]
) -> None:
    assert path_of(ClipGrid((0.5, 1.0, 0.25), (1.0, 2.0, 0.5), order=order)) == path


@pytest.mark.parametrize(
    ("lower", "spacing", "candidates"),
    [
        # The recipe adds its steps up and ends at the maximum.
        ((0.6, 0.8, 0.05), "running_sum", (0.6, 0.65, 0.7, 0.75, 0.8)),
        ((0.6, 0.8, 0.15), "running_sum", (0.6, 0.75, 0.8)),
        ((0.6, 0.8, 0.15), "multiples", (0.6, 0.75)),
        # (0.95 − 0.8) / 0.05 is 2.9999999999999973 in float64.
        ((0.8, 0.95, 0.05), "multiples", (0.8, 0.85, 0.9, 0.95)),
        ((1.0, 1.0, 0.1), "multiples", (1.0,)),
    ],
)
def test_candidates_are_multiples_of_the_step_or_its_running_sums(
    lower: tuple[float, float, float], spacing: str, candidates: tuple[float, ...]
) -> None:
    grid = ClipGrid(lower, (1.0, 1.0, 1.0), spacing=spacing)
    assert plain_candidates(grid)[0] == [float(np.float32(c)) for c in candidates]
    assert len(path_of(grid)) == len(candidates)


def test_the_dual_clip_is_kept_as_float32() -> None:
    grid = ClipGrid(*RECIPE, dual_clip=3.3)
    assert plain_candidates(grid)[2] == float(np.float32(3.3))
    assert plain_candidates(ClipGrid(*RECIPE))[2] is None
    assert grid.num_slots == ClipGrid(*RECIPE).num_slots + 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lower": (0.4, 0.9, 0.1)}, "0.5 <= lower.start .* got start 0.4 and max 0.9"),
        ({"lower": (0.9, 0.6, 0.1)}, "got start 0.9 and max 0.6"),
        ({"lower": (0.6, 1.1, 0.1)}, "got start 0.6 and max 1.1"),
        ({"lower": (0.6, float("nan"), 0.1)}, "got start 0.6 and max nan"),
        ({"lower": (0.6, 0.9, 0.0)}, "lower.step must be > 0 and finite, got 0"),
        ({"upper": (0.9, 3.0, 0.1)}, "1 <= upper.start .* got start 0.9 and max 3"),
        ({"upper": (1.2, 256.0, 1.0)}, "upper.max < 256, got start 1.2 and max 256"),
        ({"upper": (1.2, 3.0, -1.0)}, "upper.step must be > 0 and finite, got -1"),
        ({"upper": (1.0, 3.0, 0.001)}, "upper: at most 256 candidates .* use a larger step"),
        *(
            ({"dual_clip": value}, "dual_clip must be > 1 and finite")
            for value in (1.0, 0.5, float("inf"), float("nan"))
        ),
        ({"order": "both"}, "order must be upper_first or lower_first, got 'both'"),
        ({"spacing": "log"}, "spacing must be multiples or running_sum, got 'log'"),
    ],
)
@pytest.mark.parametrize("spacing", ["multiples", "running_sum"])
def test_what_is_no_grid_is_refused(changes: dict[str, Any], message: str, spacing: str) -> None:
    ranges = {"lower": (0.6, 0.9, 0.1), "upper": (1.2, 3.0, 0.1)}
    with pytest.raises(ValueError, match=message):
        ClipGrid(**{**ranges, "spacing": spacing, **changes})
