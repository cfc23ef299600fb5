"""The groups that are not trained yet, and the rules by which batches take or drop them.

A group enters the buffer when its prompt is drawn, and leaves it when the trainer gets it or when
it is dropped. Every drop is counted with its reason, so that at any time

    drawn = trained + dropped + in the buffer.

In between, each of its samples is unfinished (possibly with a prefix from earlier steps, of one
turn or several), finished or scored. ``saved`` writes the buffer for a checkpoint, bit for bit.

The rules (``Selection``) implement ``config.rollout``: partial rollout, rounds, dynamic sampling,
staleness, replay. They neither wait nor send; ``batching.BatchCollector`` acts on them.
docs/rollout.md shows states and transitions.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Self

import numpy as np

from bapo_megatron.agent.record import Record
from bapo_megatron.config.rollout import ReplayConfig, RolloutConfig
from bapo_megatron.data.routes import narrowed
from bapo_megatron.data.staleness import response_age
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

_NEVER = 2**31 - 1
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
    """Left over, without ``rollout.partial``."""


@dataclass(slots=True)
class PendingSample:
    """A sample in progress, with its state in the collector."""

    sample: Sample
    """Lacks the latest parts while it is sampled; ``settle`` adds them."""
    prompt: Prompt
    texts: tuple[str, ...] | None = None
    """Decoded texts of policy and environment in turn; set with the reward, like the next two."""
    extracted: str = ""
    reason: str = ""
    """The grader's, as in ``SampleText``."""
    has_begun: bool = False
    state: Any = None
    """State of the environment after its latest answer."""
    awaits_answer: bool = False
    """Whether a turn has ended that the environment has not answered yet."""
    rests_at: int = _NEVER
    """Response tokens at which it rests until the next round (``rollout.partial_tokens``)."""
    record: Record | None = None
    """The calls of an agent's episode, until it ends."""
    graded: tuple[Response, Score] | None = None
    """The finished response and its score alone, before group functions and shaping."""
    _parts: list[Completion] = field(default_factory=list)
    # Joined once: appending a thousand parts one by one would copy the response a thousand times.

    @property
    def is_finished(self) -> bool:
        """Whether the response is complete."""
        return self.sample.finish_reason is not FinishReason.ABORT

    @property
    def is_resting(self) -> bool:
        """Whether it has this round's tokens and continues in the next round."""
        has_ended = self.is_finished or self.awaits_answer
        return not has_ended and self.num_tokens >= self.rests_at

    @property
    def is_scored(self) -> bool:
        """Whether its reward is known."""
        return self.texts is not None

    @property
    def num_tokens(self) -> int:
        """Response tokens so far of all sequences, including those of the environment."""
        if self.record is not None:
            return self.record.num_tokens
        return self.sample.episode_tokens + sum(len(part.token_ids) for part in self._parts)

    @property
    def is_within_turn(self) -> bool:
        """Whether the policy has begun a turn and not ended it."""
        before = sum(self.sample.written[-1]) if self.sample.written else 0
        before += sum(len(branch.response_token_ids) for branch in self.sample.branches)
        return not self.is_finished and not self.awaits_answer and self.num_tokens > before

    def input_ids(self) -> list[int]:
        """Return prompt and response so far, which the engine continues."""
        self.settle()
        return [*self.prompt.token_ids, *self.sample.response_token_ids.tolist()]

    def append(self, part: Completion, max_response_tokens: int) -> None:
        """Add tokens that an engine sampled after ``input_ids()``; a STOP ends the turn.

        A response of ``max_response_tokens``, over all requests, turns and sequences, ends with
        LENGTH even if it was aborted.
        """
        if (self.is_finished or self.awaits_answer) and not len(part.token_ids):
            return  # its server was lost between the last token and the finish reason
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
        assert self.awaits_answer, "environments write between turns"
        self.settle()
        sample = self.sample
        span = WrittenSpan(len(sample.response_token_ids), len(token_ids))
        sample.response_token_ids = np.concatenate(
            [sample.response_token_ids, np.asarray(token_ids, dtype=np.int32)]
        )
        sample.written = (*sample.written, span)
        self.awaits_answer = False

    def finish_agent(self, reason: FinishReason, state: Any) -> None:
        """End an agent's episode: its calls become the sample's sequences."""
        assert self.record is not None, "agents have a record"
        self.record.close()
        sample, prompt, branches = self.sample, self.sample.prompt, list[Sample]()
        for number, sequence in enumerate(self.record.sequences()):
            branch = sample if number == 0 else replace(sample, number=number, branches=())
            if not np.array_equal(prompt.token_ids, sequence.prompt_token_ids):
                branch.prompt = replace(prompt, token_ids=sequence.prompt_token_ids)
            branch.response_token_ids = sequence.response_token_ids
            branch.behaviour_logprobs = sequence.logprobs
            branch.versions, branch.written = sequence.versions, sequence.written
            branch.finish_reason = reason
            branches.append(branch)
        sample.branches = tuple(branches[1:])
        self.record, self.state = None, state
        self.finish(reason)

    def finish(self, reason: FinishReason) -> None:
        """End the episode."""
        self.settle()
        self.sample.finish_reason = reason
        self.awaits_answer = False

    def settle(self) -> None:
        """Join the parts into ``sample``."""
        if not self._parts:
            return
        sample, abort = self.sample, FinishReason.ABORT
        token_ids, logprobs = sample.response_token_ids, sample.behaviour_logprobs
        before = Completion(token_ids, logprobs, sample.versions, abort, sample.routes)
        joined = join([before, *self._parts], abort)
        sample.response_token_ids, sample.behaviour_logprobs = joined.token_ids, joined.logprobs
        sample.versions, self._parts = joined.versions, []
        sample.routes = None if joined.routes is None else narrowed(joined.routes)

    def snapshot(self) -> Self:
        """Return a copy that later changes do not affect."""
        # Arrays and spans are replaced, never modified; an environment may modify its state.
        sample = replace(self.sample, branches=tuple(map(replace, self.sample.branches)))
        state = deepcopy(self.state)
        record = None if self.record is None else self.record.restarted()
        return replace(self, sample=sample, state=state, record=record, _parts=list(self._parts))

    def start_again(self) -> None:
        """Discard the response; with rounds, the next round restarts it."""
        sample = _empty_sample(self.sample.group_id, self.sample.index, self.sample.prompt)
        rests_at = _NEVER if self.rests_at == _NEVER else 0
        fresh = PendingSample(sample, self.prompt, rests_at=rests_at)
        for member in fields(self):
            setattr(self, member.name, getattr(fresh, member.name))

    def text(self) -> SampleText:
        """Return the texts of a scored sample."""
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
    """Batches that were formed while it was in progress."""

    @classmethod
    def start(cls, group_id: int, prompt: Prompt, samples_per_group: int) -> Self:
        """Create a group without any tokens."""
        tokens = prompt.tokens()
        samples = [_empty_sample(group_id, index, tokens) for index in range(samples_per_group)]
        return cls(group_id, [PendingSample(sample, prompt) for sample in samples])

    def snapshot(self) -> Self:
        """Return a copy that later changes do not affect."""
        return replace(self, samples=[pending.snapshot() for pending in self.samples])

    @property
    def is_underway(self) -> bool:
        """Whether some sample has tokens and some sample is unfinished."""
        return not self.is_finished and any(pending.num_tokens > 0 for pending in self.samples)

    @property
    def is_finished(self) -> bool:
        """Whether every sample is finished; rewards may still be missing."""
        return all(pending.is_finished for pending in self.samples)

    @property
    def is_scored(self) -> bool:
        """Whether every sample is finished and has its reward."""
        return all(pending.is_scored for pending in self.samples)

    def start_again(self, samples: Sequence[PendingSample], *, sees_groups: bool) -> None:
        """Discard some responses, and with ``sees_groups`` the rewards that depend on them."""
        for pending in samples:
            pending.start_again()
        if sees_groups:
            for pending in self.samples:
                pending.texts = None

    def to_group(self) -> Group:
        """Return the record for the trainer; every sample is finished and scored."""
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


