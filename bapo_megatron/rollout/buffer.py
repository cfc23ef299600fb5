"""The groups that are not trained yet.

A group enters the buffer when its prompt is drawn, and leaves it when the trainer gets it or when
it is dropped. Every drop is counted with its reason, so that at any time

    drawn = trained + dropped + in the buffer.

In between, each of its episodes is unfinished (possibly with a prefix from earlier steps, of one
turn or several), finished or scored. ``saved`` writes the buffer for a checkpoint, bit for bit.
``scheduling`` decides which groups batches take or drop. docs/rollout.md shows states and
transitions.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Self

from bapo_megatron.data.record import Record, call_rewards
from bapo_megatron.reward.base import Response, Score
from bapo_megatron.types import FinishReason, Group, Prompt, Sample, SampleText

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
        sequences = self.record.sequences()
        if rewards := call_rewards(self.state) if sequences and sequences[0][0].name else {}:
            for sequence, calls in zip(self.sample.sequences, sequences, strict=True):
                trained = (call for call in calls if call.is_trained)
                sequence.call_rewards = tuple(rewards.get(call.name, 0.0) for call in trained)

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
    young_at: int | None = field(default=None, compare=False)
    """The newest weights version at which its responses were scored and none was too old."""

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
