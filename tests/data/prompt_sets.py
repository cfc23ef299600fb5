"""Prompt sets without files, and those of evaluations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.prompts import PromptSet, SetReport, load_eval_sets
from bapo_megatron.data.stream import PromptMixture
from bapo_megatron.types import Prompt
from tests.config.files import run_config


def load_eval_set(
    renderer: ChatRenderer, max_prompt_tokens: int = 4096, environment: str = "", **dataset: Any
) -> PromptSet:
    """The prompts of a run's only evaluation set."""
    config = run_config(
        Path("runs"),
        data={"max_prompt_tokens": max_prompt_tokens},
        eval={"sets": [dataset]},
        rollout={"environment": environment} if environment else {},
    )
    [loaded] = load_eval_sets(config, renderer)
    return loaded


def make_prompt_set(name: str, prompts: Sequence[Prompt], weight: float = 1.0) -> PromptSet:
    """A set of these prompts with nothing to report."""
    report = SetReport(name, "columns", num_rows=len(prompts), max_prompt_tokens=1024)
    return PromptSet(name, tuple(prompts), report, weight)


def make_stream(prompts: Sequence[Prompt], *, shuffle: bool = False) -> PromptMixture:
    """A mixture of one set."""
    return PromptMixture([make_prompt_set("prompts", prompts)], 0, shuffle)
