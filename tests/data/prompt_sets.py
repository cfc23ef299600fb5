"""Prompt sets without files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.data.prompts import PromptSet, SetReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.types import Prompt


def make_prompt_set(name: str, prompts: Sequence[Prompt], weight: float = 1.0) -> PromptSet:
    """A set of these prompts with nothing to report."""
    report = SetReport(
        place=name,
        row_format="columns",
        num_rows=len(prompts),
        num_bad=0,
        first_bad="",
        num_too_long=0,
        max_prompt_tokens=1024,
        longest_tokens=0,
        num_duplicates=0,
        duplicates_dropped=False,
        num_contradictions=0,
        first_contradiction="",
        dropped_columns=(),
    )
    return PromptSet(name, tuple(prompts), report, weight)
