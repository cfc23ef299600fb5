"""The table: independent of order, split and threads; limits; refusals."""

from __future__ import annotations

import numpy as np
import pytest

from bapo_megatron.ops import extension
from tests.ops.kernel_calls import (
    GRID,
    LOWER,
    NEGATIVE,
    NONFINITE,
    OUT_OF_RANGE,
    POSITIVE,
    filled_table,
    threads,
)
from tests.oracles.bound_search import Tokens
from tests.oracles.token_batches import paper_rule, random_tokens

UNIT = 2**24


def filled(tokens: Tokens, grid: extension.ClipGrid = GRID, weight: str = "uniform") -> np.ndarray:
    return filled_table(tokens, grid, weight).numpy()


def search(
    table: np.ndarray,
    grid: extension.ClipGrid,
    target: float = 0.4,
    contribution: str = "surrogate",
    measure: str = "share",
) -> extension.SearchResult:
    return extension.search(table.tolist(), grid, target, contribution, measure)  # type: ignore[arg-type]


def one_token(
    log_ratio: float = 0.0, behaviour: float = 0.0, advantage: float = 1.0, mask: float = 1.0
) -> Tokens:
    logprob = np.float32(behaviour) + np.float32(log_ratio)
    row = np.array([logprob, behaviour, advantage, mask], dtype=np.float32)
    return Tokens(row[:1], row[1:2], row[2:3], row[3:])


@pytest.mark.parametrize("weight", ["uniform", "behaviour_prob"])
@pytest.mark.parametrize("seed", range(5))
def test_order_and_split_do_not_change_a_bit(seed: int, weight: str) -> None:
    rng = np.random.default_rng(seed)
    tokens = random_tokens(rng, 1500, paper_rule())
    whole = filled(tokens, weight=weight)
    for _ in range(20):
        parts = np.array_split(rng.permutation(len(tokens)), int(rng.integers(1, 9)))
        assert np.array_equal(sum(filled(tokens.take(p), weight=weight) for p in parts), whole)


@pytest.mark.parametrize("num_tokens", [0, 1, 255, 256, 257, 16_384, 16_385, 150_001])
def test_one_thread_and_eight_give_the_same_bits(num_tokens: int) -> None:
    tokens = random_tokens(np.random.default_rng(num_tokens), num_tokens, paper_rule())
    with threads(1):
        alone = filled(tokens)
    with threads(8):
        assert np.array_equal(filled(tokens), alone)


def test_log_ratios_beyond_twenty_count_as_twenty() -> None:
    assert np.array_equal(filled(one_token(21.0)), filled(one_token(20.0)))
    assert np.array_equal(filled(one_token(-300.0)), filled(one_token(-20.0)))
    far = Tokens(*(np.array([x], dtype=np.float32) for x in (3e38, -3e38, 1, 1)))
    assert np.array_equal(filled(far), filled(one_token(20.0)))


@pytest.mark.parametrize("measure", ["share", "ratio"])
def test_the_limits_hold_at_two_to_the_31_tokens_over_all_ranks(measure: str) -> None:
    # 2^10 tokens per side on each of 2^20 − 1 ranks, summed as an all-reduce does.
    ranks = 2**20 - 1
    full = np.full(2**10, 20.0, dtype=np.float32)
    zero, ones = np.zeros_like(full), np.ones_like(full)
    largest = np.nextafter(np.float32(256), np.float32(0))
    grid = extension.ClipGrid((0.5, 1.0, 0.25), (1.0, 255.5, 254.5))
    table = filled(Tokens(full, zero, largest * ones, ones), grid)
    table += filled(Tokens(full, zero, -largest * ones, ones), grid)
    table *= ranks
    result = search(table, grid, 255.0 if measure == "ratio" else 0.99, "surrogate", measure)
    q, a = int(np.float32(np.exp(20.0))) * UNIT, int(float(largest) * UNIT)
    assert a * q * 2**10 * ranks > 2**114
    assert result.candidates[0].negative == a * q * 2**10 * ranks / 2**48
    assert result.candidates[1].positive == a * int(255.5 * UNIT) * 2**10 * ranks / 2**48
    assert result.exit == "exhausted"
    table[POSITIVE] = 2**31 - int(table[NEGATIVE])
    with pytest.raises(ValueError, match="2\\^31 tokens or more"):
        search(table, grid)


@pytest.mark.parametrize("column", range(3))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_tokens_that_are_not_finite_are_counted_and_refused(column: int, value: float) -> None:
    rows = [np.zeros(3, dtype=np.float32) for _ in range(3)] + [np.ones(3, dtype=np.float32)]
    rows[column][1] = value
    table = filled(Tokens(*rows))
    assert table[NONFINITE] == 1
    with pytest.raises(ValueError, match="counted 1 tokens with a log-prob, advantage or mask"):
        search(table, GRID)
    rows[3][1] = 0.0
    assert filled(Tokens(*rows))[NONFINITE] == 0


@pytest.mark.parametrize(
    ("advantage", "mask"), [(256.0, 1.0), (-256.0, 1.0), (3e38, 1.0), (1.0, 0.5), (0.0, -1.0)]
)
def test_tokens_out_of_range_are_counted_and_refused(advantage: float, mask: float) -> None:
    table = filled(one_token(advantage=advantage, mask=mask))
    assert table[OUT_OF_RANGE] == 1
    assert table[:-4].sum() == 0
    with pytest.raises(ValueError, match="256 or a mask other than 0 and 1"):
        search(table, GRID)


def test_the_behaviour_probability_scales_the_advantage() -> None:
    # e^-1 · 1000 = 367.9 is out of range, e^-2 · 1000 = 135.3 is not.
    assert filled(one_token(0.0, -1.0, 1000.0), weight="behaviour_prob")[OUT_OF_RANGE] == 1
    table = filled(one_token(0.0, -2.0, 1000.0), weight="behaviour_prob")
    assert table[OUT_OF_RANGE] == 0
    assert int(table[0]) == round(1000 * float(np.exp(-2.0)) * UNIT)


def test_a_table_with_a_negative_sum_is_refused() -> None:
    table = filled(one_token())
    table[5] = -1
    with pytest.raises(ValueError, match="holds a negative sum"):
        search(table, GRID)


def test_a_table_of_another_length_is_refused() -> None:
    other = extension.ClipGrid(LOWER, (1.2, 2.0, 0.05))
    # 18 upper and 17 lower bins of 4 slots, 4 counters.
    with pytest.raises(ValueError, match="table must have the grid's 144 slots, got 224"):
        search(filled(one_token()), other)
