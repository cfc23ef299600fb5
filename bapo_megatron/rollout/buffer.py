"""What has been sampled and not yet been given to the trainer.

A group enters when its prompt is drawn. It leaves when the trainer gets it, or when it is dropped
for a reason that is counted, so that at any moment

    drawn = trained + dropped + in the buffer.

In between, each of its samples is unfinished (it may have a prefix from earlier steps, of one turn
or of several), finished, or scored. ``buffer_json`` turns the whole buffer into JSON, bit for bit.

The rollout buffer as JSON values for a checkpoint; arrays as base64 of little-endian bytes.
"""

from __future__ import annotations

import base64
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_megatron.data.staleness import join_spans
from bapo_megatron.types import (
    FinishReason,
    Group,
    Prompt,
    Sample,
    SampleText,
    VersionSpan,
    WrittenSpan,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bapo_megatron.engine.base import Completion
    from bapo_megatron.reward.base import Score
    from bapo_megatron.types import Prompt, PromptTokens


class DropReason(StrEnum):
    """Why a group is never trained on."""

    EQUAL_REWARDS = "equal_rewards"
    """Dynamic sampling: all its rewards are equal."""
    STALE = "stale"
    """Older than ``rollout.staleness`` allows."""
    CARRIED = "carried"
    """Unfinished for more batches than ``rollout.max_carries`` allows."""
    SURPLUS = "surplus"
    """Not needed for its batch, and nothing is kept without ``rollout.partial``."""


@dataclass(slots=True)
class PendingSample:
    """A sample on its way, with what only the collector knows of it."""

    sample: Sample
    """Without the latest parts while it is sampled: ``settle`` adds them."""
    prompt: Prompt
    texts: tuple[str, ...] | None = None
    """What policy and environment wrote, by turns, decoded, special tokens left out; there when the
    sample has its reward."""
    has_begun: bool = False
    """The environment has begun the episode."""
    state: Any = None
    """The environment's, after its latest answer."""
    awaits_answer: bool = False
    """A turn has ended, and the environment has not answered it."""
    score: Score | None = None
    """Score of the response alone, before group functions and shaping."""
    _parts: list[Completion] = field(default_factory=list)
    # A long response comes in a thousand parts; joined one by one, all of it is copied each time.

    @property
    def is_finished(self) -> bool:
        """Nothing more is to be sampled."""
        return self.sample.finish_reason is not FinishReason.ABORT

    @property
    def is_scored(self) -> bool:
        """Its reward is known."""
        return self.texts is not None

    @property
    def num_tokens(self) -> int:
        """Response tokens so far, of policy and environment."""
        settled = len(self.sample.response_token_ids)
        return settled + sum(len(part.token_ids) for part in self._parts)

    @property
    def is_within_turn(self) -> bool:
        """The policy has begun a turn and not ended it."""
        before = sum(self.sample.written[-1]) if self.sample.written else 0
        return not self.is_finished and not self.awaits_answer and self.num_tokens > before

    def input_ids(self) -> list[int]:
        """Prompt and response so far: what the engine continues."""
        self.settle()
        return [*self.prompt.token_ids, *self.sample.response_token_ids.tolist()]

    def append(self, part: Completion, max_response_tokens: int) -> None:
        """Add what an engine sampled; with the end-of-sequence token a turn ends.

        Args:
            part: Tokens after ``input_ids()``.
            max_response_tokens: Longest response over all requests and turns; reaching it is
                LENGTH, also where the request was aborted at that very token.
        """
        if (self.is_finished or self.awaits_answer) and not len(part.token_ids):
            return  # its last token came with the end of its server, and its reason after it
        assert not self.is_finished, "a finished response is not continued"
        assert not self.awaits_answer, "the environment comes next"
        self._parts.append(part)
        reason = part.finish_reason
        if reason is FinishReason.STOP:
            self.awaits_answer = True
        elif reason is FinishReason.LENGTH or self.num_tokens >= max_response_tokens:
            self.finish(FinishReason.LENGTH)

    def write(self, token_ids: Sequence[int]) -> None:
        """Add what the environment answered; the policy's next turn comes after it."""
        assert self.awaits_answer, "environments write between two turns"
        self.settle()
        sample = self.sample
        span = WrittenSpan(len(sample.response_token_ids), len(token_ids))
        sample.response_token_ids = np.concatenate(
            [sample.response_token_ids, np.asarray(token_ids, dtype=np.int32)]
        )
        sample.written = (*sample.written, span)
        self.awaits_answer = False

    def finish(self, reason: FinishReason) -> None:
        """End the episode."""
        self.settle()
        self.sample.finish_reason = reason
        self.awaits_answer = False

    def settle(self) -> None:
        """Join the parts, so that ``sample`` has every token."""
        if not self._parts:
            return
        sample, parts = self.sample, self._parts
        sample.response_token_ids = np.concatenate(
            [sample.response_token_ids, *(part.token_ids for part in parts)]
        )
        sample.behaviour_logprobs = np.concatenate(
            [sample.behaviour_logprobs, *(part.logprobs for part in parts)]
        )
        sample.versions = join_spans([sample.versions, *(part.versions for part in parts)])
        self._parts = []

    def start_again(self) -> None:
        """Forget the response."""
        self.sample = empty_sample(self.sample.group_id, self.sample.index, self.sample.prompt)
        self.texts = self.state = self.score = None
        self.has_begun = self.awaits_answer = False
        self._parts = []

    def text(self) -> SampleText:
        """What people read of it; it is scored."""
        assert self.texts is not None
        return SampleText(
            group_id=self.sample.group_id,
            index=self.sample.index,
            prompt_text=self.prompt.text,
            answer=self.prompt.answer,
            response_text=self.texts[-1],
            turns=self.texts if len(self.texts) > 1 else (),
        )


def empty_sample(group_id: int, index: int, prompt: PromptTokens) -> Sample:
    """A sample without any token."""
    return Sample(
        group_id=group_id,
        index=index,
        prompt=prompt,
        response_token_ids=np.empty(0, dtype=np.int32),
        behaviour_logprobs=np.empty(0, dtype=np.float32),
        versions=(),
        finish_reason=FinishReason.ABORT,
    )


@dataclass(slots=True)
class PendingGroup:
    """The G samples of one prompt."""

    group_id: int
    samples: list[PendingSample]
    carries: int = 0
    """Batches that were formed while it was started and unfinished."""

    @classmethod
    def start(cls, group_id: int, prompt: Prompt, samples_per_group: int) -> PendingGroup:
        """A group without any token."""
        tokens = prompt.tokens()
        samples = [empty_sample(group_id, index, tokens) for index in range(samples_per_group)]
        return cls(group_id, [PendingSample(sample, prompt) for sample in samples])

    @property
    def is_started(self) -> bool:
        """Some sample has tokens."""
        return any(pending.num_tokens > 0 for pending in self.samples)

    @property
    def is_finished(self) -> bool:
        """Every sample is finished; rewards may still be missing."""
        return all(pending.is_finished for pending in self.samples)

    @property
    def is_scored(self) -> bool:
        """Every sample is finished and has its reward."""
        return all(pending.is_scored for pending in self.samples)

    def start_again(self, samples: Sequence[PendingSample], *, sees_groups: bool) -> None:
        """Forget some responses.

        Args:
            samples: These.
            sees_groups: Whether the rewards of the others depend on them.
        """
        for pending in samples:
            pending.start_again()
        if sees_groups:
            for pending in self.samples:
                pending.texts = None

    @property
    def num_unfinished_samples(self) -> int:
        """Samples that still need tokens."""
        return sum(not pending.is_finished for pending in self.samples)

    @property
    def has_equal_rewards(self) -> bool:
        """No sample is better than another: every advantage would be 0."""
        return len({pending.sample.reward for pending in self.samples}) == 1

    def to_group(self) -> Group:
        """The record for the trainer; every sample is finished and scored."""
        assert self.is_finished
        assert self.is_scored
        return Group(self.group_id, tuple(pending.sample for pending in self.samples))


class RolloutBuffer:
    """Groups by id; the oldest come first."""

    def __init__(self, num_earlier_batches: int = 0) -> None:
        """Start empty.

        Args:
            num_earlier_batches: Of how many trained batches the groups are kept for replay.
        """
        self.groups: dict[int, PendingGroup] = {}
        self.next_group_id = 0
        """Also the number of groups that were drawn."""
        self.num_trained = 0
        self.dropped: Counter[str] = Counter()
        """Groups by ``DropReason``."""
        self.earlier: deque[tuple[PendingGroup, ...]] = deque(maxlen=num_earlier_batches)
        """New groups of the latest batches, the newest last."""

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[PendingGroup]:
        return iter(list(self.groups.values()))

    def start_group(self, prompt: Prompt, samples_per_group: int) -> PendingGroup:
        """Add a group for a new prompt."""
        group = PendingGroup.start(self.next_group_id, prompt, samples_per_group)
        self.groups[group.group_id] = group
        self.next_group_id += 1
        return group

    def finished(self) -> list[PendingGroup]:
        """Groups whose samples are all finished, oldest first."""
        return [group for group in self if group.is_finished]

    def take(self, groups: Sequence[PendingGroup]) -> None:
        """Remove groups: the trainer has them."""
        for group in groups:
            del self.groups[group.group_id]
        self.num_trained += len(groups)
        if self.earlier.maxlen:
            self.earlier.append(tuple(groups))

    def drop(self, group: PendingGroup, reason: DropReason) -> None:
        """Give a group up; its id is not used again."""
        del self.groups[group.group_id]
        self.dropped[reason.value] += 1

    def check(self) -> None:
        """Every group that was drawn is accounted for, exactly once."""
        accounted = self.num_trained + self.dropped.total() + len(self.groups)
        assert self.next_group_id == accounted, (self.next_group_id, accounted)


_FORMAT = 5
_ARRAYS = {"response_token_ids": "<i4", "behaviour_logprobs": "<f4"}


def buffer_to_json(buffer: RolloutBuffer) -> dict[str, Any]:
    """Everything that ``buffer_from_json`` needs."""
    return {
        "format": _FORMAT,
        "next_group_id": buffer.next_group_id,
        "num_trained": buffer.num_trained,
        "dropped": dict(buffer.dropped),
        "groups": [_group_to_json(group) for group in buffer],
        "earlier": [[_group_to_json(group) for group in batch] for batch in buffer.earlier],
    }


def buffer_from_json(buffer: RolloutBuffer, state: dict[str, Any]) -> None:
    """Put what ``buffer_to_json`` returned into ``buffer``.

    Raises:
        ValueError: Another version of this program wrote it.
    """
    if state["format"] != _FORMAT:
        raise ValueError(
            f"cannot restore the rollout buffer: its format is {state['format']}, this version "
            f"reads {_FORMAT}; resume with the version that wrote the checkpoint"
        )
    groups = [_group_from_json(saved) for saved in state["groups"]]
    buffer.groups = {group.group_id: group for group in groups}
    buffer.next_group_id = state["next_group_id"]
    buffer.num_trained = state["num_trained"]
    buffer.dropped = Counter(state["dropped"])
    earlier = [tuple(_group_from_json(saved) for saved in batch) for batch in state["earlier"]]
    buffer.earlier = deque(earlier, buffer.earlier.maxlen)
    buffer.check()


def _group_to_json(group: PendingGroup) -> dict[str, Any]:
    prompt = group.samples[0].prompt
    return {
        "group_id": group.group_id,
        "carries": group.carries,
        "prompt": {
            "prompt_id": prompt.prompt_id,
            "token_ids": list(prompt.token_ids),
            "answer": prompt.answer,
            "text": prompt.text,
            "source": prompt.source,
            "row": dict(prompt.row),
        },
        "samples": [_sample_to_json(pending) for pending in group.samples],
    }


def _group_from_json(saved: dict[str, Any]) -> PendingGroup:
    prompt = Prompt(**{**saved["prompt"], "token_ids": tuple(saved["prompt"]["token_ids"])})
    group_id, tokens = saved["group_id"], prompt.tokens()
    samples = [
        _sample_from_json(sample, group_id, index, prompt, tokens)
        for index, sample in enumerate(saved["samples"])
    ]
    return PendingGroup(group_id, samples, saved["carries"])


def _sample_to_json(pending: PendingSample) -> dict[str, Any]:
    pending.settle()
    sample = pending.sample
    arrays = {name: _encode(getattr(sample, name), dtype) for name, dtype in _ARRAYS.items()}
    return {
        **arrays,
        "versions": [list(span) for span in sample.versions],
        "written": [list(span) for span in sample.written],
        "finish_reason": sample.finish_reason.value,
        "reward": sample.reward,
        "reward_components": sample.reward_components,
        "answer_found": sample.answer_found,
        "texts": pending.texts,
        "has_begun": pending.has_begun,
        "state": pending.state,
        "awaits_answer": pending.awaits_answer,
    }


def _sample_from_json(
    saved: dict[str, Any], group_id: int, index: int, prompt: Prompt, tokens: PromptTokens
) -> PendingSample:
    sample = Sample(
        group_id=group_id,
        index=index,
        prompt=tokens,
        versions=tuple(VersionSpan(*span) for span in saved["versions"]),
        written=tuple(WrittenSpan(*span) for span in saved["written"]),
        finish_reason=FinishReason(saved["finish_reason"]),
        reward=saved["reward"],
        reward_components=saved["reward_components"],
        answer_found=saved["answer_found"],
        **{name: _decode(saved[name], dtype) for name, dtype in _ARRAYS.items()},
    )
    return PendingSample(
        sample,
        prompt,
        texts=None if saved["texts"] is None else tuple(saved["texts"]),
        has_begun=saved["has_begun"],
        state=saved["state"],
        awaits_answer=saved["awaits_answer"],
    )


def _encode(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")


def _decode(encoded: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(encoded), dtype=dtype).astype(dtype[1:])
