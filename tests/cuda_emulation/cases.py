"""Inputs and float64 oracles shared by the tests of the CUDA kernels, emulated and on a device.

Shape legend: N = rows of logits, V = local columns, T = tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a unit in the last place, relative.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Half of the smallest subnormal.
UNDERFLOW = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}


@dataclass(frozen=True)
class StridedLogits:
    """Logits inside a larger buffer of NaN: a read outside shows in results, a write here."""

    buffer: Tensor
    shape: tuple[int, int]
    row_stride: int
    offset: int

    @property
    def view_NV(self) -> Tensor:
        return self.buffer.as_strided(self.shape, (self.row_stride, 1), self.offset)

    def border_is_intact(self) -> bool:
        inside = torch.zeros(len(self.buffer), dtype=torch.bool, device=self.buffer.device)
        inside.as_strided(self.shape, (self.row_stride, 1), self.offset).fill_(True)
        return bool(self.buffer[~inside].isnan().all())

    def to(self, device: str) -> StridedLogits:
        return StridedLogits(self.buffer.to(device), self.shape, self.row_stride, self.offset)


def strided_logits(
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    *,
    gap: int = 0,
    offset: int = 0,
    seed: int = 0,
) -> StridedLogits:
    """Normal logits of spread 4, ``gap`` elements between rows, 16 + ``offset`` before them."""
    row_stride = num_columns + gap
    buffer = torch.full((16 + offset + num_rows * row_stride + 16,), torch.nan, dtype=dtype)
    case = StridedLogits(buffer, (num_rows, num_columns), row_stride, 16 + offset)
    generator = torch.Generator().manual_seed(seed)
    case.view_NV.copy_(4 * torch.randn(num_rows, num_columns, generator=generator))
    return case


def random_targets(num_tokens: int, vocab_size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator)


def expected_partials(
    logits_NV: Tensor,
    rows_T: Tensor | None,
    target_T: Tensor,
    vocab_start: int,
    vocab_size: int,
    temperature: float,
) -> Tensor:
    """[T, 4] float64: max, Σe^d, Σe^d·d and the target's logit; d = (x - max) / temperature."""
    num_true = max(0, min(vocab_size - vocab_start, logits_NV.shape[1]))
    rows = torch.arange(len(target_T)) if rows_T is None else rows_T
    out = torch.zeros(len(target_T), 4, dtype=torch.float64)
    for token, (row, target) in enumerate(zip(rows.tolist(), target_T.tolist(), strict=True)):
        x = logits_NV[row, :num_true].double()
        if 0 <= target - vocab_start < num_true:
            out[token, 3] = x[target - vocab_start]
        if len(x) == 0 or bool((x == -torch.inf).all()):
            out[token, 0] = -torch.inf
        elif bool(x.isnan().any()) or bool((x == torch.inf).any()):
            out[token, :3] = torch.nan
        else:
            d = (x - x.max()) / temperature
            weighted = torch.where(d == -torch.inf, 0.0, d.exp() * d)
            out[token, :3] = torch.stack([x.max(), d.exp().sum(), weighted.sum()])
    return out


def assert_partials(actual_T4: Tensor, expected_T4: Tensor) -> None:
    """Maximum and target are raw logits: exact."""
    actual_T4, expected_T4 = actual_T4.double(), expected_T4.double()
    # 16 ε: exponentials are off by up to two, and each lane adds its own.
    tolerances = ((0.0, 0.0), (2e-6, 0.0), (2e-6, 2e-7), (0.0, 0.0))
    for column, (rtol, atol) in enumerate(tolerances):
        torch.testing.assert_close(
            actual_T4[:, column], expected_T4[:, column], rtol=rtol, atol=atol, equal_nan=True
        )


@dataclass(frozen=True)
class TokenValues:
    """What the combination must give, [T] float64."""

    logprob_T: Tensor
    entropy_T: Tensor
    max_T: Tensor
    log_sum_T: Tensor


def expected_tokens(logits_TV: Tensor, target_T: Tensor, temperature: float) -> TokenValues:
    """Log-prob and entropy over a whole vocabulary without padding."""
    max_T = logits_TV.double().amax(dim=1)
    scaled_TV = (logits_TV.double() - max_T[:, None]) / temperature
    log_p_TV = scaled_TV.log_softmax(dim=1)
    entropy_T = -torch.where(log_p_TV == -torch.inf, 0.0, log_p_TV.exp() * log_p_TV).sum(dim=1)
    logprob_T = log_p_TV.gather(1, target_T[:, None]).squeeze(1)
    return TokenValues(logprob_T, entropy_T, max_T, scaled_TV.exp().sum(dim=1).log())