@dataclass(eq=False)
class RolloutBuffer:
    """Groups by id, the oldest first."""

    earlier: deque[tuple[PendingGroup, ...]] = field(default_factory=lambda: deque(maxlen=0))
    """New groups of the latest ``maxlen`` batches, newest batch last, for replay."""
    groups: dict[int, PendingGroup] = field(default_factory=dict)
    next_group_id: int = 0
    """Also the number of groups drawn."""
    num_trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups by ``DropReason``."""

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
        """Let every unfinished response get at most ``max_tokens`` more tokens."""
        for group in self:
            for pending in group.samples:
                pending.rests_at = pending.num_tokens + max_tokens

    def take(self, groups: Sequence[PendingGroup]) -> None:
        """Remove groups that the trainer has."""
        for group in groups:
            del self.groups[group.group_id]
        self.num_trained += len(groups)
        self.earlier.append(tuple(groups))

    def drop(self, group: PendingGroup, reason: DropReason) -> None:
        """Remove a group that is never trained on; its id is not used again."""
        del self.groups[group.group_id]
        self.dropped[reason.value] += 1

    def snapshot(self) -> Self:
        """Return a copy that later changes do not affect; takes some 10 µs per sample."""
        groups = {group.group_id: group.snapshot() for group in self}
        # Trained groups no longer change.
        return replace(self, groups=groups, dropped=+self.dropped, earlier=self.earlier.copy())

    @property
    def num_accounted(self) -> int:
        """Number of groups that are trained, dropped or in the buffer."""
        return self.num_trained + self.dropped.total() + len(self.groups)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a run requires of its batches."""

    seed: int
    total_steps: int
    """Nothing is generated for steps beyond the last."""
    updates_per_batch: int
    """Divides the number of groups of every batch."""


