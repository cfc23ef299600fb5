"""The backward CUDA kernel over logits, run by the emulator, against float64.

Shape legend: N = rows of logits, V = local columns, T = tokens, P = tensor-parallel ranks.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.cuda_emulation import cases
from tests.cuda_emulation.launchers import EmulatedKernels

EDGE_TOKENS = (0, 1, 31, 32, 33)
ORDERS = (0, 1, 7)


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