@dataclass(frozen=True)
class GradientCase:
    """One rank's backward: arguments of the kernel, and what it must leave behind."""

    logits: StridedLogits
    rows_T: Tensor | None
    target_T: Tensor
    tokens: TokenValues
    grad_logprob_T: Tensor | None
    grad_entropy_T: Tensor | None
    vocab_start: int
    vocab_size: int
    temperature: float
    gradient_NV: Tensor  # float64
    tolerance_NV: Tensor  # one rounding of the output and the error of a float32 exponential

    def arguments(self, logits_NV: Tensor) -> tuple[object, ...]:
        """Arguments of ``logits_backward_``, on the device of the logits."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(logits_NV.device)

        values = (self.tokens.max_T, self.tokens.log_sum_T, self.tokens.entropy_T)
        tensors = (self.rows_T, self.target_T, *(value.float() for value in values))
        grads = (self.grad_logprob_T, self.grad_entropy_T)
        scalars = (self.vocab_start, self.vocab_size, self.temperature)
        return (logits_NV, *map(move, (*tensors, *grads)), *scalars)

    def check(self, logits_NV: Tensor) -> None:
        error_NV = (logits_NV.cpu().double() - self.gradient_NV).abs()
        assert bool((error_NV <= self.tolerance_NV).all()), (error_NV - self.tolerance_NV).max()


def gradient_case(
    num_tokens: int,
    num_columns: int,
    dtype: torch.dtype,
    *,
    spare_rows: int = 2,
    padding: int = 0,
    gap: int = 0,
    offset: int = 0,
    temperature: float = 1.0,
    with_rows: bool = True,
    with_entropy: bool = True,
    seed: int = 0,
) -> GradientCase:
    """A rank that holds columns 3 to 3 + V - padding of a vocabulary that ends with it."""
    num_rows = num_tokens + spare_rows
    case = strided_logits(num_rows, num_columns, dtype, gap=gap, offset=offset, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    vocab_start, num_true = 3, num_columns - padding
    vocab_size = vocab_start + num_true
    case.view_NV[:, num_true:] = torch.nan
    before_N3 = torch.randn(num_rows, vocab_start, generator=generator).to(dtype)
    whole_NV = torch.cat([before_N3, case.view_NV[:, :num_true]], dim=1).double()
    chosen_T = torch.randperm(num_rows, generator=generator)[:num_tokens]
    rows_T = chosen_T if with_rows else torch.arange(num_tokens)
    target_T = random_targets(num_tokens, vocab_size, seed)
    tokens = expected_tokens(whole_NV[rows_T], target_T, temperature)
    grad_logprob_T = torch.randn(num_tokens, generator=generator)
    grad_entropy_T = torch.randn(num_tokens, generator=generator)

    log_p_TV = (whole_NV[rows_T] - tokens.max_T[:, None]) / temperature - tokens.log_sum_T[:, None]
    p_TV = log_p_TV.exp()
    is_target_TV = torch.zeros_like(p_TV).scatter_(1, target_T[:, None], 1.0)
    by_logprob_TV = grad_logprob_T[:, None] * (is_target_TV - p_TV) / temperature
    surprise_TV = log_p_TV + tokens.entropy_T[:, None]
    by_entropy_TV = -grad_entropy_T[:, None] * p_TV * surprise_TV / temperature
    gradient_TV = by_logprob_TV + (by_entropy_TV if with_entropy else 0.0)
    size_TV = p_TV * grad_logprob_T[:, None].abs()
    size_TV = size_TV + p_TV * (log_p_TV.abs() + tokens.entropy_T[:, None]) * (
        grad_entropy_T[:, None].abs() if with_entropy else 0.0
    )
    float32_TV = 1e-5 * size_TV + 2.0**-23 * is_target_TV * grad_logprob_T[:, None].abs()

    gradient_NV = torch.zeros(num_rows, num_columns, dtype=torch.float64)
    gradient_NV[rows_T, :num_true] = gradient_TV[:, vocab_start:]
    tolerance_NV = torch.zeros_like(gradient_NV)
    tolerance_NV[rows_T, :num_true] = (float32_TV / temperature)[:, vocab_start:]
    tolerance_NV += (tolerance_NV + gradient_NV.abs()) * ROUNDING[dtype]
    tolerance_NV[rows_T, :num_true] += UNDERFLOW[dtype] + 2.0**-126  # the exponential flushes to 0
    return GradientCase(
        logits=case,
        rows_T=rows_T if with_rows else None,
        target_T=target_T,
        tokens=tokens,
        grad_logprob_T=grad_logprob_T,
        grad_entropy_T=grad_entropy_T if with_entropy else None,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        temperature=temperature,
        gradient_NV=gradient_NV,
        tolerance_NV=tolerance_NV,
    )
