"""The CUDA kernels of ratio, table and search, run by the emulator, against exact results."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bapo_megatron.ops import extension
from tests.cuda_emulation.launchers import EmulatedKernels
from tests.ops.kernel_calls import LOWER, UPPER, filled_table, search_table
from tests.oracles.bound_search import Tokens
from tests.oracles.token_batches import paper_rule, random_tokens

EDGE_TOKENS = (0, 1, 31, 32, 33)
ORDERS = (0, 1, 7)


def paper_grid(**changes: object) -> extension.ClipGrid:
    return extension.ClipGrid(LOWER, UPPER, **changes)  # type: ignore[arg-type]


class TestContributions:
    @pytest.mark.slow
    @pytest.mark.parametrize("weight", ["uniform", "behaviour_prob"])
    @pytest.mark.parametrize("num_tokens", [*EDGE_TOKENS, 4097])
    @pytest.mark.parametrize("dual_clip", [None, 3.0])
    def test_the_table_is_bit_identical_to_the_cpus(
        self, kernels: EmulatedKernels, num_tokens: int, weight: str, dual_clip: float | None
    ) -> None:
        grid = paper_grid(dual_clip=dual_clip)
        rule = paper_rule(dual_clip=dual_clip)
        tokens = random_tokens(np.random.default_rng(num_tokens), num_tokens, rule).arrays()
        table = torch.arange(grid.num_slots)
        expected = table + filled_table(Tokens(*tokens), grid, weight)
        kernels.contributions_(table, grid, *map(torch.from_numpy, tokens), weight)
        assert torch.equal(table, expected)

    def test_bad_tokens_are_counted_as_on_the_cpu(self, kernels: EmulatedKernels) -> None:
        rule = paper_rule()
        tokens = random_tokens(np.random.default_rng(5), 600, rule).arrays()
        bad = (math.nan, math.inf, -math.inf, 256.0, -300.0, 3e38)
        for index, array in enumerate(tokens):
            for offset, value in enumerate(bad):
                array[40 * index + 3 * offset] = value
        grid = paper_grid()
        table = torch.zeros(grid.num_slots, dtype=torch.int64)
        kernels.contributions_(table, grid, *map(torch.from_numpy, tokens), "uniform")
        assert torch.equal(table, filled_table(Tokens(*tokens), grid))
        assert table[-4] > 0
        assert table[-3] > 0

    def test_the_largest_ratio_and_advantage_do_not_overflow(
        self, kernels: EmulatedKernels
    ) -> None:
        num_tokens = 3000
        logprob = np.full(num_tokens, 20.0, dtype=np.float32)
        behaviour = np.zeros(num_tokens, dtype=np.float32)
        advantage = np.where(np.arange(num_tokens) % 3 == 0, 255.0, -255.0).astype(np.float32)
        tokens = (logprob, behaviour, advantage, np.ones(num_tokens, dtype=np.float32))
        grid = extension.ClipGrid((0.5, 1.0, 0.002), (1.0, 2.0, 0.004))
        table = torch.zeros(grid.num_slots, dtype=torch.int64)
        kernels.contributions_(table, grid, *map(torch.from_numpy, tokens), "uniform")
        assert torch.equal(table, filled_table(Tokens(*tokens), grid))

    @pytest.mark.parametrize("order", ORDERS)
    def test_the_order_of_threads_does_not_change_a_bit(
        self, kernels: EmulatedKernels, order: int
    ) -> None:
        kernels.set_order(order)
        tokens = random_tokens(np.random.default_rng(1), 2500, paper_rule()).arrays()
        table = torch.zeros(224, dtype=torch.int64)
        kernels.contributions_(table, paper_grid(), *map(torch.from_numpy, tokens), "uniform")
        assert torch.equal(table, filled_table(Tokens(*tokens), paper_grid()))


class TestSearchBounds:
    @pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
    @pytest.mark.parametrize("measure", ["share", "ratio"])
    @pytest.mark.parametrize("order", ["upper_first", "lower_first"])
    @pytest.mark.parametrize("dual_clip", [None, 3.0])
    def test_the_decision_is_the_cpus(
        self,
        kernels: EmulatedKernels,
        contribution: str,
        measure: str,
        order: str,
        dual_clip: float | None,
    ) -> None:
        grid = paper_grid(order=order, dual_clip=dual_clip)
        seen = set()
        for seed, target in enumerate((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)):
            tokens = random_tokens(np.random.default_rng(seed), 300, paper_rule())
            rule = paper_rule(target=target, contribution=contribution, measure=measure)
            table = filled_table(tokens, grid)
            expected = search_table(table, grid, rule)
            bounds = kernels.search_bounds(table, grid, target, contribution, measure).tolist()
            exits = ("start", "met", "exhausted")
            assert bounds == [
                expected.clip_low,
                expected.clip_high,
                expected.positive_share_start,
                expected.positive_share,
                exits.index(expected.exit),
                0,
                0,
                int(table[-2:].sum()),
            ]
            seen.add(expected.exit)
        assert len(seen) >= 2

    def test_the_longest_path_of_256_candidates_per_side(self, kernels: EmulatedKernels) -> None:
        grid = extension.ClipGrid((0.5, 1.0, 0.5 / 255), (1.0, 2.0, 1.0 / 255), dual_clip=3.0)
        table = filled_table(random_tokens(np.random.default_rng(2), 4000, paper_rule()), grid)
        pairs = search_table(table, grid, paper_rule(target=0.5)).candidates
        assert len(pairs) == 511
        share = pairs[400].positive_share
        expected = search_table(table, grid, paper_rule(target=share))
        bounds = kernels.search_bounds(table, grid, share, "surrogate", "share")
        assert bounds[:2].tolist() == [expected.clip_low, expected.clip_high]

    @pytest.mark.parametrize(
        ("slot", "value"), [(-4, 1), (-3, 2), (7, -1), (-2, 1 << 31), (-1, (1 << 31) - 1)]
    )
    def test_a_table_that_cannot_be_trusted_is_refused(
        self, kernels: EmulatedKernels, slot: int, value: int
    ) -> None:
        table = torch.zeros(224, dtype=torch.int64)
        table[-2] = 1
        table[slot] = value
        bounds = kernels.search_bounds(table, paper_grid(), 0.4, "surrogate", "share").tolist()
        assert bounds[:2] == [0.0, math.inf]
        assert math.isnan(bounds[2])
        assert math.isnan(bounds[3])
        assert bounds[4:] == [4, table[-4], table[-3], table[-2] + table[-1]]

    def test_without_signed_tokens_the_first_pair_is_taken(self, kernels: EmulatedKernels) -> None:
        table = torch.zeros(224, dtype=torch.int64)
        bounds = kernels.search_bounds(table, paper_grid(), 0.4, "gradient", "ratio").tolist()
        assert bounds[:2] == [float(np.float32(0.6)), float(np.float32(1.2))]
        assert math.isnan(bounds[2])
        assert math.isnan(bounds[3])
        assert bounds[4:] == [3, 0, 0, 0]


@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 256, 257, 4097])
def test_the_ratio_is_the_float64_exponential_rounded_once(
    kernels: EmulatedKernels, num_tokens: int
) -> None:
    tokens = random_tokens(np.random.default_rng(num_tokens), num_tokens, paper_rule())
    ratio_T = kernels.importance_ratio(
        torch.from_numpy(tokens.logprob), torch.from_numpy(tokens.behaviour)
    )
    assert np.array_equal(ratio_T.numpy(), tokens.ratios())


def test_the_log_ratio_is_held_at_twenty_and_bad_tokens_are_nan(kernels: EmulatedKernels) -> None:
    logprob_T = torch.tensor([21.0, -300.0, 3e38, math.nan, math.inf, 0.0, 0.0, -math.inf, 1.0])
    behaviour_T = torch.tensor([0.0, 0.0, -3e38, 0.0, 0.0, math.nan, math.inf, -math.inf, 1.0])
    ratio_T = kernels.importance_ratio(logprob_T, behaviour_T)
    high, low = np.float32(485165195.40979028), np.float32(2.0611536224385578e-09)
    assert ratio_T[:3].tolist() == [high, low, high]
    assert ratio_T[3:8].isnan().all()
    assert ratio_T[8] == 1.0
