"""Prompt sets without files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.data.prompts import PromptSet, SetReport
from bapo_megatron.data.stream import PromptMixture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.types import Prompt


def make_prompt_set(name: str, prompts: Sequence[Prompt], weight: float = 1.0) -> PromptSet:
    """A set of these prompts with nothing to report."""
    report = SetReport(name, "columns", num_rows=len(prompts), max_prompt_tokens=1024)
    return PromptSet(name, tuple(prompts), report, weight)


def make_stream(prompts: Sequence[Prompt], *, shuffle: bool = False) -> PromptMixture:
    """A mixture of one set."""
    return PromptMixture([make_prompt_set("prompts", prompts)], 0, shuffle)
