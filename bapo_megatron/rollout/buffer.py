"""What has been sampled and not yet been given to the trainer.

A group enters when its prompt is drawn. It leaves when the trainer gets it, or when it is dropped
for a reason that is counted, so that at any moment

    drawn = trained + dropped + in the buffer.

In between, each of its samples is unfinished (it may have a prefix from earlier steps, of one turn
or of several), finished, or scored. ``saved`` writes the buffer for a checkpoint, bit for bit.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

import numpy as np

from bapo_megatron.engine.base import Completion, join
from bapo_megatron.reward.base import Response, Score
from bapo_megatron.types import (
    FinishReason,
    Group,
    Prompt,
    PromptTokens,
    Sample,
    SampleText,
    WrittenSpan,
)

NEVER = 2**31 - 1
"""More tokens than any response has."""


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
    """A sample on its way, with what only the collector knows about it."""

    sample: Sample
    """Lacks the latest parts while it is sampled: ``settle`` adds them."""
    prompt: Prompt
    texts: tuple[str, ...] | None = None
    """Decoded texts of policy and environment, by turns, without special tokens; set together with
    the reward."""
    extracted: str = ""
    reason: str = ""
    """What the grader said, as in ``SampleText``; set together with the reward."""
    has_begun: bool = False
    state: Any = None
    """State of the environment after its latest answer."""
    awaits_answer: bool = False
    """A turn has ended, and the environment has not answered it."""
    rests_at: int = NEVER
    """Response tokens at which it rests until the next round (``rollout.partial_tokens``)."""
    graded: tuple[Response, Score] | None = None
    """The finished response and its score alone, before group functions and shaping."""
    _parts: list[Completion] = field(default_factory=list)
    # Joined one by one, the thousand parts of a long response would be copied a thousand times.

    @property
    def is_finished(self) -> bool:
        """Nothing more is to be sampled."""
        return self.sample.finish_reason is not FinishReason.ABORT

    @property
    def is_resting(self) -> bool:
        """It has got this round's tokens, and goes on in the next."""
        has_ended = self.is_finished or self.awaits_answer
        return not has_ended and self.num_tokens >= self.rests_at

    @property
    def is_scored(self) -> bool:
        """Its reward is known."""
        return self.texts is not None

    @property
    def num_tokens(self) -> int:
        """Response tokens so far, including those of the environment."""
        num_settled = len(self.sample.response_token_ids)
        return num_settled + sum(len(part.token_ids) for part in self._parts)

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
        """Add what an engine sampled after ``input_ids()``; the end-of-sequence token ends a turn.

        ``max_response_tokens`` counts over all requests and turns; reaching it is LENGTH, also
        where the request was aborted at that very token.
        """
        if (self.is_finished or self.awaits_answer) and not len(part.token_ids):
            return  # its server was lost after the last token; the finish reason comes without any
        assert not self.is_finished, "a finished response is not continued"
        assert not self.awaits_answer, "the environment comes next"
        self._parts.append(part)
        reason = part.finish_reason
        if reason is FinishReason.STOP:
            self.awaits_answer = True
        elif reason is FinishReason.LENGTH or self.num_tokens >= max_response_tokens:
            self.finish(FinishReason.LENGTH)

    def write(self, token_ids: Sequence[int]) -> None:
        """Add the environment's answer; the policy's next turn follows."""
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
        sample = self.sample
        before = Completion(
            sample.response_token_ids,
            sample.behaviour_logprobs,
            sample.versions,
            FinishReason.ABORT,
        )
        joined = join([before, *self._parts], FinishReason.ABORT)
        sample.response_token_ids, sample.behaviour_logprobs = joined.token_ids, joined.logprobs
        sample.versions, self._parts = joined.versions, []

    def snapshot(self) -> Self:
        """Return a copy that later events leave alone."""
        # Arrays and spans are replaced, never changed; only an environment may change its state.
        sample, state = replace(self.sample), deepcopy(self.state)
        return replace(self, sample=sample, state=state, _parts=list(self._parts))

    def start_again(self) -> None:
        """Forget the response; with rounds the next one begins it again."""
        self.sample = _empty_sample(self.sample.group_id, self.sample.index, self.sample.prompt)
        self.rests_at = NEVER if self.rests_at == NEVER else 0
        self.texts = self.state = self.graded = None
        self.extracted = self.reason = ""
        self.has_begun = self.awaits_answer = False
        self._parts = []

    def text(self) -> SampleText:
        """What people read of the sample, once it is scored."""
        assert self.texts is not None
        return SampleText(
            group_id=self.sample.group_id,
            index=self.sample.index,
            prompt_text=self.prompt.text,
            answer=self.prompt.answer,
            response_text=self.texts[-1],
            turns=self.texts if len(self.texts) > 1 else (),
            extracted=self.extracted,
            reason=self.reason,
        )


