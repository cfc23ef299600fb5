"""The bound search against exact arithmetic, the float64 loop and the released recipe."""

from __future__ import annotations

import numpy as np
import pytest

from bapo_megatron.ops import extension
from tests.ops.kernel_calls import LOWER, UPPER, filled_table, search_table
from tests.oracles.bound_search import Found, Rule, Tokens, exact_sums, released_recipe_search
from tests.oracles.token_batches import paper_rule, random_tokens

RECIPE = ((0.6, 0.8, 0.05), (1.2, 2.0, 0.05))
TWO_BY_TWO = ((0.75, 1.0, 0.25), (1.0, 1.25, 0.25))


def search(
    tokens: Tokens, rule: Rule, ranges: tuple = (LOWER, UPPER), spacing: str = "multiples"
) -> extension.SearchResult:
    grid = extension.ClipGrid(*ranges, order=rule.order, spacing=spacing, dual_clip=rule.dual_clip)
    return search_table(filled_table(tokens, grid, rule.weight), grid, rule)


def same(result: extension.SearchResult, wanted: Found) -> bool:
    return (result.clip_low, result.clip_high, result.exit) == (
        wanted.clip_low,
        wanted.clip_high,
        wanted.exit,
    )


def tokens_of(*rows: tuple[float, float]) -> Tokens:
    """Tokens from (ratio, advantage) pairs; the ratio is reached through the log-prob."""
    ratio, advantage = (np.array(column, dtype=np.float32) for column in zip(*rows, strict=True))
    zero = np.zeros_like(ratio)
    return Tokens(np.log(ratio), zero, advantage, np.ones_like(ratio))


def random_rule(rng: np.random.Generator) -> Rule:
    contribution = str(rng.choice(["surrogate", "gradient"]))
    measure = str(rng.choice(["share", "ratio"]))
    target = rng.choice([0.3, 0.4, 0.45, 0.5]) if measure == "share" else rng.choice([0.5, 0.8, 1])
    return paper_rule(
        target=float(target),
        order=str(rng.choice(["upper_first", "lower_first"])),
        contribution=contribution,
        measure=measure,
        weight=str(rng.choice(["uniform", "behaviour_prob"])),
        dual_clip=3.0 if contribution == "gradient" and rng.random() < 0.5 else None,
    )


def test_every_candidate_holds_the_exact_sums() -> None:
    rng = np.random.default_rng(7)
    for _ in range(40):
        rule = random_rule(rng)
        tokens = random_tokens(rng, 31, rule)
        for pair in search(tokens, rule).candidates[:: int(rng.integers(1, 6))]:
            wanted = exact_sums(tokens, rule, pair.clip_low, pair.clip_high)
            assert (pair.positive, pair.negative) == tuple(units / 2**48 for units in wanted)


@pytest.mark.slow
def test_the_recipe_equals_the_released_loop_outside_its_margin() -> None:
    rng = np.random.default_rng(5)
    rule = paper_rule(order="lower_first", measure="ratio", target=1.0)
    compared = 0
    for _ in range(300):
        tokens = random_tokens(rng, int(rng.integers(1, 300)), rule)
        wanted = released_recipe_search(tokens, lower=RECIPE[0], upper=RECIPE[1], target=1.0)
        if wanted.margin > 2.0**-20:
            assert same(search(tokens, rule, RECIPE, "running_sum"), wanted)
            compared += 1
    assert compared >= 290


def test_a_batch_computed_by_hand_stops_inside_the_path() -> None:
    # P(1.0) = 1·1.0, P(1.25) = 1·1.25; N(0.75) = 2·max(0.5, 0.75) = 1.5.
    # shares 1/2.5 = 0.4 and 1.25/2.75 = 0.4545…
    tokens = tokens_of((2.0, 1.0), (0.5, -2.0))
    result = search(tokens, Rule([0.75, 1.0], [1.0, 1.25], target=0.45), TWO_BY_TWO)
    assert same(result, Found(0.75, 1.25, "met"))
    assert result.index == 1
    assert result.positive_share_start == pytest.approx(0.4, abs=1e-15)
    assert result.positive_share == pytest.approx(5 / 11, abs=1e-15)
    assert [pair.passes for pair in result.candidates] == [False, True, False]


def test_a_share_equal_to_the_target_passes() -> None:
    # P = 1, N = 1: the share is the target 0.5 exactly.
    tokens = tokens_of((1.0, 1.0), (1.0, -1.0))
    assert search(tokens, paper_rule(target=0.5)).exit == "start"


def test_the_last_pair_of_the_path_may_meet_the_target() -> None:
    # Eq. 5 with r = 1 drops negatives at c_low = 1 only: N falls from 4 to 0 at the last pair.
    tokens = tokens_of((0.5, 1.0), (1.0, -4.0))
    rule = Rule([0.75, 1.0], [1.0, 1.25], target=0.5, contribution="gradient")
    assert same(search(tokens, rule, TWO_BY_TWO), Found(1.0, 1.25, "met"))


def test_gradient_contributions_drop_tokens_exactly_on_a_bound() -> None:
    tokens = tokens_of((1.0, 1.0), (0.75, -1.0), (1.0, -1.0))
    rule = Rule([0.75, 1.0], [1.0, 1.25], target=0.9, contribution="gradient")
    pairs = search(tokens, rule, TWO_BY_TWO).candidates
    assert [(pair.positive, pair.negative) for pair in pairs] == [(0, 1), (1, 1), (1, 0)]


def test_a_dual_clip_drops_only_what_lies_above_it_and_only_in_gradient_mode() -> None:
    tokens = Tokens(
        np.array([0.0, np.log(np.float32(3)), 2.0], dtype=np.float32),
        np.zeros(3, dtype=np.float32),
        -np.ones(3, dtype=np.float32),
        np.ones(3, dtype=np.float32),
    )
    middle = float(tokens.ratios()[1])
    gradient = paper_rule(contribution="gradient", dual_clip=middle)
    assert search(tokens, gradient).candidates[0].negative == pytest.approx(1 + middle, abs=1e-7)
    surrogate = paper_rule(dual_clip=middle)
    whole = 1 + middle + float(tokens.ratios()[2])
    assert search(tokens, surrogate).candidates[0].negative == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
def test_a_batch_without_negative_tokens_starts(contribution: str) -> None:
    tokens = tokens_of((1.0, 1.0), (5.0, 0.5), (0.1, 0.0))
    result = search(tokens, paper_rule(contribution=contribution))
    assert (result.exit, result.positive_share) == ("start", 1.0)
    assert (result.clip_low, result.clip_high) == (np.float32(0.6), np.float32(1.2))


def test_a_batch_without_positive_tokens_is_exhausted() -> None:
    result = search(tokens_of((1.0, -1.0), (2.0, -0.5)), paper_rule())
    assert same(result, Found(float(np.float32(0.9)), 3.0, "exhausted"))
    assert result.positive_share == 0.0


@pytest.mark.parametrize("case", ["empty", "all_masked", "zero_advantages"])
def test_a_batch_without_gradient_starts(case: str) -> None:
    size = 0 if case == "empty" else 5
    mask = np.full(size, case != "all_masked", dtype=np.float32)
    advantage = np.full(size, case == "all_masked", dtype=np.float32)
    zero = np.zeros(size, dtype=np.float32)
    for contribution in ("surrogate", "gradient"):
        result = search(Tokens(zero, zero, advantage, mask), paper_rule(contribution=contribution))
        assert same(result, Found(float(np.float32(0.6)), float(np.float32(1.2)), "start"))
