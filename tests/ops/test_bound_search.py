"""The bound search against exact arithmetic, the float64 loop and the released recipe."""

import numpy as np
import pytest
import torch

from bapo_megatron.algorithm.objectives.bapo import BapoConfig
from bapo_megatron.ops import extension
from bapo_megatron.ops.contributions import TokenCounts, count_tokens
from tests.ops.kernel_calls import (
    GRID,
    LOWER,
    NONFINITE,
    OUT_OF_RANGE,
    UPPER,
    filled_table,
    plain_candidates,
    search_table,
)
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


def test_a_share_equal_to_the_target_passes() -> None:
    # P = 1, N = 1: the share is the target 0.5 exactly.
    tokens = tokens_of((1.0, 1.0), (1.0, -1.0))
    assert search(tokens, paper_rule(target=0.5)).exit == "start"


def test_the_last_pair_of_the_path_may_meet_the_target() -> None:
    # Eq. 5 with r = 1 drops negatives at c_low = 1 only: N falls from 4 to 0 at the last pair.
    tokens = tokens_of((0.5, 1.0), (1.0, -4.0))
    rule = Rule([0.75, 1.0], [1.0, 1.25], target=0.5, contribution="gradient")
    assert same(search(tokens, rule, TWO_BY_TWO), Found(1.0, 1.25, "met"))


@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
def test_a_batch_of_one_sign_or_none_has_defined_bounds(contribution: str) -> None:
    first, last = (np.float32(0.6), np.float32(1.2)), (np.float32(0.9), 3.0)
    zero, one = np.zeros(2, dtype=np.float32), np.ones(2, dtype=np.float32)
    for tokens, bounds, exit_name, share in (
        (tokens_of((1.0, 1.0), (5.0, 0.5), (0.1, 0.0)), first, "start", 1.0),
        (tokens_of((1.0, -1.0), (2.0, -0.5)), last, "exhausted", 0.0),
        (Tokens(zero[:0], zero[:0], zero[:0], zero[:0]), first, "start", None),
        (Tokens(zero, zero, one, zero), first, "start", None),
        (Tokens(zero, zero, zero, one), first, "start", None),
    ):
        result = search(tokens, paper_rule(contribution=contribution))
        assert same(result, Found(*bounds, exit_name))
        assert share is None or result.positive_share == share


@pytest.mark.parametrize(
    ("slot", "value", "words"),
    [
        (NONFINITE, 1, "counted 1 tokens with a log-prob, advantage or mask"),
        (OUT_OF_RANGE, 1, "256 or a mask other than 0 and 1"),
        (5, -1, "holds a negative sum"),
    ],
)
def test_a_table_that_cannot_be_trusted_has_no_path(slot: int, value: int, words: str) -> None:
    table = filled_table(tokens_of((1.0, 1.0), (1.0, -2.0), (1.0, -1.0)), GRID)
    assert count_tokens(table) == TokenCounts(0, 0, 1, 2)
    table[slot] = value
    with pytest.raises(ValueError, match=words):
        BapoConfig().search().path(table)


def test_a_table_of_another_length_is_refused() -> None:
    # 18 upper and 17 lower bins of 4 slots, 4 counters.
    grid = extension.ClipGrid(LOWER, (1.2, 2.0, 0.05))
    with pytest.raises(ValueError, match="table must have the grid's 144 slots, got 224"):
        search_table(filled_table(tokens_of((1.0, 1.0)), GRID), grid, paper_rule())


def test_strided_tensors_and_tensors_with_gradient_are_taken() -> None:
    search = BapoConfig().search()
    wide = torch.tensor([[0.3, 9.0], [-0.2, 9.0]], requires_grad=True)
    zero, ones, advantage = torch.zeros(2), torch.ones(2), torch.tensor([1.0, -1.0])
    strided = search.contributions(wide[:, 0], zero, advantage, ones)
    plain = search.contributions(torch.tensor([0.3, -0.2]), zero, advantage, ones)
    assert torch.equal(strided, plain)
    assert count_tokens(plain) == TokenCounts(0, 0, 1, 1)


def test_the_dual_clip_is_a_candidate_in_gradient_mode_only() -> None:
    gradient = BapoConfig.model_validate({"contribution": "gradient"}).search(dual_clip=3.0)
    assert plain_candidates(gradient.grid)[2] == 3.0
    assert plain_candidates(BapoConfig().search(dual_clip=3.0).grid)[2] is None
