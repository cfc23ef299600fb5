"""Configuration of evaluations."""

from __future__ import annotations

from pydantic import Field

from bapo_megatron.config.data import DatasetConfig
from bapo_megatron.config.section import Section


class EvalConfig(Section):
    """Evaluation inside training and by the ``eval`` command."""

    sets: tuple[DatasetConfig, ...] = ()
    """Evaluation files."""
    every_steps: int = Field(0, ge=0)
    """Evaluate each N steps; 0: never between start and end."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    samples_per_prompt: int = Field(1, ge=1)
    """k of avg@k and pass@k."""
    max_prompts: int | None = Field(None, ge=1)
    """Use only the first N prompts of each set."""
    temperature: float = Field(0.6, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling (evaluation only)."""
    max_response_tokens: int = Field(4096, ge=1)
    """Longest response."""
