"""Samples of made-up tokens, as the benchmarks and the acceptance on a GPU train and read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bapo_megatron.types import FinishReason, PromptTokens, Sample, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_sample(
    group_id: int,
    index: int,
    prompt: PromptTokens,
    token_ids: np.ndarray,
    logprobs: np.ndarray,
    spans: Sequence[tuple[int, int]],
    reward: float,
) -> Sample:
    """A graded response; ``spans`` are versions with their numbers of tokens, in order."""
    return Sample(
        group_id=group_id,
        index=index,
        prompt=prompt,
        response_token_ids=token_ids.astype(np.int32),
        behaviour_logprobs=logprobs.astype(np.float32),
        versions=tuple(VersionSpan(version, number) for version, number in spans if number),
        finish_reason=FinishReason.STOP,
        reward=reward,
        reward_components={"math": reward},
        answer_found=True,
    )
