"""Do the servers compute as the trainer does? The trainer's log-probs of given sequences.

The trainer scores each sequence as a response to its first token; a server scores it as a prompt
(``receive``).

Shape legend: T = response tokens of a micro-batch.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bapo_megatron.types import FinishReason, PromptTokens, Sample, VersionSpan

TEMPERATURE = 1.0
"""Engines score given tokens at this temperature, whatever the sampling temperature is."""


class TokenScores(NamedTuple):
    """Log-probs of some response tokens of some samples."""

    sample_T: np.ndarray
    """[T] int64: index of the token's sample."""
    position_T: np.ndarray
    """[T] int64: position of the token in its response."""
    logprob_T: np.ndarray
    """[T] float32: at ``TEMPERATURE``."""


Scorer = Callable[[Sequence[Sample]], list[TokenScores] | None]
"""Scores every response token with the trainer's weights; a collective over all ranks. Returns the
parts of all ranks on rank 0, None elsewhere."""


def trainer_logprobs(
    sequences: Sequence[Sequence[int]], score: Scorer
) -> tuple[tuple[float, ...], ...] | None:
    """Compute what servers with the same weights must compute; a collective over all ranks.

    Each sequence has two token ids or more. Returns the log-probs of all but the first of each, on
    rank 0; None elsewhere.
    """
    scored = score([*map(_as_sample, sequences)])
    if scored is None:
        return None
    found = [np.full(len(token_ids) - 1, np.nan) for token_ids in sequences]
    for sample_T, position_T, logprob_T in scored:
        for number in np.unique(sample_T):
            is_own_T = sample_T == number
            found[number][position_T[is_own_T]] = logprob_T[is_own_T]
    return tuple(tuple(logprobs.tolist()) for logprobs in found)


def _as_sample(token_ids: Sequence[int]) -> Sample:
    """Make a sample: a prompt of one token, and the rest as its response."""
    response_ids = np.array(token_ids[1:], dtype=np.int32)
    return Sample(
        group_id=0,
        index=0,
        prompt=PromptTokens("probe", np.array(token_ids[:1], dtype=np.int32)),
        response_token_ids=response_ids,
        behaviour_logprobs=np.zeros(len(response_ids), dtype=np.float32),
        versions=(VersionSpan(0, len(response_ids)),),
        finish_reason=FinishReason.STOP,
    )