LeftOver = Sequence[tuple[PendingGroup, DropReason | None]]
"""Groups in the buffer that a batch does not take, with the reason to drop them, if any."""


@dataclass(eq=False)
class Selection:
    """Decides which groups of a buffer to draw, train on or drop; the caller changes the buffer."""

    buffer: RolloutBuffer
    config: RolloutConfig
    replay: ReplayConfig
    plan: BatchPlan
    _young: set[int] = field(default_factory=set)
    """Ids of scored groups that are young enough at ``_young_version``."""
    _young_version: int = -1

    @property
    def needs_scores(self) -> bool:
        """Whether decisions depend on scores, not only on which responses are complete."""
        return self.config.dynamic_sampling.enabled or self._has_limit

    @property
    def _has_limit(self) -> bool:
        """Whether groups that are too old are dropped or regenerated."""
        limit = self.config.staleness
        return limit.max_age is not None and limit.action != "mask"

    def steps_ahead(self, step: int) -> int:
        """Return how many steps beyond ``step`` may be generated while it is trained."""
        return max(0, min(self.config.steps_ahead, self.plan.total_steps - step))

    def num_to_draw(self, num_groups: int) -> int:
        """Return how many prompts ``num_groups`` and oversampling, or a new round, still need."""
        if self.config.partial_tokens is not None:
            return 0 if self._is_round_open() or self.choose(num_groups, 0, 0) else num_groups
        num_useful = sum(not self.is_useless(group) for group in self.buffer)
        return max(0, num_groups + self.config.oversample_groups - num_useful)

    def choose(self, num_new: int, num_replayed: int, spent_tokens: int) -> list[PendingGroup]:
        """Return the new groups of a batch, oldest first; none while there are not enough.

        ``spent_tokens``: response tokens generated for the batch so far.
        """
        if self._is_round_open():
            return []
        ready = self.ready()
        if len(ready) >= num_new:
            return ready[:num_new]
        equal = [group for group in self.buffer if self.is_useless(group)]
        ratio = self.config.dynamic_sampling.max_groups_ratio
        if equal and len(ready) + len(equal) >= ratio * self.config.groups_per_step:
            missing = num_new - len(ready)
            return sorted([*ready, *equal[-missing:]], key=lambda group: group.group_id)
        budget = self.config.tokens_per_step
        if budget is not None and spent_tokens >= budget:
            updates = self.plan.updates_per_batch
            total = (num_replayed + len(ready)) // updates * updates
            return ready[: max(0, total - num_replayed)]
        return []

    def ready(self) -> list[PendingGroup]:
        """Return the groups that may be trained on, oldest first."""
        if self.needs_scores:
            # Also for a limit of age: a group that is not scored may still turn out to be too old.
            return [g for g in self.buffer if g.is_scored and not self.is_useless(g)]
        return [group for group in self.buffer if group.is_finished]

    def stale_samples(
        self, version: int, *, unfinished: bool
    ) -> list[tuple[PendingGroup, list[PendingSample]]]:
        """Return groups with responses that are too old at ``version``, and those responses.

        With ``unfinished``, which requires that nothing is in flight, also unfinished groups.
        """
        if not self._has_limit:
            return []
        if version != self._young_version:
            self._young, self._young_version = set(), version
        judges_unfinished = unfinished and self.config.staleness.measure == "oldest"
        stale: list[tuple[PendingGroup, list[PendingSample]]] = []
        for group in self.buffer:
            if group.group_id in self._young or not (group.is_scored or judges_unfinished):
                continue
            if old := [pending for pending in group.samples if self._is_stale(pending, version)]:
                stale.append((group, old))
            elif group.is_scored:
                self._young.add(group.group_id)
        return stale

    def left_over(self, taken: Sequence[PendingGroup]) -> LeftOver:
        """Return the groups in the buffer that a batch does not take, and which of them to drop."""
        taken_ids = {group.group_id for group in taken}
        return [(g, self._reason_to_drop(g)) for g in self.buffer if g.group_id not in taken_ids]

    def _is_round_open(self) -> bool:
        """Whether a response still gets tokens in this round, or a finished group needs scores."""
        if self.config.partial_tokens is None:
            return False
        return any(
            (self.needs_scores and not group.is_scored)
            if group.is_finished
            else not all(pending.is_finished or pending.is_resting for pending in group.samples)
            for group in self.buffer
        )

    def _reason_to_drop(self, group: PendingGroup) -> DropReason | None:
        max_carries = self.config.max_carries
        if self.is_useless(group):
            return DropReason.EQUAL_REWARDS
        if not self.config.partial:
            return DropReason.SURPLUS
        if group.is_underway and max_carries is not None and group.carries >= max_carries:
            return DropReason.CARRIED
        return None

    def replayed(self, step: int, version: int) -> list[PendingGroup]:
        """Draw groups of earlier batches for the batch of ``step``, by the seed."""
        if not self.replay.batches:
            return []
        limit = self.replay.max_age

        def is_young(group: PendingGroup) -> bool:
            ages = (
                response_age(p.sample.episode_versions, version, "oldest") for p in group.samples
            )
            return limit is None or max(ages) <= limit

        candidates = [group for batch in self.buffer.earlier for group in batch if is_young(group)]
        max_groups = math.floor(round(self.replay.share * self.config.groups_per_step, 9))
        count = min(max_groups, len(candidates))
        # The 1 makes this random stream differ from others with the same seed and step.
        generator = np.random.default_rng([self.plan.seed, 1, step])
        picked = generator.choice(len(candidates), size=count, replace=False)
        return [candidates[index] for index in sorted(picked.tolist())]

    def is_useless(self, group: PendingGroup) -> bool:
        """Whether dynamic sampling excludes a group: every advantage would be 0."""
        if not (self.config.dynamic_sampling.enabled and group.is_scored):
            return False
        return len({pending.sample.reward for pending in group.samples}) == 1

    def _is_stale(self, pending: PendingSample, version: int) -> bool:
        limit = self.config.staleness
        assert limit.max_age is not None
        assert limit.measure != "token"
        pending.settle()
        source = pending.record
        spans = pending.sample.episode_versions if source is None else source.versions
        return response_age(spans, version, limit.measure) > limit.max_age


def merge(
    new: Sequence[PendingGroup], replayed: Sequence[PendingGroup]
) -> tuple[PendingGroup, ...]:
    """Spread replayed groups evenly among new ones, so that every update gets both."""
    total = len(new) + len(replayed)
    keyed = [((i + 0.5) * total / len(new), group) for i, group in enumerate(new)]
    keyed += [((i + 0.5) * total / len(replayed), group) for i, group in enumerate(replayed)]
    return tuple(group for _, group in sorted(keyed, key=lambda pair: pair[0]))
