"""Configuration of the rewards."""

from __future__ import annotations

from pydantic import Field

from bapo_megatron.config.section import Section


class RewardConfig(Section):
    """Grading of finished responses."""

    workers: int = Field(2, ge=1)
    """Grader processes."""
    timeout_s: float = Field(5.0, gt=0)
    """Time limit of one answer; past it the answer scores 0 and is counted."""
