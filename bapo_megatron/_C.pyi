# ruff: noqa: N999
"""Types of the extension; csrc/README.md has the formulae and limits."""

from collections.abc import Sequence
from typing import Any, Literal

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
    def num_slots(self) -> int: ...
    def to_bytes(self) -> bytes: ...

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
    table: list[int],
    grid: ClipGrid,
    target: float,
    contribution: Literal["surrogate", "gradient"],
    measure: Literal["share", "ratio"],
) -> SearchResult: ...
def use_isa(name: str) -> None: ...
def build_info() -> dict[str, Any]: ...
