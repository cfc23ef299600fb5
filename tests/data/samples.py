"""Samples for the tests of this package."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from bapo_megatron.data.staleness import spans_of
from bapo_megatron.types import (
    FinishReason,
    Group,
    PromptTokens,
    RolloutBatch,
    RolloutStats,
    Sample,
    WrittenSpan,
)


def make_sample(
    prompt_tokens: int, response_tokens: int, group_id: int = 0, index: int = 0
) -> Sample:
    """A sample of one turn whose every token, log-prob and version differs from its neighbours'."""
    return make_episode(prompt_tokens, (response_tokens,), group_id, index)


def with_columns(sample: Sample) -> Sample:
    """The sample with a plain and a wide column of a scorer."""
    num_tokens = sample.num_sampled
    sample.columns = {
        "teacher_logprob": -np.arange(num_tokens, dtype=np.float32) - 0.5,
        "teacher_top_ids": np.arange(2 * num_tokens, dtype=np.int32).reshape(-1, 2),
    }
    return sample


def make_episode(
    prompt_tokens: int, parts: Sequence[int], group_id: int = 0, index: int = 0
) -> Sample:
    """The same with several turns.

    ``parts``: tokens of the policy's first turn, of what was written after it, of the second turn.
    """
    base = 1000 * (1 + group_id) + 100 * index
    starts = list(accumulate(parts, initial=0))
    sampled_tokens = sum(parts[::2])
    return Sample(
        group_id=group_id,
        index=index,
        prompt=PromptTokens(
            prompt_id=f"train.jsonl:{group_id}",
            token_ids=np.arange(base, base + prompt_tokens, dtype=np.int32),
            source="sums",
        ),
        response_token_ids=np.arange(base + 50, base + 50 + starts[-1], dtype=np.int32),
        behaviour_logprobs=-np.arange(1, sampled_tokens + 1, dtype=np.float32) / (base + 1),
        versions=spans_of(np.arange(sampled_tokens) // 2 + index),
        finish_reason=FinishReason.STOP,
        written=tuple(map(WrittenSpan, starts[1:-1:2], parts[1::2])),
        reward=float(index % 2),
        reward_components={"math": float(index % 2), "style/words": 7.25 + index},
        answer_found=index != 1,
    )


def add_branch(sample: Sample, parts: Sequence[int], shared_tokens: int | None = None) -> Sample:
    """Add a further sequence to an episode, by turns as in ``make_episode``; returns the branch.

    ``shared_tokens``: how many tokens of the first response are its prompt; None: it has a prompt
    that was rendered anew.
    """
    number = 1 + len(sample.branches)
    branch = make_episode(2, parts, sample.group_id, sample.index)
    token_ids = branch.prompt.token_ids + 500 + number
    if shared_tokens is not None:
        shared = sample.response_token_ids[:shared_tokens]
        token_ids = np.concatenate([sample.prompt.token_ids, shared])
    branch.prompt = PromptTokens(sample.prompt.prompt_id, token_ids, sample.prompt.source)
    branch.response_token_ids += 10 * number
    branch.number, branch.reward, branch.reward_components = number, 0.0, {}
    branch.answer_found = False
    sample.branches += (branch,)
    return branch


def make_batch(num_groups: int = 3, group_size: int = 2) -> RolloutBatch:
    """Groups with one prompt each and responses of 1, 2, 3 … tokens."""
    groups = []
    for group_id in range(num_groups):
        samples = [make_sample(3, 1 + group_id + i, group_id, i) for i in range(group_size)]
        for sample in samples:
            sample.prompt = samples[0].prompt
        groups.append(Group(group_id, tuple(samples)))
    stats = RolloutStats(
        generated_tokens=17,
        generation_s=0.1,
        resumed_samples=2,
        unfinished_samples=3,
        reward_timeouts=1,
        reward_errors=3,
        replayed_groups=1,
        equal_reward_groups=4,
        filled_groups=2,
        dropped_groups={"stale": 3, "equal_rewards": 2},
        regenerated_samples=6,
        lost_requests=5,
        retractions=7,
        engine_load={"running": 2.5},
        loop_lag_s=0.25,
    )
    return RolloutBatch(step=5, version=99, groups=tuple(groups), stats=stats)
