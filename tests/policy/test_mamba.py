"""The twins of mamba-ssm's kernels against loops over tokens in float64.

Shape legend: N = packed tokens, H = heads, G = groups of heads, K and V = channels of B and C and
of x.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_megatron.policy.mixers.base import Share
from bapo_megatron.policy.mixers.mamba import Mamba
from bapo_megatron.policy.mixers.mamba_scan import GroupedRMSNorm, mamba_split_conv1d_scan_combined
from tests.policy.test_delta_net import check_twin, ends

LENGTHS = [[1], [64], [65], [2, 1, 1], [1, 63, 64, 65, 300, 2, 128, 129]]
HEADS, GROUPS, KEY, VALUE, WIDTH = 6, 2, 8, 5, 4
INNER = HEADS * VALUE
CHANNELS = INNER + 2 * GROUPS * KEY


def draw(lengths: list[int], slowness: float) -> list[Tensor]:
    """Projection, weight and bias of the convolution, bias of Δ, A and D."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(lengths), INNER + CHANNELS + HEADS), (CHANNELS, WIDTH), (CHANNELS,))
    drawn = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in (*shapes, (HEADS,), (HEADS,), (HEADS,))
    ]
    drawn[0] = drawn[0][None]
    drawn[4] = -slowness * drawn[4].abs()
    return drawn


def recurrence(inputs: list[Tensor], lengths: list[int]) -> Tensor:
    """One token after the other."""
    projected, weight, bias, dt_bias, decay_H, skip_H = inputs
    outputs = []
    for start, end in pairwise(ends(lengths).tolist()):
        state_HKV = projected.new_zeros(HEADS, KEY, VALUE)
        z, convolved, dt = projected[0, start:end].split([INNER, CHANNELS, HEADS], dim=-1)
        for n in range(end - start):
            seen = range(max(0, n - WIDTH + 1), n + 1)
            total = bias + sum(weight[:, WIDTH - 1 - (n - m)] * convolved[m] for m in seen)
            x, b, c = F.silu(total).split([INNER, GROUPS * KEY, GROUPS * KEY])
            x_HV, step_H = x.view(HEADS, VALUE), F.softplus(dt[n] + dt_bias)
            b_HK, c_HK = (
                part.view(GROUPS, KEY).repeat_interleave(HEADS // GROUPS, dim=0) for part in (b, c)
            )
            state_HKV = (decay_H * step_H).exp()[:, None, None] * state_HKV
            state_HKV = state_HKV + b_HK[:, :, None] * (step_H[:, None] * x_HV)[:, None]
            output_HV = (c_HK[:, :, None] * state_HKV).sum(dim=1) + skip_H[:, None] * x_HV
            outputs.append(output_HV.flatten() * F.silu(z[n]))
    return torch.stack(outputs)[None]


def twin(inputs: list[Tensor], lengths: list[int]) -> Tensor:
    projected, weight, bias, dt_bias, decay_H, skip_H = inputs
    sequence_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return mamba_split_conv1d_scan_combined(
        projected,
        weight,
        bias,
        dt_bias,
        decay_H,
        D=skip_H,
        headdim=VALUE,
        ngroups=GROUPS,
        seq_idx=sequence_N.int()[None],
        chunk_size=128,
        activation="silu",
        norm_before_gate=False,
    )


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("slowness", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_outputs_and_gradients_are_those_of_the_recurrence(
    lengths: list[int], slowness: float, dtype: torch.dtype
) -> None:
    check_twin(
        lambda tensors: twin(tensors, lengths),
        lambda tensors: recurrence(tensors, lengths),
        draw(lengths, slowness),
        dtype,
    )


def kept_bytes(dtype: torch.dtype, num_tokens: int) -> int:
    """Bytes that autograd keeps between the projections, without parameters."""
    projected, *parameters = (p.to(dtype) for p in draw([num_tokens], 1.0))
    norm = GroupedRMSNorm(INNER, 1e-5, INNER // GROUPS, dtype, device="cpu")
    output = torch.randn(3, INNER, dtype=dtype)
    leaves = [t.requires_grad_() for t in (*parameters, output)]
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scanned = twin([projected.requires_grad_() * 1, *parameters], [num_tokens])
        F.linear(norm(scanned), output)
    own = {p.untyped_storage().data_ptr() for p in (*leaves, norm.weight)}
    return sum(storage.nbytes() for place, storage in kept.items() if place not in own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plan_counts_what_autograd_keeps_of_whole_chunks(dtype: torch.dtype) -> None:
    hf: Any = SimpleNamespace()
    share = Share(hf, dtype.itemsize, 1, 1, 1, is_local=True, has_adapters=False)
    planned = Mamba(GROUPS, HEADS, KEY, VALUE, WIDTH).saved(share, is_recomputed=False)
    measured = kept_bytes(dtype, 1024) - kept_bytes(dtype, 512)
    assert measured == pytest.approx(512 * sum(planned.values()), rel=1e-3)
