"""The contribution table and the bound search, for torch tensors.

One update: make a table, ``accumulate`` every micro-batch of this rank, sum-reduce
``table.tensor`` over the ranks, then ``search_bounds``. The sums are integers, so the same tokens
give the same bounds for any order, split or number of ranks. Table and bounds stay on the device of
the tokens; nothing here waits for it, ``search_path`` and ``token_counts`` excepted.

Shape legend: T = response tokens, B = slots of the table.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from bapo_megatron.config.schema import BapoConfig
from bapo_megatron.ops import extension
from bapo_megatron.ops.backend import Kernels, select_kernels
from bapo_megatron.ops.extension import BOUNDS_FIELDS as BOUNDS_FIELDS

CPU = torch.device("cpu")

EXIT_NAMES = ("start", "met", "exhausted", "unsearched", "refused")
"""What ``exit`` means; ``unsearched``: no token has a sign, so there are no shares."""

REFUSED = EXIT_NAMES.index("refused")


class TokenCounts(NamedTuple):
    """Tokens with mask 1 that a table counted, in its order (csrc/common/contribution.h)."""

    nonfinite_tokens: int
    """A log-prob or the advantage is NaN or infinite."""
    out_of_range_tokens: int
    """|weight · A| ≥ 256, or a mask that is neither 0 nor 1."""
    positive_tokens: int
    """A > 0."""
    negative_tokens: int
    """A < 0."""


class ContributionTable:
    """Exact sums of token contributions for every candidate bound at once.

    Args:
        config: The bound search; ranges, order, weight and contribution shape the table.
        dual_clip: ``algorithm.dual_clip``. With ``contribution: gradient`` tokens above it have no
            gradient and drop out; ``surrogate`` does not use it.
        device: Where tokens will be.
        kernels: None: the best for the device.
    """

    def __init__(
        self,
        config: BapoConfig,
        dual_clip: float | None = None,
        *,
        device: torch.device = CPU,
        kernels: Kernels | None = None,
    ) -> None:
        self.config = config
        self.kernels = select_kernels("auto", device) if kernels is None else kernels
        lower, upper = config.lower, config.upper
        self.grid = extension.ClipGrid(
            (lower.start, lower.max, lower.step),
            (upper.start, upper.max, upper.step),
            order=config.order,
            # The released recipe adds up its steps, the paper's candidates are start + k · step.
            spacing="running_sum" if config.preset == "recipe" else "multiples",
            dual_clip=dual_clip if config.contribution == "gradient" else None,
        )
        """The candidates."""
        self.grid_bytes = torch.frombuffer(bytearray(self.grid.to_bytes()), dtype=torch.uint8)
        """The candidates as the kernels take them: uint8, on the CPU for every device."""
        self.tensor = torch.zeros(self.grid.num_slots, dtype=torch.int64, device=device)
        """[B] int64: sum-reduce it in place over ranks."""

    def new_empty(self) -> ContributionTable:
        """Return an empty table of the same layout, on the same device."""
        return self.with_sums(torch.zeros_like(self.tensor))

    def with_sums(self, tensor: Tensor) -> ContributionTable:
        """Return a table of the same layout that holds ``tensor``, [B] int64, itself."""
        table = copy.copy(self)
        table.tensor = tensor
        return table

    def token_counts(self) -> TokenCounts:
        """Return the counts at the end of the table; waits for the device."""
        return TokenCounts(*self.tensor[-len(TokenCounts._fields) :].tolist())


def accumulate(
    table: ContributionTable,
    logprob_T: Tensor,
    behaviour_logprob_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
) -> None:
    """Add the contributions of one micro-batch to the table.

    Tokens with mask 0 are skipped, whatever else they hold. NaN, infinite and out-of-range tokens
    with mask 1 are counted, not added; a table that has some gives bounds that say ``refused``.

    Args:
        table: Added to, in place.
        logprob_T: [T] float32 on the table's device, current log-probs ℓ; so are the others.
        behaviour_logprob_T: [T] float32, behaviour log-probs μ.
        advantage_T: [T] float32, A.
        mask_T: [T] float32, 1 for tokens that train, else 0.

    Raises:
        ValueError: For another dtype.
        RuntimeError: For another shape, length or device.
    """
    names = ("logprob", "behaviour_logprob", "advantage", "mask")
    tokens = (logprob_T, behaviour_logprob_T, advantage_T, mask_T)
    for name, values_T in zip(names, tokens, strict=True):
        if values_T.dtype != torch.float32:
            raise ValueError(f"{name} must be float32, got {values_T.dtype}; convert it first")
    ell_T, mu_T, a_T, m_T = (values_T.detach().contiguous() for values_T in tokens)
    weight = table.config.weight
    table.kernels.accumulate(table.tensor, table.grid_bytes, ell_T, mu_T, a_T, m_T, weight)


def search_bounds(table: ContributionTable, config: BapoConfig) -> Tensor:
    """Choose the clip bounds of one update (BAPO, Algorithm 1).

    Args:
        table: Summed over all tokens of the update, on every rank.
        config: The settings that the table was made with.

    Returns:
        ``BOUNDS_FIELDS`` as float64 on the table's device. A table without tokens of either sign
        gives the start of both ranges, one that cannot be trusted [0, inf] and the exit
        ``REFUSED``.

    Raises:
        ValueError: If ``config`` is not the table's.
    """
    if config != table.config:
        raise ValueError("config must be the one that the table was made with; make a new table")
    return table.kernels.search_bounds(
        table.tensor, table.grid_bytes, config.target, config.contribution, config.measure
    )


def search_path(table: ContributionTable, config: BapoConfig) -> extension.SearchResult:
    """Search the bounds and return the balance at every pair of the path; waits for the device.

    Args:
        table: Summed over all tokens of the update.
        config: Its target, contribution and measure decide.

    Raises:
        ValueError: If the table counted non-finite or out-of-range tokens, or holds 2^31 tokens or
            more.
    """
    return extension.search(
        table.tensor.tolist(), table.grid, config.target, config.contribution, config.measure
    )
