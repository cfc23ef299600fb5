"""The CUDA kernels of the KL divergence against float64: by the emulator, and on a device.

Shape legend: T = tokens, V = local columns, P = tensor-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda_emulation import cases
from tests.cuda_emulation.launchers import EmulatedKernels
from tests.ops.kernel_calls import random_targets
from tests.oracles.kl import kl_divergence, kl_logits_gradient

DIRECTIONS = ["reverse", "forward"]
needs_device = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@dataclass(frozen=True)
class Runner:
    """Calls of the kernels on CPU tensors; results come back to the CPU."""

    partials: Callable[..., Tensor]
    kl_partials: Callable[..., Tensor]
    kl_combine: Callable[..., tuple[Tensor, ...]]
    kl_backward_: Callable[..., None]


@pytest.fixture(params=["emulated", pytest.param("device", marks=needs_device)])
def runner(request: pytest.FixtureRequest) -> Runner:
    if request.param == "emulated":
        kernels: EmulatedKernels = request.getfixturevalue("kernels")
        return Runner(
            kernels.logprob_partials,
            kernels.kl_partials,
            kernels.kl_combine,
            kernels.kl_backward_,
        )
    ops = torch.ops.bapo

    def on_device(op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: object) -> Any:
            moved = [_on_cuda(x) if isinstance(x, Tensor) else x for x in arguments]
            result = op(*moved)
            if result is None:  # the first argument has been overwritten
                arguments[0].copy_(moved[0])  # type: ignore[attr-defined]
                return None
            return result.cpu() if isinstance(result, Tensor) else tuple(x.cpu() for x in result)

        return run

    calls = (ops.logprob_partials, ops.kl_partials, ops.kl_combine, ops.kl_backward_)
    return Runner(*map(on_device, calls))


def _on_cuda(tensor: Tensor) -> Tensor:
    """A copy with the same strides and the same offset from a boundary of 16 bytes."""
    if tensor.dim() < 2:
        return tensor.cuda()
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    whole = tensor.as_strided((size,), (1,), 0).cuda()
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def make_rows(
    num_tokens: int, columns: int, dtype: torch.dtype, *, gap: int, offset: int
) -> tuple[cases.StridedLogits, cases.StridedLogits]:
    """Student and teacher, both inside NaN; the teacher's rows have another stride."""
    student = cases.strided_logits(num_tokens, columns, dtype, gap=gap, offset=1, seed=1)
    return student, cases.strided_logits(
        num_tokens, columns, dtype, gap=gap + 1, offset=offset, seed=2
    )


def assert_close(actual_T: Tensor, expected_T: Tensor, tolerance: float) -> None:
    error_T = (actual_T.double() - expected_T).abs()
    assert bool((error_T <= tolerance * expected_T.abs().clamp(min=1.0)).all()), error_T.max()


def assert_gradient(actual_TV: Tensor, *problem: Any) -> None:
    student_TV, teacher_TV, *_ = problem
    exact = kl_logits_gradient(*problem)
    log_TV = torch.maximum(
        *((x.double() / problem[-1]).log_softmax(1).abs() for x in (student_TV, teacher_TV))
    )
    dtype = actual_TV.dtype
    slack_TV = 2e-6 * log_TV.clamp(1.0, 200.0) * exact.term_size_TV + 2.0**-110
    slack_TV += (slack_TV + exact.gradient_TV.abs()) * cases.ROUNDING[dtype] + cases.UNDERFLOW[
        dtype
    ]
    assert bool(((actual_TV.double() - exact.gradient_TV).abs() <= slack_TV).all())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("offset", [1, 2])
@pytest.mark.parametrize("columns", [1, 3, 15, 17, 1025, 21003])
def test_value_and_gradient_match_float64_on_rows_of_any_alignment(
    runner: Runner, columns: int, offset: int, dtype: torch.dtype, direction: str
) -> None:
    # 9 rows of an odd and an even stride: the two are aligned alike, and they are not.
    num_tokens = 9 if columns < 20 else 2
    student, teacher = make_rows(num_tokens, columns, dtype, gap=1 - columns % 2, offset=offset)
    num_true = columns - columns // 9
    for rows in (student, teacher):
        rows.view_NV[:, num_true:] = torch.nan
    before_TV, teacher_TV = student.view_NV[:, :num_true].clone(), teacher.view_NV[:, :num_true]
    target_T = random_targets(num_tokens, num_true)
    where = (5, 5 + num_true, 0.6)
    rows = (student.view_NV, teacher.view_NV, target_T + 5)

    part_T8 = runner.kl_partials(*rows, *where, direction)
    assert torch.equal(part_T8[:, :4], runner.partials(student.view_NV, None, target_T + 5, *where))
    results = runner.kl_combine(part_T8[None], 0.6, direction)
    assert_close(results[-1], kl_divergence(before_TV, teacher_TV, direction, 0.6), 1e-6)
    tokens = cases.expected_tokens(before_TV, target_T, 0.6)
    for result_T, expected_T in zip(
        results, (tokens.logprob_T, tokens.entropy_T, tokens.max_T, tokens.log_sum_T), strict=False
    ):
        assert_close(result_T, expected_T, 2e-6)

    generator = torch.Generator().manual_seed(0)
    grads = tuple(torch.randn(3, num_tokens, generator=generator).unbind())
    _, entropy_T, max_T, log_sum_T, *others = results
    runner.kl_backward_(*rows, max_T, log_sum_T, entropy_T, *others, *grads, *where, direction)
    problem = (before_TV, teacher_TV, target_T, grads, direction, 0.6)
    assert_gradient(student.view_NV[:, :num_true], *problem)
    assert not student.view_NV[:, num_true:].any()
    assert student.border_is_intact()
    assert teacher.border_is_intact()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("columns", [40, 21001])
