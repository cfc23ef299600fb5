"""contributions_ and search_bounds against exact arithmetic, on the CPU and with CUDA.

Shape legend: T = tokens.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.ops import extension
from tests.ops.kernel_calls import (
    GRID,
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
    threads,
)
from tests.oracles.bound_search import Rule, Tokens, exact_search, exact_table
from tests.oracles.token_batches import few_values_tokens, paper_rule, random_tokens

START, MET, EXHAUSTED, NO_SEARCH, REFUSED = range(5)
EXIT_NUMBERS = {"start": START, "met": MET, "exhausted": EXHAUSTED}
UNIT = 2**24
OPS = torch.ops.bapo


def op_search(kernels: Any, table: Tensor, grid: extension.ClipGrid, rule: Rule) -> list[float]:
    where = (rule.target, rule.contribution, rule.measure)
    bounds = kernels.search_bounds(table, grid_tensor(grid), *where)
    assert bounds.dtype == torch.float64
    return bounds.tolist()


@pytest.mark.parametrize("weight", ["uniform", "behaviour_prob"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 4097])
def test_the_table_gets_what_exact_arithmetic_gives_bit_for_bit(
    kernels: Any, num_tokens: int, dual_clip: float | None, weight: str
) -> None:
    rule = paper_rule(dual_clip=dual_clip, weight=weight)
    tokens = random_tokens(np.random.default_rng(num_tokens), num_tokens, rule)
    if num_tokens > 30:
        bad = (np.nan, np.inf, -np.inf, 256.0, -256.0, -300.0, 0.5)
        for index, array in enumerate(tokens.arrays()):
            array[7 * index : 7 * index + 7] = bad[: len(array) - 7 * index]
    grid = extension.ClipGrid(LOWER, UPPER, dual_clip=dual_clip)
    before = torch.arange(grid.num_slots)
    table = filled_table(tokens, grid, weight, table=before.clone(), kernels=kernels)
    assert (table - before).tolist() == exact_table(tokens, rule)


@pytest.mark.parametrize("measure", ["share", "ratio"])
def test_the_limits_hold_at_two_to_the_31_tokens_over_all_ranks(kernels: Any, measure: str) -> None:
    # 2^10 tokens per side on each of 2^20 − 1 ranks, summed as an all-reduce does.
    ranks = 2**20 - 1
    full = np.full(2**10, 20.0, dtype=np.float32)
    zero, ones = np.zeros_like(full), np.ones_like(full)
    largest = np.nextafter(np.float32(256), np.float32(0))
    grid = extension.ClipGrid((0.5, 1.0, 0.25), (1.0, 255.5, 254.5))
    table = filled_table(Tokens(full, zero, largest * ones, ones), grid, kernels=kernels)
    filled_table(Tokens(full, zero, -largest * ones, ones), grid, table=table, kernels=kernels)
    table *= ranks
    rule = paper_rule(target=255.0 if measure == "ratio" else 0.99, measure=measure)
    result = search_table(table, grid, rule)
    q, a = int(np.float32(np.exp(20.0))) * UNIT, int(float(largest) * UNIT)
    assert a * q * 2**10 * ranks > 2**114
    assert result.candidates[0].negative == a * q * 2**10 * ranks / 2**48
    assert result.candidates[1].positive == a * int(255.5 * UNIT) * 2**10 * ranks / 2**48
    assert result.exit == "exhausted"
    assert op_search(kernels, table, grid, rule)[4] == EXHAUSTED
    table[POSITIVE] = 2**31 - int(table[NEGATIVE])
    assert op_search(kernels, table, grid, rule)[4] == REFUSED
    with pytest.raises(ValueError, match="2\\^31 tokens or more"):
        search_table(table, grid, rule)


@pytest.mark.parametrize("num_tokens", [255, 256, 257, 16_384, 16_385, 150_001])
def test_one_thread_and_eight_give_the_same_bits(num_tokens: int) -> None:
    tokens = random_tokens(np.random.default_rng(num_tokens), num_tokens, paper_rule())
    with threads(1):
        alone = filled_table(tokens, GRID)
    with threads(8):
        assert torch.equal(filled_table(tokens, GRID), alone)


@pytest.mark.parametrize("order", [1, 7])
def test_the_order_of_cuda_s_threads_does_not_change_a_bit(emulated: Any, order: int) -> None:
    emulated.set_order(order)
    tokens = random_tokens(np.random.default_rng(1), 2500, paper_rule())
    assert torch.equal(filled_table(tokens, GRID, kernels=emulated), filled_table(tokens, GRID))


@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
@pytest.mark.parametrize("measure", ["share", "ratio"])
@pytest.mark.parametrize("order", ["upper_first", "lower_first"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_the_decision_is_that_of_the_reported_path_and_of_exact_arithmetic(
    kernels: Any, contribution: str, measure: str, order: str, dual_clip: float | None
) -> None:
    grid = extension.ClipGrid(LOWER, UPPER, order=order, dual_clip=dual_clip)  # type: ignore[arg-type]
    exits = set()
    for seed, target in enumerate((0.05, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.95)):
        rule = paper_rule(
            contribution=contribution,
            measure=measure,
            target=target,
            order=order,
            dual_clip=dual_clip,
        )
        rng = np.random.default_rng(seed)
        for tokens in (random_tokens(rng, 60, rule), few_values_tokens(rng, 60)):
            table = filled_table(tokens, grid)
            bounds = op_search(kernels, table, grid, rule)
            expected = search_table(table, grid, rule)
            shares = (expected.positive_share_start, expected.positive_share)
            # On a device the shares, which are reported only, may be one ulp apart.
            assert bounds[2:4] == pytest.approx(shares, rel=1e-14)
            exact = exact_search(tokens, rule)
            decision = [exact.clip_low, exact.clip_high, EXIT_NUMBERS[exact.exit]]
            assert [*bounds[:2], bounds[4]] == decision
            assert [expected.clip_low, expected.clip_high] == decision[:2]
            signed = ((tokens.mask == 1) & (tokens.advantage != 0)).sum()
            assert bounds[5:] == [0.0, 0.0, signed]
            exits.add(exact.exit)
    assert len(exits) >= 2


def test_the_longest_path_of_256_candidates_per_side(kernels: Any) -> None:
    grid = extension.ClipGrid((0.5, 1.0, 0.5 / 255), (1.0, 2.0, 1.0 / 255), dual_clip=3.0)
    table = filled_table(random_tokens(np.random.default_rng(2), 4000, paper_rule()), grid)
    pairs = search_table(table, grid, paper_rule(target=0.5)).candidates
    assert len(pairs) == 511
    rule = paper_rule(target=pairs[400].positive_share)
    expected = search_table(table, grid, rule)
    bounds = op_search(kernels, table, grid, rule)
    assert bounds[:2] == [expected.clip_low, expected.clip_high]


def test_without_signed_tokens_the_first_pair_is_taken(kernels: Any) -> None:
    for contribution, measure in (("gradient", "ratio"), ("surrogate", "share")):
        rule = paper_rule(contribution=contribution, measure=measure)
        bounds = op_search(kernels, torch.zeros(GRID.num_slots, dtype=torch.int64), GRID, rule)
        assert tuple(bounds[:2]) == path_of(GRID)[0]
        assert all(math.isnan(share) for share in bounds[2:4])
        assert bounds[4:] == [NO_SEARCH, 0, 0, 0]


@pytest.mark.parametrize(
    ("slot", "value", "reported"),
    [
        (NONFINITE, 3, [3.0, 0.0, 100.0]),
        (OUT_OF_RANGE, 2, [0.0, 2.0, 100.0]),
        (POSITIVE, 2**31 - 60, [0.0, 0.0, 2.0**31]),
        (NEGATIVE, -1, [0.0, 0.0, 39.0]),
        (0, -1, [0.0, 0.0, 100.0]),
        (7, -1, [0.0, 0.0, 100.0]),
    ],
)
def test_a_table_that_cannot_be_trusted_is_refused(
    kernels: Any, slot: int, value: int, reported: list[float]
) -> None:
    table = torch.ones(GRID.num_slots, dtype=torch.int64)
    table[-4:] = torch.tensor([0, 0, 40, 60])
    table[slot] = value
    bounds = op_search(kernels, table, GRID, paper_rule())
    assert bounds[:2] == [0.0, math.inf]
    assert all(math.isnan(share) for share in bounds[2:4])
    assert bounds[4] == REFUSED
    assert bounds[5:] == reported


def test_a_table_one_token_below_the_limit_is_searched(kernels: Any) -> None:
    table = torch.ones(GRID.num_slots, dtype=torch.int64)
    table[-4:] = torch.tensor([0, 0, 2**31 - 61, 60])
    assert op_search(kernels, table, GRID, paper_rule())[4] in (START, MET, EXHAUSTED)
