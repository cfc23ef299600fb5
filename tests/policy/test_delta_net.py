"""The twins of FLA's kernels against loops over tokens in float64.

Shape legend: N = packed tokens, H = heads, K and V = channels of a key and of a value, D = channels
of the convolution.
"""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from bapo_megatron.policy.mixers.delta_rule import causal_conv1d, chunk_gated_delta_rule, l2norm
from tests.tolerances import HEADROOM, assert_within

LENGTHS = [[1], [64], [65], [300], [2, 1, 1], [1, 63, 64, 65, 300, 2, 128, 129], [129, 300]]
HEADS, KEY, VALUE = 3, 8, 12
Rule = Callable[[list[Tensor]], Tensor]


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def recurrence(inputs: list[Tensor], lengths: list[int]) -> Tensor:
    """The rule, token by token."""
    query, key, value, g, beta = (tensor[0] for tensor in inputs)
    outputs = []
    for start, end in pairwise(ends(lengths).tolist()):
        state_HKV = query.new_zeros(HEADS, KEY, VALUE)
        for n in range(start, end):
            state_HKV = g[n].exp()[:, None, None] * state_HKV
            error_HV = value[n] - (key[n][:, :, None] * state_HKV).sum(dim=1)
            state_HKV = state_HKV + key[n][:, :, None] * (beta[n][:, None] * error_HV)[:, None]
            outputs.append((query[n][:, :, None] * state_HKV).sum(dim=1) / KEY**0.5)
    return torch.stack(outputs)[None]


def run(rule: Rule, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients."""
    leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in inputs]
    output = rule(leaves)
    (output * torch.linspace(-1, 1, output.numel()).view(output.shape).to(dtype)).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def relative_errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    pairs = zip(actual, expected, strict=True)
    # The decay of a sequence's first token has gradient 0.
    return [float((x - exact).norm() / exact.norm().clamp(min=1e-30)) for x, exact in pairs]


def check_twin(twin: Rule, recurrence: Rule, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """Outputs and gradients of both are equal, up to errors of the recurrence in ``dtype``."""
    expected, actual = run(recurrence, inputs, torch.float64), run(twin, inputs, dtype)
    assert len(actual) == 1 + len(inputs)
    bound = 1e-12
    if dtype is torch.float32:
        bound = HEADROOM * max(relative_errors(run(recurrence, inputs, dtype), expected))
    for error in relative_errors(actual, expected):
        assert_within(error, bound)
    assert all(tensor.dtype is dtype for tensor in actual)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("slowness", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_outputs_and_gradients_are_those_of_the_recurrence(
    lengths: list[int], slowness: float, dtype: torch.dtype
) -> None:
    generator, count = torch.Generator().manual_seed(0), sum(lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, count, *shape, generator=generator, dtype=torch.float64)

    decay, beta = -slowness * draw(HEADS).abs(), draw(HEADS).sigmoid()
    inputs = [l2norm(draw(HEADS, KEY)), l2norm(draw(HEADS, KEY)), draw(HEADS, VALUE), decay, beta]

    def twin(tensors: list[Tensor]) -> Tensor:
        query, key, value, g, beta = tensors
        return chunk_gated_delta_rule(
            query,
            key,
            value,
            g=g,
            beta=beta,
            cu_seqlens=ends(lengths),
            use_qk_l2norm_in_kernel=False,
        )[0]

    check_twin(twin, lambda tensors: recurrence(tensors, lengths), inputs, dtype)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_convolution_sees_the_last_tokens_of_its_sequence_alone(lengths: list[int]) -> None:
    generator, width, channels = torch.Generator().manual_seed(0), 4, 5
    drawn = torch.randn(sum(lengths) + channels, channels, generator=generator).double()
    weight, rows_ND = drawn[:channels, :width].clone(), drawn[channels:][None]

    def loop(tensors: list[Tensor]) -> Tensor:
        rows, weight = tensors
        outputs = []
        for start, end in pairwise(ends(lengths).tolist()):
            for n in range(start, end):
                seen = range(max(start, n - width + 1), n + 1)
                total = torch.stack([weight[:, width - 1 - (n - m)] * rows[0, m] for m in seen])
                outputs.append(total.sum(dim=0) * total.sum(dim=0).sigmoid())
        return torch.stack(outputs)[None]

    def twin(tensors: list[Tensor]) -> Tensor:
        return causal_conv1d(
            tensors[0], tensors[1], cu_seqlens=ends(lengths), bias=None, activation="silu"
        )[0]

    expected = run(loop, [rows_ND, weight], torch.float64)
    for ours, theirs in zip(run(twin, [rows_ND, weight], torch.float64), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
