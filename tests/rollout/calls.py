"""Calls of episodes, given what a test wants."""

from collections.abc import Sequence

import numpy as np

from bapo_megatron.data.record import Call, Completion
from bapo_megatron.rollout.buffer import Episode
from bapo_megatron.types import FinishReason, Sample, VersionSpan


def begin(episode: Episode, max_tokens: int = 1 << 30) -> Call:
    """The first call, after the prompt."""
    episode.record.write(episode.prompt.token_ids)
    [call] = episode.record.calls
    call.max_tokens = max_tokens
    return call


def give(episode: Episode, *parts: Completion) -> None:
    """Add parts to the only call; a part that ends its turn ends the episode."""
    calls = episode.record.calls
    call = calls[-1] if calls else begin(episode)
    for part in parts:
        call.append(part)
    if call.is_finished and not episode.is_finished:
        episode.finish(call.finish_reason)


def end(episode: Episode, token_ids: Sequence[int]) -> Sample:
    """End an episode with a cut-off response of these tokens."""
    ids, versions = np.array(token_ids, np.int32), (VersionSpan(0, len(token_ids)),)
    logprobs = np.zeros(len(ids), np.float32)
    give(episode, Completion(ids, logprobs, versions, FinishReason.LENGTH))
    return episode.finished()


def so_far(episode: Episode) -> Sample:
    """What an episode would train if it ended now."""
    if episode.sample is not None:
        return episode.sample
    prompt = episode.prompt.tokens()
    return episode.record.sample(*episode.key, prompt, FinishReason.ABORT)
