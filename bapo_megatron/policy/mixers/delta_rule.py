"""Gated delta nets: Megatron's module, and PyTorch twins of the kernels that it takes from FLA.

Per head the rule reads, corrects and reads a state S [K, V] (Yang et al. 2024, arXiv 2412.06464),
with the decay exp(g) and the rate β of each token:

    S ← exp(g) S,   S ← S + k β (v − kᵀ S)ᵀ,   o = Sᵀ q / √K

Within a chunk of ``CHUNK`` tokens these are matrix products and one triangular system; S goes from
chunk to chunk. Sequences of a packed batch are computed at once, but for the steps of S.

Shape legend: N = packed tokens, L = padded tokens, H = heads, K and V = channels of a key and of a
value, D = channels of the convolution, W = width of its kernel, C = chunks of all sequences, J =
tokens of a chunk.
"""

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common, gdn
from torch import Tensor

CHUNK = 64
_EPS = 1e-6


class PackedGatedDeltaNet(GatedDeltaNet):
    """Megatron's, without its waiting for the device, and with exp(A) in float32, as engines do."""

    def _compute_g_and_beta(
        self, a_log: Tensor, dt_bias: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        rate = F.softplus(alpha.float() + dt_bias.float())
        return -a_log.float().exp() * rate, beta.sigmoid()

    def _resolve_cu_seqlens(self, padded: None, cu_seqlens: Tensor, *_: Any, **__: Any) -> Tensor:
        return cu_seqlens  # ``Model`` has checked it on the host


def use_twins() -> None:
    """Have Megatron use the twins, in every model of this process."""
    common.HAVE_FLA = True
    common.l2norm = l2norm
    gdn.causal_conv1d = causal_conv1d
    gdn.chunk_gated_delta_rule = chunk_gated_delta_rule


def l2norm(heads: Tensor) -> Tensor:
    """Divide the last dimension by its root of the sum of squares."""
    wide = heads.to(wide_dtype(heads))
    return (wide * (wide.square().sum(-1, keepdim=True) + _EPS).rsqrt()).to(heads.dtype)


def causal_conv1d(
    x: Tensor, weight: Tensor, *, cu_seqlens: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Convolve each channel with the W last tokens of its sequence, then SiLU.

    ``x`` is [1, N, D], ``weight`` [D, W]; as FLA's, with the options that Megatron sets.
    """
    width = weight.shape[1]
    # W − 1 zeros before each sequence, so that one convolution does not cross their borders.
    sequence_N, _ = positions(cu_seqlens)
    place_N = torch.arange(x.shape[1], device=x.device) + (sequence_N + 1) * (width - 1)
    padded_LD = x.new_zeros(x.shape[1] + (len(cu_seqlens) - 1) * (width - 1), x.shape[2])
    padded_LD = padded_LD.index_copy(0, place_N, x[0])
    output_DL = F.conv1d(padded_LD.t()[None], weight[:, None], bias, groups=len(weight))[0]
    return F.silu(output_DL.t()[place_N - (width - 1)])[None], None


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Apply the rule to each sequence of a packed batch, from a state of zeros.

    ``query`` and ``key`` are [1, N, H, K], ``value`` [1, N, H, V], ``beta`` and ``g``, the
    logarithm of the decay, at most 0, [1, N, H]. ``cu_seqlens`` has the ends of the sequences,
    after a 0; ``options`` are what Megatron leaves off.

    Returns:
        [1, N, H, V] in the query's type; computed in float32, or float64 if that is the query's.
    """
    place_N, chunks_of_step = chunk_places(cu_seqlens)
    dtype = wide_dtype(query)
    query_CHJK, key_CHJK, value_CHJV, beta_CHJ, g_CHJ = (
        in_chunks(rows, place_N, sum(chunks_of_step), dtype)
        for rows in (query, key, value, beta, g)
    )
    beta_CHJ1 = beta_CHJ[..., None]
    between_CHJJ, since_start_CHJ1, to_end_CHJ1 = decays(g_CHJ)
    # What each token writes, as if S were zero, and its reading of S: one unit triangular system.
    keys_CHKJ = key_CHJK.transpose(-1, -2)
    system_CHJJ = (beta_CHJ1 * key_CHJK) @ keys_CHKJ * between_CHJJ
    writes = beta_CHJ1 * torch.cat((value_CHJV, since_start_CHJ1 * key_CHJK), dim=-1)
    solved = torch.linalg.solve_triangular(system_CHJJ, writes, upper=False, unitriangular=True)
    written, read = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    scaled_CHJK = query_CHJK * key.shape[-1] ** -0.5
    queries, keys_CHKJ = scaled_CHJK * since_start_CHJ1, keys_CHKJ * to_end_CHJ1.transpose(-1, -2)
    whole_decay = since_start_CHJ1[..., -1:, :]
    state = query.new_zeros(
        chunks_of_step[0], query.shape[2], key.shape[-1], value.shape[-1], dtype=dtype
    )
    corrected, from_state = [], []
    # Step n has the n-th chunk of every sequence that is long enough, the longest first.
    wholes = (written, read, queries, keys_CHKJ, whole_decay)
    parts = (tensor.split(chunks_of_step) for tensor in wholes)
    for written_n, read_n, queries_n, keys_n, decay_n in zip(*parts, strict=True):
        state = state[: len(written_n)]
        corrected.append(written_n - read_n @ state)
        from_state.append(queries_n @ state)
        state = state * decay_n + keys_n @ corrected[-1]
    within = scaled_CHJK @ key_CHJK.transpose(-1, -2) * between_CHJJ
    output_CHJV = torch.cat(from_state) + within @ torch.cat(corrected)
    output = output_CHJV.transpose(1, 2).flatten(0, 1)[place_N]
    return output.to(query.dtype)[None], None


def in_chunks(rows: Tensor, place_N: Tensor, num_chunks: int, dtype: torch.dtype) -> Tensor:
    """[1, N, H, …] → [C, H, J, …], padded by zeros, which leave the state."""
    padded = rows.new_zeros(num_chunks * CHUNK, *rows.shape[2:], dtype=dtype)
    padded = padded.index_copy(0, place_N, rows[0].to(dtype))
    return padded.unflatten(0, (num_chunks, CHUNK)).transpose(1, 2)


def decays(log_CHJ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decay of S between tokens of a chunk, from before it, and to its end.

    ``log_CHJ`` are the logarithms of each token's decay. The first is [C, H, J, J] with zeros where
    the second token is later, the others are [C, H, J, 1].
    """
    # In float64: of sums over a chunk, which may be far below 0, only small differences matter.
    sum_CHJ, dtype = log_CHJ.double().cumsum(-1), log_CHJ.dtype
    is_later_JJ = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=log_CHJ.device).triu(1)
    between_CHJJ = (sum_CHJ[..., :, None] - sum_CHJ[..., None, :]).to(dtype)
    between_CHJJ = between_CHJJ.masked_fill(is_later_JJ, float("-inf")).exp()
    since_start_CHJ1, to_end_CHJ1 = (
        part.to(dtype).exp()[..., None] for part in (sum_CHJ, sum_CHJ[..., -1:] - sum_CHJ)
    )
    return between_CHJJ, since_start_CHJ1, to_end_CHJ1


def chunk_places(cu_seqlens: Tensor) -> tuple[Tensor, list[int]]:
    """Return each token's place among padded tokens, and how many chunks each step has.

    Chunks are ordered by step, and in a step by the length of their sequences, the longest first.
    """
    lengths, device = cu_seqlens.diff(), cu_seqlens.device
    longest_first = lengths.argsort(descending=True, stable=True)
    rank = torch.empty_like(longest_first)
    rank[longest_first] = torch.arange(len(lengths), device=device)
    chunks = (lengths + CHUNK - 1) // CHUNK
    chunks_of_step = [int((chunks > step).sum()) for step in range(int(chunks.max()))]
    first_of_step = torch.tensor([0, *accumulate(chunks_of_step[:-1])], device=device)
    sequence_N, position_N = positions(cu_seqlens)
    chunk_N = first_of_step[position_N // CHUNK] + rank[sequence_N]
    return chunk_N * CHUNK + position_N % CHUNK, chunks_of_step


def positions(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's sequence, and its place there."""
    lengths = cu_seqlens.diff()
    sequence_N = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    return sequence_N, torch.arange(len(sequence_N), device=lengths.device) - cu_seqlens[sequence_N]


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return float32, or float64 if that is the tensor's."""
    return torch.promote_types(tensor.dtype, torch.float32)
