"""The evaluation sets of a configuration, read and rendered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bapo_megatron.data.prompts import load_eval_set, log_warnings

if TYPE_CHECKING:
    from bapo_megatron.config.evaluation import EvalConfig, EvalSamplingConfig
    from bapo_megatron.data.chat import ChatRenderer
    from bapo_megatron.types import Prompt


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A named list of prompts, and how they are sampled."""

    name: str
    prompts: tuple[Prompt, ...]
    sampling: EvalSamplingConfig


def load_sets(
    config: EvalConfig, renderer: ChatRenderer, max_prompt_tokens: int, *, warns: bool = True
) -> tuple[EvalSet, ...]:
    """Read every set of ``eval.sets``.

    Args:
        config: The evaluation section.
        renderer: Puts the questions into the chat template.
        max_prompt_tokens: ``data.max_prompt_tokens``.
        warns: Log what a user should know; not where the command ``eval`` did.

    Raises:
        DataError: A row cannot be used, or a prompt is too long.
        OSError: A file cannot be read.
    """
    sets = []
    for dataset in config.sets:
        sampling = config.sampling_of(dataset)
        loaded = load_eval_set(dataset, renderer, max_prompt_tokens)
        if warns:
            log_warnings([loaded])
        kept = loaded.prompts[: sampling.max_prompts]
        sets.append(EvalSet(dataset.label, kept, sampling))
    return tuple(sets)
