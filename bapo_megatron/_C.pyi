# ruff: noqa: N999
"""Types of the extension; csrc/README.md has the formulae and limits."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Range = tuple[float, float, float]

class ClipGrid:
    """Candidate bounds and the path on which they are tried."""

    def __init__(
        self,
        lower: Range,
        upper: Range,
        *,
        order: Literal["upper_first", "lower_first"] = ...,
        spacing: Literal["multiples", "running_sum"] = ...,
        dual_clip: float | None = ...,
    ) -> None: ...
    @property
    def lower(self) -> list[float]: ...
    @property
    def upper(self) -> list[float]: ...
    @property
    def order(self) -> Literal["upper_first", "lower_first"]: ...
    @property
    def dual_clip(self) -> float | None: ...
    @property
    def path(self) -> list[tuple[float, float]]: ...

class ContributionTable:
    """Exact int64 sums of token contributions; exports them as a writable buffer."""

    def __init__(self, grid: ClipGrid) -> None: ...
    def accumulate(
        self,
        logprob: FloatArray,
        behaviour_logprob: FloatArray,
        advantage: FloatArray,
        mask: FloatArray,
        *,
        weight: Literal["uniform", "behaviour_prob"] = ...,
        num_threads: int = ...,
        isa: str = ...,
    ) -> None: ...
    def reset(self) -> None: ...
    @property
    def grid(self) -> ClipGrid: ...
    @property
    def nonfinite_tokens(self) -> int: ...
    @property
    def out_of_range_tokens(self) -> int: ...
    @property
    def positive_tokens(self) -> int: ...
    @property
    def negative_tokens(self) -> int: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Candidate:
    """One pair of bounds on the path."""

    @property
    def clip_low(self) -> float: ...
    @property
    def clip_high(self) -> float: ...
    @property
    def positive(self) -> float: ...
    @property
    def negative(self) -> float: ...
    @property
    def positive_units(self) -> int: ...
    @property
    def negative_units(self) -> int: ...
    @property
    def positive_share(self) -> float: ...
    @property
    def passes(self) -> bool: ...

class SearchResult:
    """The chosen pair and the whole path."""

    @property
    def index(self) -> int: ...
    @property
    def candidates(self) -> Sequence[Candidate]: ...
    @property
    def exit(self) -> Literal["start", "met", "exhausted"]: ...
    @property
    def clip_low(self) -> float: ...
    @property
    def clip_high(self) -> float: ...
    @property
    def positive_share_start(self) -> float: ...
    @property
    def positive_share(self) -> float: ...

def search(
    table: ContributionTable,
    grid: ClipGrid,
    target: float,
    contribution: Literal["surrogate", "gradient"],
    measure: Literal["share", "ratio"],
) -> SearchResult: ...
def build_info() -> dict[str, Any]: ...
