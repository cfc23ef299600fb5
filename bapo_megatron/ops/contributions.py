"""The contribution table and the bound search, for torch tensors.

One update: make a table, ``accumulate`` every micro-batch of this rank, sum-reduce
``table.tensor`` over the ranks, check ``table.nonfinite_tokens``, then ``search_bounds``. The sums
are integers, so the same tokens give the same bounds for any order, split or number of ranks.

Shape legend: T = response tokens, B = slots of the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bapo_megatron.config.schema import BapoConfig
from bapo_megatron.ops import extension
from bapo_megatron.types import ClipBounds


class ContributionTable:
    """Exact sums of token contributions for every candidate bound at once.

    Args:
        config: The bound search; ranges, order, weight and contribution shape the table.
        dual_clip: ``algorithm.dual_clip``. With ``contribution: gradient`` tokens above it have no
            gradient and drop out; ``surrogate`` does not use it.
    """

    def __init__(self, config: BapoConfig, dual_clip: float | None = None) -> None:
        self.config = config
        lower, upper = config.lower, config.upper
        grid = extension.ClipGrid(
            (lower.start, lower.max, lower.step),
            (upper.start, upper.max, upper.step),
            order=config.order,
            # The released recipe adds up its steps, the paper's candidates are start + k · step.
            spacing="running_sum" if config.preset == "recipe" else "multiples",
            dual_clip=dual_clip if config.contribution == "gradient" else None,
        )
        self.sums = extension.ContributionTable(grid)
        self.tensor: Tensor = torch.frombuffer(self.sums, dtype=torch.int64)
        """[B] int64 on the CPU, the table's own memory: sum-reduce it in place over ranks."""

    @property
    def grid(self) -> extension.ClipGrid:
        """The candidates."""
        return self.sums.grid

    @property
    def nonfinite_tokens(self) -> int:
        """Tokens with mask 1 and a log-prob or advantage that is NaN or infinite."""
        return self.sums.nonfinite_tokens

    @property
    def out_of_range_tokens(self) -> int:
        """Tokens with |w·A| ≥ 256, or a mask that is neither 0 nor 1."""
        return self.sums.out_of_range_tokens

    @property
    def trained_tokens(self) -> int:
        """Tokens with mask 1 and A ≠ 0; without any the update has no policy gradient."""
        return self.sums.positive_tokens + self.sums.negative_tokens


def accumulate(
    table: ContributionTable,
    logprob_T: Tensor,
    behaviour_logprob_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
) -> None:
    """Add the contributions of one micro-batch to the table.

    Tokens with mask 0 are skipped, whatever else they hold. NaN, infinite and out-of-range tokens
    with mask 1 are counted, not added; ``search_bounds`` refuses a table that has some. Tensors on
    another device are copied to the CPU first.

    Args:
        table: Added to, in place.
        logprob_T: [T] float32, current log-probs ℓ.
        behaviour_logprob_T: [T] float32, behaviour log-probs μ.
        advantage_T: [T] float32, A.
        mask_T: [T] float32, 1 for tokens that train, else 0.

    Raises:
        ValueError: For another dtype, shape or length.
    """
    arrays = {
        "logprob": logprob_T,
        "behaviour_logprob": behaviour_logprob_T,
        "advantage": advantage_T,
        "mask": mask_T,
    }
    for name, tensor_T in arrays.items():
        if tensor_T.dtype != torch.float32:
            raise ValueError(f"{name} must be float32, got {tensor_T.dtype}; convert it first")
    logprob, behaviour, advantage, mask = (
        tensor_T.detach().cpu().contiguous().numpy() for tensor_T in arrays.values()
    )
    table.sums.accumulate(
        logprob,
        behaviour,
        advantage,
        mask,
        weight=table.config.weight,
        num_threads=torch.get_num_threads(),
    )


def search_path(table: ContributionTable, config: BapoConfig) -> extension.SearchResult:
    """Search the bounds and return the balance at every pair of the path.

    Args:
        table: Summed over all tokens of the update.
        config: Its target, contribution and measure decide.

    Raises:
        ValueError: If the table counted non-finite or out-of-range tokens, or holds 2^31 tokens or
            more.
    """
    return extension.search(
        table.sums, table.grid, config.target, config.contribution, config.measure
    )


def search_bounds(table: ContributionTable, config: BapoConfig) -> ClipBounds:
    """Choose the clip bounds of one update (BAPO, Algorithm 1).

    Args:
        table: Summed over all tokens of the update, on every rank.
        config: The settings that the table was made with.

    Returns:
        The bounds; a table without tokens gives the start of both ranges.

    Raises:
        ValueError: See ``search_path``; also if ``config`` is not the table's.
    """
    if config != table.config:
        raise ValueError("config must be the one that the table was made with; make a new table")
    result = search_path(table, config)
    return ClipBounds(
        low=result.clip_low,
        high=result.clip_high,
        positive_share_start=result.positive_share_start,
        positive_share=result.positive_share,
        exit=result.exit,
    )
