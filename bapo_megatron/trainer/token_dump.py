"""Writes the tokens of whole updates for analysis outside the run: ``train.dump_tokens``.

Shape legend: T = response tokens of this rank, P = ranks of the data-parallel group.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from bapo_megatron.files import atomic_write_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from bapo_megatron.distributed import ProcessGroups
    from bapo_megatron.trainer.loss_stage import TokenReport
    from bapo_megatron.types import MicroBatch

COLUMNS = ("logprob", "behaviour_logprob", "advantage", "entropy", "mask")
"""One float32 per token each: ℓ and H of the loss pass, μ, A, m. ``bounds`` reads the file."""


class TokenDump:
    """Writes ``step_<n>_update_<m>.parquet`` with the tokens of all ranks of an update."""

    def __init__(self, directory: Path, every_steps: int) -> None:
        """Write nothing yet; the directory is created by the first dump."""
        self._directory = directory
        self._every_steps = every_steps

    def is_due(self, step: int) -> bool:
        """Whether the tokens of ``step`` are written: every N-th."""
        return self._every_steps > 0 and (step + 1) % self._every_steps == 0

    def write(
        self,
        tokens: Sequence[tuple[MicroBatch, TokenReport]],
        step: int,
        update: int,
        groups: ProcessGroups,
    ) -> None:
        """Gather an update's tokens over data- and context-parallel ranks; one rank writes them.

        A collective of the last stage's ranks; others return at once. Nothing is written for an
        update that was skipped. The first rank of the last stage writes: with a pipeline over
        several nodes, ``run_dir`` must be on a shared file system.

        Raises:
            OSError: The file cannot be written.
        """
        if not groups.is_last_stage or not tokens:
            return
        parts = [_columns(micro_batch.to(groups.device), report) for micro_batch, report in tokens]
        gathered = _gather(torch.cat(parts, dim=1), groups)
        if dist.get_rank(groups.data) > 0 or dist.get_rank(groups.tensor) > 0:
            return
        table = pa.table(dict(zip(COLUMNS, gathered.cpu().numpy(), strict=True)))
        content = io.BytesIO()
        pq.write_table(table, content, compression="zstd")
        name = f"step_{step:06d}_update_{update:03d}.parquet"
        atomic_write_bytes(self._directory / name, content.getvalue())


def _columns(micro_batch: MicroBatch, report: TokenReport) -> Tensor:
    """The columns of a micro-batch, [5, T]."""
    return torch.stack(
        [
            report.policy.logprob_T,
            micro_batch.behaviour_logprob_T,
            micro_batch.advantage_T,
            report.policy.entropy_T,
            micro_batch.mask_T,
        ]
    ).float()


def _gather(columns: Tensor, groups: ProcessGroups) -> Tensor:
    """The columns of all ranks, rank after rank, [5, Σ T]."""
    num_ranks = dist.get_world_size(groups.data)
    counts = torch.zeros(num_ranks, dtype=torch.int64, device=columns.device)
    counts[dist.get_rank(groups.data)] = columns.shape[1]
    dist.all_reduce(counts, group=groups.data)
    longest = int(counts.max())
    padded = torch.nn.functional.pad(columns, (0, longest - columns.shape[1]))
    parts = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(parts, padded.contiguous(), group=groups.data)
    sizes = counts.tolist()
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)
