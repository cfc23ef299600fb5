"""The bound search over exact sums of token contributions.

One update: ``contributions`` of every micro-batch of this rank, added up and sum-reduced over the
ranks, then ``bounds``. The sums are integers, so the same tokens give the same bounds for any
order, split or number of ranks. All of it stays on the device of the tokens; only ``path`` and
``count_tokens`` wait for it.

Shape legend: T = response tokens, K = slots of the table of sums.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bapo_megatron.ops import extension
from bapo_megatron.ops.extension import BOUNDS_FIELDS as BOUNDS_FIELDS

EXIT_NAMES = ("start", "met", "exhausted", "unsearched", "refused")
"""What ``exit`` means; ``unsearched``: no token has A ≠ 0, so there are no shares."""

_BIN_SLOTS = 4
"""Slots of a bin of ratios: Σ |w A| of its tokens, and three of Σ |w A| r."""


class TokenCounts(NamedTuple):
    """What a table counted, in its order (csrc/common/contribution.h); mask 0 is skipped."""

    nonfinite_tokens: int
    """A log-prob, the advantage or the mask is NaN or infinite."""
    out_of_range_tokens: int
    """|weight · A| ≥ 256, or a mask that is neither 0 nor 1."""
    positive_tokens: int
    """A > 0."""
    negative_tokens: int
    """A < 0."""


class BoundSearch:
    """The search for the clip bounds of one update (BAPO, Algorithm 1)."""

    FIELDS, EXITS = BOUNDS_FIELDS, EXIT_NAMES

    def __init__(
        self,
        grid: extension.ClipGrid,
        target: float,
        contribution: Literal["surrogate", "gradient"],
        measure: Literal["share", "ratio"],
        weight: str,
    ) -> None:
        """Take the candidates and the rule (``algorithm.bapo``)."""
        self.grid = grid
        """The candidates."""
        self._rule = (target, contribution, measure)
        self._weight = weight
        # The candidates as the kernels take them: uint8, on the CPU for every device.
        self._grid_bytes = torch.frombuffer(bytearray(self.grid.to_bytes()), dtype=torch.uint8)
        # The layout of a table is that of csrc/common/contribution.h.
        middle = _BIN_SLOTS * (int(self._grid_bytes[:4].view(torch.int32)) + 1)
        end = self.grid.num_slots - len(TokenCounts._fields)
        self._sides = (slice(0, middle), slice(middle, end))

    def contributions(
        self, logprob_T: Tensor, behaviour_logprob_T: Tensor, advantage_T: Tensor, mask_T: Tensor
    ) -> Tensor:
        """Return the sums over tokens for every candidate at once, [K] int64.

        Tokens with mask 0 are skipped, whatever else they hold. NaN, infinite and out-of-range
        tokens with mask 1 are counted, not added; ``bounds`` of such a table say ``refused``.

        Args:
            logprob_T: [T] float32, current log-probs ℓ; the others have its dtype and device.
            behaviour_logprob_T: [T], behaviour log-probs μ.
            advantage_T: [T], A.
            mask_T: [T], 1 for tokens that train, else 0.

        Raises:
            RuntimeError: For another dtype, shape or device.
        """
        tokens = (logprob_T, behaviour_logprob_T, advantage_T, mask_T)
        table_K = torch.zeros(self.grid.num_slots, dtype=torch.int64, device=logprob_T.device)
        logprob_T, behaviour_logprob_T, advantage_T, mask_T = (
            values_T.detach().contiguous() for values_T in tokens
        )
        torch.ops.bapo.contributions_(
            table_K,
            self._grid_bytes,
            logprob_T,
            behaviour_logprob_T,
            advantage_T,
            mask_T,
            self._weight,
        )
        return table_K

    def bounds(self, table_K: Tensor) -> Tensor:
        """Choose the clip bounds from the sums over all tokens of the update.

        Returns:
            ``BOUNDS_FIELDS`` as float64 on the table's device. A table without tokens of either
            sign gives the start of both ranges, one that cannot be trusted [0, inf] and the exit
            ``refused``.
        """
        bounds: Tensor = torch.ops.bapo.search_bounds(table_K, self._grid_bytes, *self._rule)
        return bounds

    def rescale(self, table_K: Tensor, like_K: Tensor) -> Tensor:
        """Return a table with the importance ratios of one and the Σ |w A| of another.

        Σ |w A| over the tokens of each sign becomes that of ``like_K``, up to rounding. Signs
        without tokens in either table, and the counts, are copied from ``like_K``.
        """
        rescaled_K = like_K.clone()
        for side in self._sides:
            sums_K, like_sums_K = table_K[side], like_K[side]
            size, like_size = (k[::_BIN_SLOTS].sum().double() for k in (sums_K, like_sums_K))
            scaled_K = (sums_K.double() * (like_size / size)).round().to(torch.int64)
            rescaled_K[side] = torch.where((size > 0) & (like_size > 0), scaled_K, like_sums_K)
        return rescaled_K

    def path(self, table_K: Tensor) -> extension.SearchResult:
        """Search the bounds and return the balance at every pair of the path.

        Raises:
            ValueError: The table counted non-finite or out-of-range tokens, or holds 2^31 tokens or
                more.
        """
        return extension.search(table_K.tolist(), self.grid, *self._rule)


def count_tokens(table_K: Tensor) -> TokenCounts:
    """Return the counts at the end of a table."""
    return TokenCounts(*table_K[-len(TokenCounts._fields) :].tolist())
