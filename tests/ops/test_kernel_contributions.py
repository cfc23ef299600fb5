"""contributions_ and search_bounds against exact arithmetic and the search that reports its path.

Shape legend: T = tokens.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from bapo_megatron.ops import extension
from tests.ops.kernel_calls import (
    GRID,
    ISAS,
    LOWER,
    NEGATIVE,
    NONFINITE,
    OUT_OF_RANGE,
    POSITIVE,
    UPPER,
    filled_table,
    grid_tensor,
    path_of,
    search_table,
)
from tests.oracles.bound_search import Rule, exact_search, exact_table
from tests.oracles.token_batches import few_values_tokens, paper_rule, random_tokens

START, MET, EXHAUSTED, NO_SEARCH, REFUSED = range(5)
EXIT_NUMBERS = {"start": START, "met": MET, "exhausted": EXHAUSTED}


def op_search(table: Tensor, grid: extension.ClipGrid, rule: Rule) -> list[float]:
    bounds = torch.ops.bapo.search_bounds(
        table, grid_tensor(grid), rule.target, rule.contribution, rule.measure
    )
    assert bounds.dtype == torch.float64
    return bounds.tolist()


@pytest.mark.parametrize("weight", ["uniform", "behaviour_prob"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 4097])
def test_the_table_is_that_of_exact_arithmetic_bit_for_bit(
    isa: str, num_tokens: int, dual_clip: float | None, weight: str
) -> None:
    rule = paper_rule(dual_clip=dual_clip, weight=weight)
    tokens = random_tokens(np.random.default_rng(num_tokens), num_tokens, rule)
    if num_tokens > 30:
        tokens.logprob[3], tokens.advantage[5] = np.nan, np.inf
        tokens.advantage[7], tokens.mask[9] = 300.0, 0.5
    grid = extension.ClipGrid(LOWER, UPPER, dual_clip=dual_clip)
    assert filled_table(tokens, grid, weight).tolist() == exact_table(tokens, rule), isa


def test_contributions_are_added_to_what_the_table_holds() -> None:
    first, second = (random_tokens(np.random.default_rng(s), 100, paper_rule()) for s in (1, 2))
    table = filled_table(second, GRID, table=filled_table(first, GRID))
    assert torch.equal(table, filled_table(first, GRID) + filled_table(second, GRID))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_tokens=st.integers(0, 60),
    few_values=st.booleans(),
    contribution=st.sampled_from(["surrogate", "gradient"]),
    measure=st.sampled_from(["share", "ratio"]),
    target=st.sampled_from([0.05, 0.3, 0.4, 0.5, 0.95]),
    order=st.sampled_from(["upper_first", "lower_first"]),
    dual_clip=st.sampled_from([None, 3.0]),
)
def test_the_decision_is_that_of_the_reported_path_and_of_exact_arithmetic(
    seed: int,
    num_tokens: int,
    few_values: bool,
    contribution: str,
    measure: str,
    target: float,
    order: str,
    dual_clip: float | None,
) -> None:
    rule = paper_rule(
        contribution=contribution, measure=measure, target=target, order=order, dual_clip=dual_clip
    )
    rng = np.random.default_rng(seed)
    tokens = (
        few_values_tokens(rng, num_tokens) if few_values else random_tokens(rng, num_tokens, rule)
    )
    grid = extension.ClipGrid(LOWER, UPPER, order=order, dual_clip=dual_clip)  # type: ignore[arg-type]
    bounds = op_search(filled_table(tokens, grid), grid, rule)
    signed = int(((tokens.mask == 1) & (tokens.advantage != 0)).sum())
    assert bounds[5:] == [0.0, 0.0, float(signed)]
    if signed == 0:
        assert bounds[:2] == list(path_of(grid)[0])
        assert bounds[4] == NO_SEARCH
        assert all(math.isnan(share) for share in bounds[2:4])
        return
    expected = search_table(filled_table(tokens, grid), grid, rule)
    assert bounds[:5] == [
        expected.clip_low,
        expected.clip_high,
        expected.positive_share_start,
        expected.positive_share,
        EXIT_NUMBERS[expected.exit],
    ]
    exact = exact_search(tokens, rule)
    assert (bounds[0], bounds[1], bounds[4]) == (
        exact.clip_low,
        exact.clip_high,
        EXIT_NUMBERS[exact.exit],
    )


@pytest.mark.parametrize(
    ("slot", "value", "reported"),
    [
        (NONFINITE, 3, [3.0, 0.0, 100.0]),
        (OUT_OF_RANGE, 2, [0.0, 2.0, 100.0]),
        (POSITIVE, 2**31 - 60, [0.0, 0.0, 2.0**31]),
        (NEGATIVE, -1, [0.0, 0.0, 39.0]),
        (0, -1, [0.0, 0.0, 100.0]),
    ],
)
def test_a_table_that_cannot_be_trusted_is_refused(
    slot: int, value: int, reported: list[float]
) -> None:
    table = torch.ones(GRID.num_slots, dtype=torch.int64)
    table[-4:] = torch.tensor([0, 0, 40, 60])
    table[slot] = value
    bounds = op_search(table, GRID, paper_rule())
    assert bounds[:2] == [0.0, math.inf]
    assert all(math.isnan(share) for share in bounds[2:4])
    assert bounds[4] == REFUSED
    assert bounds[5:] == reported


def test_a_table_one_token_below_the_limit_is_searched() -> None:
    table = torch.ones(GRID.num_slots, dtype=torch.int64)
    table[-4:] = torch.tensor([0, 0, 2**31 - 61, 60])
    assert op_search(table, GRID, paper_rule())[4] in (START, MET, EXHAUSTED)


def test_the_ops_are_registered_as_torch_wants_them() -> None:
    tokens = random_tokens(np.random.default_rng(0), 50, paper_rule())
    table = filled_table(tokens, GRID)
    arrays = [torch.from_numpy(array) for array in tokens.arrays()]
    grid = grid_tensor(GRID)
    opcheck(torch.ops.bapo.contributions_.default, (table.clone(), grid, *arrays, "uniform"))
    opcheck(torch.ops.bapo.search_bounds.default, (table, grid, 0.4, "surrogate", "share"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": torch.zeros(224)}, "table must be int64, got float32"),
        ({"table": torch.zeros(7, dtype=torch.int64)}, r"table must have shape \[224\], got \[7\]"),
        ({"logprob": torch.zeros(2, 2)}, r"logprob must have shape \[T\], got \[2, 2\]"),
        ({"behaviour_logprob": torch.zeros(3)}, r"behaviour_logprob must have shape \[4\], got"),
        ({"advantage": torch.zeros(4).double()}, "advantage must be float32, got float64"),
        ({"mask": torch.zeros(8)[::2]}, "mask must be contiguous, got stride 2"),
        ({"weight": "none"}, "weight must be uniform or behaviour_prob, got 'none'"),
    ],
)
def test_bad_tokens_are_refused_and_the_table_stays(
    changes: dict[str, object], message: str
) -> None:
    table = torch.zeros(224, dtype=torch.int64)
    names = ("logprob", "behaviour_logprob", "advantage", "mask")
    arguments: dict[str, object] = {
        "table": table,
        "grid": grid_tensor(GRID),
        **{name: torch.ones(4) for name in names},
        "weight": "uniform",
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bapo.contributions_(**{**arguments, **changes})
    assert not table.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 1.0}, "target must lie between 0 and 1 with measure share, got 1"),
        ({"target": 300.0, "measure": "ratio"}, "target must lie between 0 and 256 .* got 300"),
        ({"target": 1e-9}, r"target must be above 2\^-25, got 1e-09"),
        ({"target": math.nan}, "target must lie between 0 and 1 .* got nan"),
        ({"contribution": "loss"}, "contribution must be surrogate or gradient, got 'loss'"),
        ({"measure": "sum"}, "measure must be share or ratio, got 'sum'"),
    ],
)
def test_a_bad_search_is_refused(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "table": torch.zeros(224, dtype=torch.int64),
        "grid": grid_tensor(GRID),
        "target": 0.4,
        "contribution": "surrogate",
        "measure": "share",
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bapo.search_bounds(**{**arguments, **changes})


def broken_grid(offset: int, value: int | float) -> Tensor:
    """The grid's bytes with one 4-byte number replaced."""
    content = bytearray(GRID.to_bytes())
    kind = np.int32 if isinstance(value, int) else np.float32
    content[offset : offset + 4] = np.array([value], dtype=kind).tobytes()
    return torch.frombuffer(content, dtype=torch.uint8)


