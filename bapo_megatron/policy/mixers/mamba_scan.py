"""Mamba-2: Megatron's module, and PyTorch twins of the kernels that it takes from mamba-ssm.

Per head a state S [K, V] decays and is written and read (Dao and Gu 2024, arXiv 2405.21060), with
the step Δ = softplus(dt + bias) of each token, and B and C [K] that the heads of a group share:

    S ← exp(−exp(A_log) Δ) S + B (Δ x)ᵀ,   o = Sᵀ C + D x

Chunks are those of ``delta_rule``, whose legend this file shares; G = groups of heads.
"""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from bapo_megatron.data.micro_batch import context_positions
from bapo_megatron.policy.local_layers import DividedByRank, PackedSequences
from bapo_megatron.policy.mixers.delta_rule import (
    causal_conv1d,
    chunk_places,
    decays,
    in_chunks,
    wide_dtype,
)


class PackedMambaMixer(mamba_mixer.MambaMixer):
    """Megatron's, in the place of attention."""

    def __init__(
        self, config: TransformerConfig, *, cp_comm_type: str | None = None, **options: Any
    ) -> None:
        super().__init__(config, **options)
        self.norm.eps = config.layernorm_epsilon

    def forward(
        self, hidden: Tensor, *args: Any, packed_seq_params: PackedSequences, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return its output, and no bias."""
        cu_seqlens = packed_seq_params.cu_seqlens_q
        token_N = torch.arange(sum(packed_seq_params.lengths), device=hidden.device)
        seq_idx = torch.bucketize(token_N, cu_seqlens[1:], out_int32=True, right=True)[None]
        packed: Any = replace(packed_seq_params, seq_idx=seq_idx)  # type: ignore[call-arg]
        return super().forward(hidden, packed_seq_params=packed)


def use_twins() -> None:
    """Have Megatron use the twins, in every model of this process."""
    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = GroupedRMSNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = mamba_split_conv1d_scan_combined
    mamba_mixer._check_mamba_sequence_packing_support = lambda **_: (True, None)
    kernels = SimpleNamespace(thd_get_partitioned_indices=_tokens_of_rank)
    mamba_context_parallel.tex = kernels
    mamba_context_parallel.is_te_min_version = lambda *_: True


class GroupedRMSNorm(DividedByRank):
    """RMSNorm of each group of channels, in place of Megatron's ``ExtendedRMSNorm``."""

    def __init__(
        self, hidden_size: int, eps: float, group_size: int, dtype: torch.dtype, **options: Any
    ) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=options["device"]))

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise."""
        groups = F.rms_norm(
            hidden.unflatten(-1, (-1, self.group_size)), (self.group_size,), None, self.eps
        )
        return groups.flatten(-2) * self.weight


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    a_H: Tensor,
    *,
    D: Tensor,
    headdim: int,
    ngroups: int,
    seq_idx: Tensor,
    **options: Any,
) -> Tensor:
    """Convolve x, B and C, scan, and multiply by SiLU of z; the kernel's twin.

    ``zxbcdt`` are the projections [1, N, …] in this order, ``seq_idx`` [1, N] the sequence of each
    token; ``options`` are what Megatron leaves at the kernel's defaults.
    """
    num_channels, inner = len(conv1d_weight), len(a_H) * headdim
    z, convolved, dt = zxbcdt.split([inner, num_channels, len(a_H)], dim=-1)
    cu_seqlens = F.pad(seq_idx[0].bincount().cumsum(0), (1, 0))
    xbc, _ = causal_conv1d(convolved, conv1d_weight, cu_seqlens=cu_seqlens, bias=conv1d_bias)
    x, b, c = xbc.split([inner, *[(num_channels - inner) // 2] * 2], dim=-1)
    step = F.softplus(dt.to(wide_dtype(dt)) + dt_bias)
    x, b, c = x.unflatten(-1, (-1, headdim)), *(p.unflatten(-1, (ngroups, -1)) for p in (b, c))
    output = scan(x * step[..., None], a_H * step, b, c, cu_seqlens) + D[:, None] * x
    return output.to(x.dtype).flatten(-2) * F.silu(z)


def scan(written: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Scan each sequence of a packed batch, from a state of zeros.

    ``written`` is Δ x [1, N, H, V], ``log_decay`` at most 0 [1, N, H]; ``b`` and ``c`` are
    [1, N, G, K]. Returns Sᵀ C [1, N, H, V] in float32, or float64 if that is ``written``'s.
    """
    place_N, chunks_of_step = chunk_places(cu_seqlens)
    written_CHJV, log_CHJ, b_CGJK, c_CGJK = (
        in_chunks(rows, place_N, sum(chunks_of_step), wide_dtype(written))
        for rows in (written, log_decay, b, c)
    )
    between_CHJJ, since_start_CHJ1, to_end_CHJ1 = decays(log_CHJ)

    def of_heads(groups: Tensor) -> Tensor:
        return groups.repeat_interleave(written.shape[2] // b.shape[2], dim=1)

    reads = of_heads(c_CGJK) * since_start_CHJ1
    writes = (of_heads(b_CGJK) * to_end_CHJ1).transpose(-1, -2) @ written_CHJV
    state, from_state = torch.zeros_like(writes[: chunks_of_step[0]]), []
    # Step n has the n-th chunk of every sequence that is long enough, the longest first.
    wholes = (reads, writes, since_start_CHJ1[..., -1:, :])
    parts = (tensor.split(chunks_of_step) for tensor in wholes)
    for reads_n, writes_n, decay_n in zip(*parts, strict=True):
        state = state[: len(reads_n)]
        from_state.append(reads_n @ state)
        state = state * decay_n + writes_n
    within = of_heads(c_CGJK @ b_CGJK.transpose(-1, -2)) * between_CHJJ
    output_CHJV = torch.cat(from_state) + within @ written_CHJV
    return output_CHJV.transpose(1, 2).flatten(0, 1)[place_N][None]


def _tokens_of_rank(cu_seqlens: Tensor, num_tokens: int, size: int, rank: int) -> Tensor:
    """Return which tokens a context-parallel rank has: two chunks of each sequence."""
    spans = pairwise(cu_seqlens.tolist())
    parts = [start + context_positions(end - start, rank, size) for start, end in spans]
    return torch.from_numpy(np.concatenate(parts)).int().to(cu_seqlens.device)
