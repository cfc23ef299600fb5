"""What an evaluation will cost, told before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MINUTE_S = 60.0
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class SetCost:
    """The work that one set still needs."""

    name: str
    num_prompts: int
    samples_per_prompt: int
    num_done: int
    """Samples of an earlier try."""
    max_response_tokens: int

    @property
    def num_samples(self) -> int:
        """Samples still to be made."""
        return self.num_prompts * self.samples_per_prompt - self.num_done

    @property
    def max_tokens(self) -> int:
        """Response tokens if every response reaches its limit."""
        return self.num_samples * self.max_response_tokens


def describe_cost(sets: Sequence[SetCost], tokens_per_s: float) -> list[str]:
    """Lines with the samples, the tokens at most, and the time that follows from a rate.

    Args:
        sets: At least one.
        tokens_per_s: ``eval.assumed_tokens_per_s``.
    """
    lines = [
        f"{cost.name}: {cost.num_prompts:,} problems × {cost.samples_per_prompt} samples"
        + (f" − {cost.num_done:,} done" if cost.num_done else "")
        + f" = {cost.num_samples:,}, at most {cost.max_tokens:,} tokens "
        f"({cost.num_samples:,} × {cost.max_response_tokens:,})"
        for cost in sets
    ]
    num_tokens = sum(cost.max_tokens for cost in sets)
    lines.append(
        f"in all {sum(cost.num_samples for cost in sets):,} samples, at most {num_tokens:,} "
        f"tokens; assuming {tokens_per_s:,.0f} tokens/s of all servers together "
        f"(eval.assumed_tokens_per_s) at most {describe_duration(num_tokens / tokens_per_s)}, half "
        "of it where responses use half of their limit"
    )
    return lines


def describe_duration(seconds: float) -> str:
    """Such as ``4.4 hours``."""
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} seconds"
    if seconds < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} minutes"
    return f"{seconds / _HOUR_S:.1f} hours"