FIRST_UPPER, FIRST_LOWER = 16, 16 + 4 * 256
"""Offsets in the grid's bytes, behind two counts, a flag and the order."""


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (torch.zeros(10, dtype=torch.uint8), r"grid must be the 2068 bytes of .* got shape \[10\]"),
        (grid_tensor(GRID).to(torch.int8), "grid must be uint8, got int8"),
        (torch.zeros(2068, dtype=torch.uint8), "1 to 256 candidates per side, got 0 lower and 0"),
        (broken_grid(0, 257), "1 to 256 candidates per side, got 16 lower and 257 upper"),
        (broken_grid(4, -1), "1 to 256 candidates per side, got -1 lower and 37 upper"),
        (broken_grid(8, 2), "got 2 for a yes or no"),
        (broken_grid(12, 7), "known order, got 7"),
        (broken_grid(FIRST_UPPER + 4, 9.0), "upper candidates must ascend, got 9 before 1.3"),
        (broken_grid(FIRST_UPPER + 4, math.nan), "upper candidates must ascend, got 1.2 before"),
        (broken_grid(FIRST_UPPER, 0.9), "upper candidates must lie between 1 and 256, got 0.9"),
        (broken_grid(FIRST_LOWER, 0.1), "lower candidates must lie between 0.5 and 1, got 0.1"),
        (broken_grid(8, 1), "dual_clip must be > 1 and finite, got 0"),
    ],
)
def test_bytes_that_are_no_grid_are_refused(grid: Tensor, message: str) -> None:
    table = torch.zeros(224, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bapo.search_bounds(table, grid, 0.4, "surrogate", "share")


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"isa must be one of auto, portable.*, got 'sse9'"):
        extension.use_isa("sse9")
    assert extension.build_info()["isa"] == ISAS[-1]
