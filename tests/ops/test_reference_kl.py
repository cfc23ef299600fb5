"""The reference kernels of the KL divergence in float64 against autograd, and beside the compiled.

Shape legend: T = tokens, V = columns.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bapo_megatron.ops import reference
from bapo_megatron.ops.backend import CPU_KERNELS, Kernels
from bapo_megatron.ops.reference import Direction
from tests.ops.kernel_calls import both_kernels, random_logits, random_targets
from tests.oracles.kl import kl_divergence, kl_logits_gradient
from tests.oracles.logprob import token_logprobs

DIRECTIONS: tuple[Direction, ...] = ("reverse", "forward")
GRADS = (torch.linspace(-1, 2, 9), torch.linspace(0.3, -0.1, 9), torch.linspace(2, -1, 9))
"""Of log-prob, entropy and KL."""


def rows_with_impossible_columns() -> tuple[Tensor, Tensor]:
    student_TV = random_logits(9, 61, torch.float32)
    teacher_TV = random_logits(9, 61, torch.float32, seed=1)
    student_TV[1, 5:30], teacher_TV[2, 10:40] = -torch.inf, -torch.inf
    return student_TV, teacher_TV


def run(
    kernels: Kernels, student_TV: Tensor, teacher_TV: Tensor, target_T: Tensor, direction: Direction
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Results and gradient over two ranks of 40 columns, of which the second has 19 of padding."""
    shards = []
    for rows_TV in (student_TV, teacher_TV):
        padded_TW = torch.full((len(rows_TV), 80), torch.nan, dtype=rows_TV.dtype)
        padded_TW[:, :61] = rows_TV
        shards.append(padded_TW.split(40, dim=1))
    parts = [
        kernels.kl_partials(*pair, target_T, start, 61, 0.7, direction)
        for start, *pair in zip((0, 40), *shards, strict=True)
    ]
    results = kernels.kl_combine(torch.stack(parts), 0.7, direction)
    _, entropy_T, max_T, log_sum_T, *others = results
    numbers = (max_T, log_sum_T, entropy_T, *others)
    grads = [grad_T.to(max_T.dtype) for grad_T in GRADS]
    gradient = []
    for start, student_TC, teacher_TC in zip((0, 40), *shards, strict=True):
        copy_TC = student_TC.clone()
        kernels.kl_backward_(
            copy_TC, teacher_TC, target_T, *numbers, *grads, start, 61, 0.7, direction
        )
        gradient.append(copy_TC)
    gradient_TW = torch.cat(gradient, dim=1)
    assert not gradient_TW[:, 61:].any()
    return results, gradient_TW[:, :61]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_reference_in_float64_is_exact(direction: Direction) -> None:
    student_TV, teacher_TV = (rows.double() for rows in rows_with_impossible_columns())
    target_T = random_targets(9, 5)
    (logprob_T, entropy_T, *_, kl_T), gradient_TV = run(
        reference.KERNELS, student_TV, teacher_TV, target_T, direction
    )
    expected = token_logprobs(student_TV, target_T, 0.7)
    values = (expected.logprob_T, expected.entropy_T)
    torch.testing.assert_close((logprob_T, entropy_T), values, rtol=1e-12, atol=1e-12)
    expected_T = kl_divergence(student_TV, teacher_TV, direction, 0.7)
    torch.testing.assert_close(kl_T, expected_T, rtol=1e-12, atol=1e-12)
    exact = kl_logits_gradient(student_TV, teacher_TV, target_T, GRADS, direction, 0.7)
    torch.testing.assert_close(gradient_TV, exact.gradient_TV, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_reference_in_float32_agrees_with_the_compiled_kernels(direction: Direction) -> None:
    rows = rows_with_impossible_columns()
    target_T = random_targets(9, 5)
    expected = run(reference.KERNELS, *rows, target_T, direction)
    actual = run(CPU_KERNELS, *rows, target_T, direction)
    torch.testing.assert_close(actual[0], expected[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=1e-5)


@both_kernels
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nan_of_a_row_poisons_its_token_and_zero_gradients_stop_it(
    kernels: Kernels, direction: Direction
) -> None:
    for bad_row in (0, 1):
        rows = rows_with_impossible_columns()
        rows[bad_row][4, 7] = torch.nan
        results, gradient_TV = run(kernels, *rows, random_targets(9, 5), direction)
        is_bad_T = torch.arange(9) == 4
        for result_T in results:
            assert torch.equal(result_T.isnan(), is_bad_T)
        assert torch.equal(gradient_TV.isnan().all(dim=1), is_bad_T)
        target_T, nan_T, zero_T = random_targets(9, 5), torch.full((9,), torch.nan), torch.zeros(9)
        kernels.kl_backward_(
            *rows, target_T, *[nan_T] * 6, None, zero_T, zero_T, 0, 61, 0.7, direction
        )
        assert not rows[0].any()


@both_kernels
def test_another_direction_is_refused(kernels: Kernels) -> None:
    rows_TV = torch.zeros(1, 61)
    other: Direction = "both"  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="direction must be reverse or forward, got 'both'"):
        kernels.kl_partials(rows_TV, rows_TV, torch.zeros(1, dtype=torch.int64), 0, 61, 1.0, other)