def test_equal_rows_have_a_divergence_and_gradient_of_exactly_zero(
    runner: Runner, columns: int, direction: str
) -> None:
    student, _ = make_rows(3, columns, torch.bfloat16, gap=1, offset=1)
    teacher_TV = student.view_NV.clone()
    student.view_NV[2, ::3] = teacher_TV[2, ::3] = -math.inf
    target_T, where = random_targets(3, columns), (0, columns, 0.6, direction)
    part_T8 = runner.kl_partials(student.view_NV, teacher_TV, target_T, *where)
    _, entropy_T, max_T, log_sum_T, *others = runner.kl_combine(part_T8[None], 0.6, direction)
    assert others[-1].tolist() == [0.0] * 3
    numbers = (max_T, log_sum_T, entropy_T, *others)
    grads = (None, None, torch.ones(3))
    runner.kl_backward_(student.view_NV, teacher_TV, target_T, *numbers, *grads, *where)
    assert not student.view_NV.any()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ranks_merge_with_impossible_columns_of_either_row(runner: Runner, direction: str) -> None:
    student, teacher = make_rows(6, 64, torch.float32, gap=1, offset=0)
    student_TV, teacher_TV = student.view_NV, teacher.view_NV
    student_TV[0, :32], teacher_TV[1, :32] = -math.inf, -math.inf  # of a whole rank
    student_TV[2, ::2], teacher_TV[3, 1::2] = -math.inf, -math.inf
    target_T = torch.tensor([40, 3, 5, 60, 31, 32])
    parts = [
        runner.kl_partials(
            student_TV[:, start : start + 32],
            teacher_TV[:, start : start + 32],
            target_T,
            start,
            64,
            1.7,
            direction,
        )
        for start in (0, 32)
    ]
    kl_T = runner.kl_combine(torch.stack(parts), 1.7, direction)[-1]
    assert_close(kl_T, kl_divergence(student_TV, teacher_TV, direction, 1.7), 1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("bad_row", [0, 1])
def test_a_bad_logit_poisons_its_token_and_a_zero_gradient_stops_it(
    runner: Runner, bad_row: int, bad: float, direction: str
) -> None:
    rows = make_rows(4, 100, torch.float16, gap=3, offset=1)
    rows[bad_row].view_NV[1, 33] = rows[bad_row].view_NV[2, 99] = bad
    pair, target_T = [row.view_NV for row in rows], torch.tensor([3, 4, 5, 6])
    where = (0, 100, 1.0, direction)
    part_T8 = runner.kl_partials(*pair, target_T, *where)
    results = runner.kl_combine(part_T8[None], 1.0, direction)
    for result_T in results:
        assert result_T.isnan().tolist() == [False, True, True, False]
    _, entropy_T, max_T, log_sum_T, *others = results
    numbers = (max_T, log_sum_T, entropy_T, *others)
    grads = (None, torch.zeros(4), torch.tensor([1.0, 1.0, 0.0, 1.0]))
    runner.kl_backward_(*pair, target_T, *numbers, *grads, *where)
    assert pair[0].isnan().all(dim=1).tolist() == [False, True, False, False]
    assert not pair[0][2].any()
    assert pair[0][[0, 3]].isfinite().all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_edge_numbers_of_tokens_and_targets_out_of_range(
    runner: Runner, num_tokens: int, direction: str
) -> None:
    pair = [row.view_NV for row in make_rows(num_tokens, 50, torch.bfloat16, gap=1, offset=0)]
    target_T = random_targets(num_tokens, 50)
    target_T[1:3] = torch.tensor([-1, 50])[: max(num_tokens - 1, 0)]
    part_T8 = runner.kl_partials(*pair, target_T, 0, 50, 1.0, direction)
    outside_T = (target_T < 0) | (target_T >= 50)
    assert torch.equal(part_T8.isnan().all(dim=1), outside_T)
    kl_T = runner.kl_combine(part_T8[None], 1.0, direction)[-1]
    expected_T = kl_divergence(*pair, direction)
    assert_close(kl_T[~outside_T], expected_T[~outside_T], 1e-6)
    assert bool(kl_T[outside_T].isnan().all())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_order_of_threads_does_not_change_a_bit(
    kernels: EmulatedKernels, direction: str
) -> None:
    # Rows that rise in opposite directions: each of three pieces moves a reference.
    student, teacher = make_rows(2, 41001, torch.bfloat16, gap=0, offset=3)
    slope_V = torch.linspace(0, 1, 41001)
    student.view_NV.mul_(0.1).add_(slope_V)
    teacher.view_NV.mul_(0.1).sub_(slope_V)
    arguments = (student.view_NV, teacher.view_NV, torch.tensor([7, 40000]), 0, 41001, 0.9)
    expected_T8 = kernels.kl_partials(*arguments, direction)
    kl_T = kernels.kl_combine(expected_T8[None], 0.9, direction)[-1]
    assert_close(kl_T, kl_divergence(student.view_NV, teacher.view_NV, direction, 0.9), 1e-6)
    for order in range(1, 5):
        kernels.set_order(order)
        assert torch.equal(kernels.kl_partials(*arguments, direction), expected_T8)
