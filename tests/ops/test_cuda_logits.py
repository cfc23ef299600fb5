"""The CUDA kernels over logits, run by the emulator, against float64.

Shape legend: N = rows of logits, V = local columns, T = tokens, P = tensor-parallel ranks.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.cuda_emulation import cases
from tests.cuda_emulation.cases import assert_partials
from tests.cuda_emulation.launchers import EmulatedKernels

EDGE_TOKENS = (0, 1, 31, 32, 33)
ORDERS = (0, 1, 7)


class TestLogprobPartials:
    @pytest.mark.parametrize("dtype", cases.DTYPES)
    @pytest.mark.parametrize("columns", [1, 15, 16, 17, 4097, 19008, 33000])
    def test_they_match_float64_on_rows_of_any_alignment(
        self, kernels: EmulatedKernels, columns: int, dtype: torch.dtype
    ) -> None:
        # 9 rows of odd stride start at every residue of a 16-byte boundary.
        num_rows = 9 if columns < 5000 else 2
        gap = 1 - columns % 2 if columns < 5000 else 5
        case = cases.strided_logits(num_rows, columns, dtype, gap=gap, offset=1, seed=columns)
        target_T = cases.random_targets(num_rows, columns + 10)
        arguments = (case.view_NV, None, target_T, 5, columns + 10, 0.6)
        assert_partials(kernels.logprob_partials(*arguments), cases.expected_partials(*arguments))
        assert case.border_is_intact()

    @pytest.mark.parametrize("num_tokens", EDGE_TOKENS)
    def test_edge_numbers_of_tokens(self, kernels: EmulatedKernels, num_tokens: int) -> None:
        case = cases.strided_logits(40, 50, torch.bfloat16, gap=3)
        rows_T = torch.arange(num_tokens) * 7 % 40
        target_T = cases.random_targets(num_tokens, 50)
        arguments = (case.view_NV, rows_T, target_T, 0, 50, 1.0)
        assert_partials(kernels.logprob_partials(*arguments), cases.expected_partials(*arguments))

    def test_a_row_may_be_read_by_several_tokens(self, kernels: EmulatedKernels) -> None:
        case = cases.strided_logits(4, 100, torch.float32)
        rows_T = torch.tensor([3, 1, 3, 3])
        arguments = (case.view_NV, rows_T, torch.tensor([0, 5, 99, 5]), 0, 100, 1.0)
        assert_partials(kernels.logprob_partials(*arguments), cases.expected_partials(*arguments))

    @pytest.mark.parametrize("dtype", cases.DTYPES)
    @pytest.mark.parametrize("column", [0, 1, 8, 99, 20480, 41000])
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_bad_logit_poisons_its_token_and_no_other(
        self, kernels: EmulatedKernels, bad: float, column: int, dtype: torch.dtype
    ) -> None:
        columns = 100 if column < 100 else 41001
        case = cases.strided_logits(3, columns, dtype, offset=1)
        case.view_NV[1, column] = bad
        rows_T = torch.tensor([0, 1, 2])[: 3 if columns == 100 else 2]
        target_T = torch.tensor([3, 4, 5])[: len(rows_T)]
        arguments = (case.view_NV, rows_T, target_T, 0, columns, 1.0)
        got_T4 = kernels.logprob_partials(*arguments)
        assert bool(got_T4[1, :3].isnan().all())
        assert_partials(got_T4, cases.expected_partials(*arguments))

    def test_a_nan_among_minus_infinities_is_not_lost(self, kernels: EmulatedKernels) -> None:
        case = cases.strided_logits(2, 64, torch.bfloat16)
        case.view_NV.fill_(-math.inf)
        case.view_NV[1, 33] = math.nan
        got_T4 = kernels.logprob_partials(case.view_NV, None, torch.tensor([0, 0]), 70, 200, 1.0)
        assert got_T4[0].tolist() == [-math.inf, 0.0, 0.0, 0.0]
        assert bool(got_T4[1, :3].isnan().all())

    @pytest.mark.parametrize("columns", [24, 21000])
    def test_minus_infinity_adds_nothing_whichever_piece_it_fills(
        self, kernels: EmulatedKernels, columns: int
    ) -> None:
        case = cases.strided_logits(3, columns, torch.bfloat16, gap=1)
        case.view_NV[0, : columns - 4] = -math.inf
        case.view_NV[1, 4:] = -math.inf
        case.view_NV[2, ::2] = -math.inf
        arguments = (case.view_NV, None, torch.tensor([1, 2, 3]), 0, columns, 0.7)
        assert_partials(kernels.logprob_partials(*arguments), cases.expected_partials(*arguments))

    def test_equal_huge_and_far_apart_logits(self, kernels: EmulatedKernels) -> None:
        case = cases.strided_logits(4, 21000, torch.float32)
        case.view_NV[0] = 80.0
        case.view_NV[1, 20900] = 1e8
        case.view_NV[2] = torch.linspace(-80, 80, 21000)
        case.view_NV[3] = torch.linspace(80, -80, 21000)
        arguments = (case.view_NV, None, torch.tensor([0, 1, 2, 3]), 0, 21000, 0.6)
        assert_partials(kernels.logprob_partials(*arguments), cases.expected_partials(*arguments))

    @pytest.mark.parametrize("num_true", [0, 1, 7, 40])
    def test_padding_is_not_read(self, kernels: EmulatedKernels, num_true: int) -> None:
        case = cases.strided_logits(2, 48, torch.float16)
        case.view_NV[:, num_true:] = math.nan
        arguments = (case.view_NV, None, torch.tensor([99, 3]), 100, 100 + num_true, 1.0)
        got_T4 = kernels.logprob_partials(*arguments)
        assert_partials(got_T4, cases.expected_partials(*arguments))
        assert not bool(got_T4.isnan().any())

    def test_rows_and_targets_out_of_range_give_nan_and_spare_their_neighbours(
        self, kernels: EmulatedKernels
    ) -> None:
        # Rows -1 and 3 hold finite numbers here: reading them would show.
        logits_NV = cases.strided_logits(5, 20, torch.bfloat16).view_NV[1:4]
        rows_T = torch.tensor([0, -1, 3, 1 << 40, 1, 2, 2])
        target_T = torch.tensor([4, 4, 4, 4, -1, 20, 4])
        got_T4 = kernels.logprob_partials(logits_NV, rows_T, target_T, 0, 20, 1.0)
        assert bool(got_T4[1:6].isnan().all())
        kept = torch.tensor([0, 6])
        expected_T4 = cases.expected_partials(logits_NV, rows_T[kept], target_T[kept], 0, 20, 1.0)
        assert_partials(got_T4[kept], expected_T4)

    def test_the_order_of_threads_does_not_change_a_bit(self, kernels: EmulatedKernels) -> None:
        # Logits that rise along the row: each of its three pieces has a new maximum, and none
        # dominates the sum.
        case = cases.strided_logits(2, 41001, torch.bfloat16, offset=3)
        case.view_NV.mul_(0.1).add_(torch.linspace(0, 1, 41001))
        arguments = (case.view_NV, None, torch.tensor([7, 40000]), 0, 41001, 0.9)
        expected_T4 = kernels.logprob_partials(*arguments)
        for order in range(1, 13):
            kernels.set_order(order)
            assert torch.equal(kernels.logprob_partials(*arguments), expected_T4)


class TestLogprobCombine:
    @pytest.mark.parametrize("num_ranks", [1, 2, 4])
    @pytest.mark.parametrize("num_tokens", EDGE_TOKENS)
    def test_shards_give_the_unsharded_log_prob_and_entropy(
        self, kernels: EmulatedKernels, num_tokens: int, num_ranks: int
    ) -> None:
        vocab_size = 61  # on 4 ranks of 24 columns the last one is all padding
        per_rank = {1: 64, 2: 40, 4: 24}[num_ranks]
        case = cases.strided_logits(num_tokens, per_rank * num_ranks, torch.bfloat16)
        logits_TV = case.view_NV.mul_(8)
        target_T = cases.random_targets(num_tokens, vocab_size)
        parts = [
            kernels.logprob_partials(
                logits_TV[:, start : start + per_rank], None, target_T, start, vocab_size, 0.6
            )
            for start in range(0, per_rank * num_ranks, per_rank)
        ]
        got = kernels.logprob_combine(torch.stack(parts), 0.6)
        expected = cases.expected_tokens(logits_TV[:, :vocab_size], target_T, 0.6)
        values = (expected.logprob_T, expected.entropy_T, expected.max_T, expected.log_sum_T)
        for value_T, expected_T in zip(got, values, strict=True):
            bound_T = 2e-6 * expected_T.abs().clamp(min=1.0)
            assert bool(((value_T.double() - expected_T).abs() <= bound_T).all())

    def test_a_nan_of_any_rank_poisons_its_token_and_no_other(
        self, kernels: EmulatedKernels
    ) -> None:
        partials_PT4 = torch.tensor([1.0, 2.0, -0.5, 0.25]).repeat(2, 3, 1)
        partials_PT4[1, 1, :3] = math.nan
        for result_T in kernels.logprob_combine(partials_PT4, 1.0):
            assert result_T.isnan().tolist() == [False, True, False]


class TestLogitsBackward:
    @pytest.mark.parametrize("dtype", cases.DTYPES)
    @pytest.mark.parametrize("columns", [1, 15, 16, 17, 4097, 19008, 33000])
    def test_the_gradient_matches_float64_within_one_rounding(
        self, kernels: EmulatedKernels, columns: int, dtype: torch.dtype
    ) -> None:
        small = columns < 5000
        case = cases.gradient_case(
            9 if small else 1,
            columns,
            dtype,
            gap=1 - columns % 2,
            offset=1,
            padding=columns // 9,
            temperature=0.6,
        )
        kernels.logits_backward_(*case.arguments(case.logits.view_NV))
        case.check(case.logits.view_NV)
        assert case.logits.border_is_intact()

    @pytest.mark.parametrize("with_rows", [True, False])
    @pytest.mark.parametrize("num_tokens", EDGE_TOKENS)
    def test_rows_without_a_token_become_zero(
        self, kernels: EmulatedKernels, num_tokens: int, with_rows: bool
    ) -> None:
        case = cases.gradient_case(
            num_tokens, 50, torch.bfloat16, spare_rows=7, gap=3, with_rows=with_rows
        )
        kernels.logits_backward_(*case.arguments(case.logits.view_NV))
        case.check(case.logits.view_NV)
        assert case.logits.border_is_intact()

    def test_without_an_entropy_gradient(self, kernels: EmulatedKernels) -> None:
        case = cases.gradient_case(5, 300, torch.float32, with_entropy=False)
        kernels.logits_backward_(*case.arguments(case.logits.view_NV))
        case.check(case.logits.view_NV)

    def test_a_rank_of_padding_alone_gets_zeros(self, kernels: EmulatedKernels) -> None:
        case = cases.gradient_case(4, 40, torch.float16, padding=40)
        kernels.logits_backward_(*case.arguments(case.logits.view_NV))
        assert torch.equal(case.logits.view_NV, torch.zeros(6, 40, dtype=torch.float16))

    def test_nan_in_the_logits_does_not_reach_a_token_without_gradient(
        self, kernels: EmulatedKernels
    ) -> None:
        logits_NV = torch.full((2, 40), math.nan, dtype=torch.bfloat16)
        ones_T, zeros_T = torch.ones(2), torch.zeros(2)
        nan_T = torch.full((2,), math.nan)
        target_T = torch.tensor([1, 2])
        grad_T = torch.tensor([0.0, 1.0])
        kernels.logits_backward_(
            logits_NV, None, target_T, nan_T, nan_T, ones_T, grad_T, zeros_T, 0, 40, 1.0
        )
        assert torch.equal(logits_NV[0], torch.zeros(40, dtype=torch.bfloat16))
        assert bool(logits_NV[1].isnan().all())

    def test_a_column_of_minus_infinity_gets_zero(self, kernels: EmulatedKernels) -> None:
        # Two equal logits among -inf: p is 1/2 twice, the entropy is log 2 and its gradient 0.
        logits_NV = torch.full((1, 40), -math.inf)
        logits_NV[0, [6, 21]] = 3.0
        log_two_T = torch.full((1,), math.log(2.0))
        kernels.logits_backward_(
            logits_NV,
            None,
            torch.tensor([6]),
            torch.full((1,), 3.0),
            log_two_T,
            log_two_T,
            torch.ones(1),
            torch.ones(1),
            0,
            40,
            1.0,
        )
        expected_NV = torch.zeros(1, 40)
        expected_NV[0, 6], expected_NV[0, 21] = 0.5, -0.5
        torch.testing.assert_close(logits_NV, expected_NV, rtol=0, atol=2e-7)

    def test_no_gradient_at_all_gives_zeros(self, kernels: EmulatedKernels) -> None:
        case = cases.strided_logits(3, 40, torch.float32)
        values_T = torch.ones(3)
        kernels.logits_backward_(
            case.view_NV, None, torch.tensor([1, 2, 3]), *[values_T] * 3, None, None, 0, 40, 1.0
        )
        assert torch.equal(case.view_NV, torch.zeros(3, 40))

    @pytest.mark.parametrize("order", ORDERS)
    def test_a_row_of_several_tokens_becomes_nan_and_its_neighbours_do_not(
        self, kernels: EmulatedKernels, order: int
    ) -> None:
        kernels.set_order(order)
        logits_NV = torch.zeros(5, 40, dtype=torch.bfloat16)
        rows_T = torch.tensor([4, 1, 4, 1 << 40, -1, 2, 4, 1])
        values_T = torch.zeros(8)
        log_sum_T = torch.full((8,), math.log(40.0))
        kernels.logits_backward_(
            logits_NV,
            rows_T,
            torch.full((8,), 7),
            values_T,
            log_sum_T,
            log_sum_T,
            torch.ones(8),
            None,
            0,
            36,
            1.0,
        )
        assert logits_NV[:, :36].isnan().all(dim=1).tolist() == [False, True, False, False, True]
        assert logits_NV[:, 36:].eq(0).all()
        expected = torch.full((36,), -1 / 40)
        expected[7] += 1
        assert torch.equal(logits_NV[2, :36], expected.bfloat16())
        assert logits_NV[[0, 3]].eq(0).all()