@dataclass(slots=True)
class PendingGroup:
    """The G samples of one prompt."""

    group_id: int
    samples: list[PendingSample]
    carries: int = 0
    """Batches that were formed while it was started and unfinished."""

    @classmethod
    def start(cls, group_id: int, prompt: Prompt, samples_per_group: int) -> Self:
        """A group without any token."""
        tokens = prompt.tokens()
        samples = [_empty_sample(group_id, index, tokens) for index in range(samples_per_group)]
        return cls(group_id, [PendingSample(sample, prompt) for sample in samples])

    def snapshot(self) -> Self:
        """Return a copy that later events leave alone."""
        return replace(self, samples=[pending.snapshot() for pending in self.samples])

    @property
    def is_underway(self) -> bool:
        """Some sample has tokens, and not every one is finished."""
        return not self.is_finished and any(pending.num_tokens > 0 for pending in self.samples)

    @property
    def is_finished(self) -> bool:
        """Every sample is finished; rewards may still be missing."""
        return all(pending.is_finished for pending in self.samples)

    @property
    def is_scored(self) -> bool:
        """Every sample is finished and has its reward."""
        return all(pending.is_scored for pending in self.samples)

    def start_again(self, samples: Sequence[PendingSample], *, sees_groups: bool) -> None:
        """Forget some responses, and with ``sees_groups`` the rewards that depended on them."""
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
        assert self.is_scored
        return Group(self.group_id, tuple(pending.sample for pending in self.samples))


def _empty_sample(group_id: int, index: int, prompt: PromptTokens) -> Sample:
    return Sample(
        group_id=group_id,
        index=index,
        prompt=prompt,
        response_token_ids=np.empty(0, dtype=np.int32),
        behaviour_logprobs=np.empty(0, dtype=np.float32),
        versions=(),
        finish_reason=FinishReason.ABORT,
    )


class RolloutBuffer:
    """Groups by id; the oldest come first."""

    def __init__(self, num_earlier_batches: int = 0) -> None:
        """Start empty; keep the groups of the last ``num_earlier_batches`` batches for replay."""
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

    def begin_round(self, max_tokens: int) -> None:
        """Let every unfinished response get up to so many further tokens."""
        for group in self:
            for pending in group.samples:
                pending.rests_at = pending.num_tokens + max_tokens

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

    def snapshot(self) -> "RolloutBuffer":
        """Return a copy that later events leave alone; takes some 10 µs per sample."""
        copy = RolloutBuffer()
        copy.restore(self)
        copy.groups = {group.group_id: group.snapshot() for group in self}
        copy.earlier = deque(self.earlier)  # nothing happens to what was trained
        return copy

    def restore(self, saved: "RolloutBuffer") -> None:
        """Take over what another buffer holds and has counted."""
        saved.check()
        self.groups = dict(saved.groups)
        self.next_group_id, self.num_trained = saved.next_group_id, saved.num_trained
        self.dropped = Counter(saved.dropped)
        self.earlier = deque(saved.earlier, self.earlier.maxlen)

    def check(self) -> None:
        """Every group that was drawn is accounted for, exactly once."""
        assert self.next_group_id == self.num_accounted, (self.next_group_id, self.num_accounted)

    @property
    def num_accounted(self) -> int:
        """Groups that are trained, dropped or waiting."""
        return self.num_trained + self.dropped.total() + len(self.groups)
