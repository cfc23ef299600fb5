"""The groups that are not trained yet, and the rules by which batches take or drop them.

A group enters the buffer when its prompt is drawn, and leaves it when the trainer gets it or when
it is dropped. Every drop is counted with its reason, so that at any time

    drawn = trained + dropped + in the buffer.

In between, each of its episodes is unfinished (possibly with a prefix from earlier steps, of one
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

from bapo_megatron.config.rollout import ReplayConfig, RolloutConfig
from bapo_megatron.data.record import Record
from bapo_megatron.data.staleness import response_age
from bapo_megatron.reward.base import Response, Score
from bapo_megatron.types import (
    FinishReason,
    Group,
    Prompt,
    Sample,
    SampleText,
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
class Episode:
    """One response of a group: its calls, and its state in the collector."""

    group_id: int
    index: int
    prompt: Prompt
    record: Record = field(default_factory=Record)
    state: Any = None
    """State of the environment after its latest answer, or an agent's value."""
    rests_at: int = _NEVER
    """Response tokens at which it rests until the next round (``rollout.partial_tokens``)."""
    sample: Sample | None = None
    """Its sequences; None until it has ended."""
    texts: tuple[str, ...] | None = None
    """Decoded texts of policy and environment in turn; set with the reward, like the next two."""
    extracted: str = ""
    reason: str = ""
    """The grader's, as in ``SampleText``."""
    graded: tuple[Response, Score] | None = None
    """The finished response and its score alone, before group functions and shaping."""

    @property
    def key(self) -> tuple[int, int]:
        """What identifies it within the run."""
        return self.group_id, self.index

    @property
    def is_finished(self) -> bool:
        """Whether the response is complete."""
        return self.sample is not None

    @property
    def awaits_answer(self) -> bool:
        """Whether a turn has ended that the environment has not answered yet."""
        calls = self.record.calls
        has_turn = bool(calls) and calls[-1].is_finished and not calls[-1].name
        return has_turn and not self.is_finished

    @property
    def is_resting(self) -> bool:
        """Whether it has this round's tokens and continues in the next round."""
        if self.num_tokens < self.rests_at:
            return False
        return not self.is_finished and not self.awaits_answer

    @property
    def is_scored(self) -> bool:
        """Whether its reward is known."""
        return self.texts is not None

    @property
    def num_tokens(self) -> int:
        """Response tokens so far of all sequences, including those of the environment."""
        return self.record.num_tokens

    def finish(self, reason: FinishReason) -> None:
        """End the episode: its calls become the sequences of its sample."""
        self.record.close()
        self.sample = self.record.sample(self.group_id, self.index, self.prompt.tokens(), reason)

    def finished(self) -> Sample:
        """Return the sample of an episode that has ended."""
        assert self.sample is not None, "only an episode that has ended has its sample"
        return self.sample

    def snapshot(self) -> Self:
        """Return a copy that later changes do not affect."""
        # Arrays and spans are replaced, never modified; an environment may modify its state.
        sample = self.sample
        if sample is not None:
            sample = replace(sample, branches=tuple(map(replace, sample.branches)))
        return replace(self, sample=sample, state=deepcopy(self.state), record=self.record.copy())

    def start_again(self) -> None:
        """Discard the response; with rounds, the next round restarts it."""
        rests_at = _NEVER if self.rests_at == _NEVER else 0
        fresh = Episode(self.group_id, self.index, self.prompt, rests_at=rests_at)
        for member in fields(self):
            setattr(self, member.name, getattr(fresh, member.name))

    def text(self) -> SampleText:
        """Return the texts of a scored sample."""
        assert self.texts is not None
        return SampleText(
            group_id=self.group_id,
            index=self.index,
            prompt_text=self.prompt.text,
            answer=self.prompt.answer,
            response_text=self.texts[-1],
            turns=self.texts if len(self.texts) > 1 else (),
            extracted=self.extracted,
            reason=self.reason,
        )


@dataclass(slots=True)
class PendingGroup:
    """The G episodes of one prompt."""

    group_id: int
    episodes: list[Episode]
    carries: int = 0
    """Batches that were formed while it was in progress."""

    @classmethod
    def start(cls, group_id: int, prompt: Prompt, samples_per_group: int) -> Self:
        """Create a group without any tokens."""
        return cls(group_id, [Episode(group_id, n, prompt) for n in range(samples_per_group)])

    def snapshot(self) -> Self:
        """Return a copy that later changes do not affect."""
        return replace(self, episodes=[episode.snapshot() for episode in self.episodes])

    @property
    def is_underway(self) -> bool:
        """Whether some episode has tokens and some episode is unfinished."""
        return not self.is_finished and any(episode.num_tokens > 0 for episode in self.episodes)

    @property
    def is_finished(self) -> bool:
        """Whether every episode is finished; rewards may still be missing."""
        return all(episode.is_finished for episode in self.episodes)

    @property
    def is_scored(self) -> bool:
        """Whether every episode is finished and has its reward."""
        return all(episode.is_scored for episode in self.episodes)

    def start_again(self, episodes: Sequence[Episode], *, sees_groups: bool) -> None:
        """Discard some responses, and with ``sees_groups`` the rewards that depend on them."""
        for episode in episodes:
            episode.start_again()
        if sees_groups:
            for episode in self.episodes:
                episode.texts = None

    def to_group(self) -> Group:
        """Return the record for the trainer; every episode is finished and scored."""
        assert self.is_scored
        return Group(self.group_id, tuple(episode.finished() for episode in self.episodes))


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
            for episode in group.episodes:
                episode.rests_at = episode.num_tokens + max_tokens

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
        """Return a copy that later changes do not affect; takes some 10 µs per episode."""
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
    ) -> list[tuple[PendingGroup, list[Episode]]]:
        """Return groups with responses that are too old at ``version``, and those responses.

        With ``unfinished``, which requires that nothing is in flight, also unfinished groups.
        """
        if not self._has_limit:
            return []
        if version != self._young_version:
            self._young, self._young_version = set(), version
        judges_unfinished = unfinished and self.config.staleness.measure == "oldest"
        stale: list[tuple[PendingGroup, list[Episode]]] = []
        for group in self.buffer:
            if group.group_id in self._young or not (group.is_scored or judges_unfinished):
                continue
            if old := [e for e in group.episodes if self._is_stale(e, version)]:
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
            else not all(episode.is_finished or episode.is_resting for episode in group.episodes)
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
            ages = (response_age(e.record.versions, version, "oldest") for e in group.episodes)
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
        return len({episode.finished().reward for episode in group.episodes}) == 1

    def _is_stale(self, episode: Episode, version: int) -> bool:
        limit = self.config.staleness
        assert limit.max_age is not None
        assert limit.measure != "token"
        return response_age(episode.record.versions, version, limit.measure) > limit.max_age


def merge(
    new: Sequence[PendingGroup], replayed: Sequence[PendingGroup]
) -> tuple[PendingGroup, ...]:
    """Spread replayed groups evenly among new ones, so that every update gets both."""
    total = len(new) + len(replayed)
    keyed = [((i + 0.5) * total / len(new), group) for i, group in enumerate(new)]
    keyed += [((i + 0.5) * total / len(replayed), group) for i, group in enumerate(replayed)]
    return tuple(group for _, group in sorted(keyed, key=lambda pair: pair[0]))
