"""What to sample next, and which groups each batch takes or drops, without event loop or clock.

The rules implement ``config.rollout``: partial rollout, rounds, dynamic sampling, staleness and
replay. ``Selection`` decides on a list of groups; ``Scheduler`` has the state of a run's batches,
and applies the decisions. ``batching.BatchCollector`` runs it.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np

from bapo_megatron.config.rollout import ReplayConfig, RolloutConfig
from bapo_megatron.data.record import Call
from bapo_megatron.data.staleness import response_age
from bapo_megatron.data.stream import PromptMixture
from bapo_megatron.data.token_columns import COLUMNS, SAMPLER_TOP_LOGPROBS
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings, sample_seed
from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.buffer import DropReason, Episode, PendingGroup, RolloutBuffer
from bapo_megatron.rollout.saved import RolloutState, SavedRollout, settings_of
from bapo_megatron.types import RolloutBatch, RolloutStats, Sample

Groups = Sequence[PendingGroup]
"""The oldest first."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a run requires of its batches."""

    seed: int
    total_steps: int
    """Nothing is generated for steps beyond the last."""
    updates_per_batch: int
    """Divides the number of groups of every batch."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Decides which groups to draw, train on or drop, of all in the buffer, the oldest first."""

    config: RolloutConfig
    replay: ReplayConfig
    plan: BatchPlan

    @property
    def needs_scores(self) -> bool:
        """Whether decisions depend on scores, not only on which responses are complete."""
        return self.config.dynamic_sampling.enabled or self.has_age_limit

    @property
    def has_age_limit(self) -> bool:
        """Whether groups that are too old are dropped or regenerated."""
        limit = self.config.staleness
        return limit.max_age is not None and limit.action != "mask"

    def num_ahead(self, step: int) -> int:
        """Return how many groups for steps beyond ``step`` may be generated while it is trained."""
        num_steps = min(self.config.steps_ahead, self.plan.total_steps - step)
        return max(0, num_steps) * self.config.groups_per_step

    def num_to_draw(self, groups: Groups, num_groups: int) -> int:
        """Return how many prompts ``num_groups`` and oversampling, or a new round, still need."""
        if self.config.partial_tokens is not None:
            needs_none = self._is_round_open(groups) or self.choose(groups, num_groups)
            return 0 if needs_none else num_groups
        num_useful = sum(not self.is_useless(group) for group in groups)
        return max(0, num_groups + self.config.oversample_groups - num_useful)

    def choose(
        self, groups: Groups, num_new: int, num_replayed: int = 0, spent_tokens: int = 0
    ) -> list[PendingGroup]:
        """Return the new groups of a batch, oldest first; none while there are not enough.

        ``spent_tokens``: response tokens generated for the batch so far.
        """
        if self._is_round_open(groups):
            return []
        ready = self.ready(groups)
        if len(ready) >= num_new:
            return ready[:num_new]
        equal = [group for group in groups if self.is_useless(group)]
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

    def ready(self, groups: Groups) -> list[PendingGroup]:
        """Return the groups that may be trained on."""
        if self.needs_scores:
            # Also for a limit of age: a group that is not scored may still turn out to be too old.
            return [g for g in groups if g.is_scored and not self.is_useless(g)]
        return [group for group in groups if group.is_finished]

    def stale_episodes(
        self, group: PendingGroup, version: int, *, unfinished: bool
    ) -> list[Episode]:
        """Return the episodes of a group whose responses are too old at ``version``.

        With ``unfinished``, which requires that nothing is in flight, also of an unfinished group.
        """
        limit = self.config.staleness
        if not (group.is_scored or (unfinished and limit.measure == "oldest")):
            return []
        assert limit.max_age is not None
        assert limit.measure != "token"
        ages = [response_age(e.record.versions, version, limit.measure) for e in group.episodes]
        aged = zip(group.episodes, ages, strict=True)
        return [episode for episode, age in aged if age > limit.max_age]

    def left_over(
        self, groups: Groups, taken: Groups
    ) -> list[tuple[PendingGroup, DropReason | None]]:
        """Return the groups that a batch does not take, with the reason to drop them, if any."""
        taken_ids = {group.group_id for group in taken}
        return [(g, self._reason_to_drop(g)) for g in groups if g.group_id not in taken_ids]

    def _reason_to_drop(self, group: PendingGroup) -> DropReason | None:
        max_carries = self.config.max_carries
        if self.is_useless(group):
            return DropReason.EQUAL_REWARDS
        if not self.config.partial:
            return DropReason.SURPLUS
        if group.is_underway and max_carries is not None and group.carries >= max_carries:
            return DropReason.CARRIED
        return None

    def replayed(self, earlier: Sequence[Groups], step: int, version: int) -> list[PendingGroup]:
        """Draw groups of earlier batches for the batch of ``step``, by the seed."""
        if not self.replay.batches:
            return []
        limit = self.replay.max_age

        def is_young(group: PendingGroup) -> bool:
            ages = (response_age(e.record.versions, version, "oldest") for e in group.episodes)
            return limit is None or max(ages) <= limit

        candidates = [group for batch in earlier for group in batch if is_young(group)]
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

    def _is_round_open(self, groups: Groups) -> bool:
        """Whether a response still gets tokens in this round, or a finished group needs scores."""
        if self.config.partial_tokens is None:
            return False
        return any(
            (self.needs_scores and not group.is_scored)
            if group.is_finished
            else not all(episode.is_finished or episode.is_resting for episode in group.episodes)
            for group in groups
        )


@dataclass(frozen=True, slots=True)
class BatchGoal:
    """What is generated for a batch."""

    step: int
    version: int
    """Weights version that the engines hold."""
    replayed: Groups
    """Groups of earlier batches that it has too."""
    num_new: int
    """Its other groups; fewer with ``tokens_per_step``."""
    num_ahead: int
    """Groups for later steps that may be generated while it is trained."""
    num_wanted: int
    """Groups for which prompts are drawn before it is complete; those ahead too, without a lag."""


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """A batch that the trainer does not have yet, and what changes once it does."""

    batch: RolloutBatch
    groups: Groups
    """Of the batch."""
    taken: Groups
    """Those of them that are new."""
    dropped: Sequence[tuple[PendingGroup, DropReason]]
    carried: Groups
    """In progress, and stay so."""
    totals: RolloutStats


@dataclass(eq=False)
class Scheduler:
    """The buffer, the data position and the counters of a run's batches.

    ``counters`` are what the caller has counted since it started: tokens, failures, preemptions.
    """

    selection: Selection
    prompts: PromptMixture
    sees_groups: bool = False
    """Whether rewards depend on the whole group."""
    wants_routes: bool = False
    """Whether the trainer needs the experts that engines choose (``algorithm.router_replay``)."""
    top_logprobs: int = 0
    """Likeliest tokens of the sampler that the trainer needs (``algorithm.centering``)."""
    buffer: RolloutBuffer = field(init=False)
    before: RolloutStats = field(default_factory=RolloutStats)
    """Counters as of the last batch."""
    _num_regenerated: int = 0
    _sampled_version: int | None = None
    """Version of the weights that sampled last."""

    def __post_init__(self) -> None:
        self.config = self.selection.config
        self.buffer = RolloutBuffer(deque(maxlen=self.selection.replay.batches))

    def begin(self, step: int, version: int) -> BatchGoal:
        """Begin the batch of ``step`` (1, 2, …); raise if a fixed lag is violated.

        With one, a single weights version must sample a whole response.
        """
        replayed = self.selection.replayed(self.buffer.earlier, step, version)
        num_new = self.config.groups_per_step - len(replayed)
        num_ahead = self.selection.num_ahead(step)
        sampled, lag = self._sampled_version, self.config.fixed_lag
        unfinished = sum(not group.is_finished for group in self.buffer)
        if lag is not None and unfinished and sampled not in (None, version):
            raise RolloutError(
                "rollout.fixed_lag: all groups must be complete before a weight sync, got "
                f"{unfinished} unfinished ones of version {sampled} with version {version}: no "
                "engine held these weights any more; continue from an earlier checkpoint, or "
                "without rollout.fixed_lag"
            )
        self._sampled_version = version
        if lag is not None and step > 1 and self.selection.num_to_draw(self.groups, num_new):
            raise RolloutError(
                f"rollout.fixed_lag: the groups of step {step} must have been sampled {lag} steps "
                f"before, got {len(self.buffer)} in the checkpoint; resume with the train.steps of "
                "the run that saved it"
            )
        num_wanted = num_new + (num_ahead if lag is None else 0)
        return BatchGoal(step, version, replayed, num_new, num_ahead, num_wanted)

    @property
    def groups(self) -> list[PendingGroup]:
        """All groups in the buffer, the oldest first."""
        return list(self.buffer.groups.values())

    def draw(self, num_groups: int) -> None:
        """Draw the prompts that ``num_groups`` groups still need, with rounds for a new one."""
        for _ in range(num_prompts := self.selection.num_to_draw(self.groups, num_groups)):
            self.buffer.start_group(next(self.prompts), self.config.samples_per_group)
        if num_prompts and self.config.partial_tokens is not None:
            self.buffer.begin_round(self.config.partial_tokens)

    def request_of(self, episode: Episode) -> GenerateRequest:
        """Return the request for an episode's whole response."""
        prompt, config = episode.prompt, self.config
        return GenerateRequest(
            input_ids=prompt.token_ids,
            sampling=SamplingSettings(
                temperature=config.temperature,
                max_new_tokens=config.max_response_tokens,
                seed=sample_seed(self.selection.plan.seed, *episode.key),
            ),
            label=f"sample {episode.index} of group {episode.group_id}, {prompt.prompt_id}",
            order=episode.key,
            top_logprobs=self.top_logprobs,
            routes_from=0 if self.wants_routes else None,
        )

    def give_up_stale(self, version: int, *, unfinished: bool) -> list[Episode]:
        """Drop or restart what is older than ``rollout.staleness`` allows; return its episodes.

        ``unfinished``: see ``Selection.stale_episodes``.
        """
        given_up: list[Episode] = []
        for group in self.groups if self.selection.has_age_limit else ():
            if group.young_at == version:
                continue
            old = self.selection.stale_episodes(group, version, unfinished=unfinished)
            if not old:
                group.young_at = version if group.is_scored else None
            elif self.config.staleness.action == "drop":
                self.buffer.drop(group, DropReason.STALE)
                given_up += group.episodes
            else:
                group.start_again(old, sees_groups=self.sees_groups)
                self._num_regenerated += len(old)
                given_up += old
        return given_up

    def choose(self, goal: BatchGoal, generated_tokens: int) -> list[PendingGroup]:
        """Return the new groups of a batch; none while there are not enough."""
        spent = generated_tokens - self.before.generated_tokens
        return self.selection.choose(self.groups, goal.num_new, len(goal.replayed), spent)

    def form(
        self, goal: BatchGoal, taken: Groups, counters: RolloutStats, **measured: Any
    ) -> FormedBatch:
        """Form the batch of these new groups; nothing changes before ``take``.

        ``measured``: further fields of its ``RolloutStats``.
        """
        left_over = self.selection.left_over(self.groups, taken)
        dropped = [(group, reason) for group, reason in left_over if reason is not None]
        staying = [group for group, reason in left_over if reason is None]
        totals = self._totals(counters, [reason for _, reason in dropped])
        counted = _since(totals, self.before)
        num_filled = sum(map(self.selection.is_useless, taken))
        num_equal = counted.dropped_groups.get(DropReason.EQUAL_REWARDS, 0)
        errors = counted.environment_errors if self.config.has_environment else None
        stats = replace(
            counted,
            unfinished_samples=sum(not e.is_finished for group in staying for e in group.episodes),
            environment_errors=errors,
            same_answer_share=same_answer_share(taken),
            replayed_groups=len(goal.replayed),
            equal_reward_groups=num_equal + num_filled,
            filled_groups=num_filled,
            **measured,
        )
        groups = merge(taken, goal.replayed)
        records = tuple(group.to_group() for group in groups)
        batch = RolloutBatch(goal.step, goal.version, records, stats)
        carried = [group for group in staying if group.is_underway]
        return FormedBatch(batch, groups, taken, dropped, carried, totals)

    def take(self, formed: FormedBatch) -> list[Episode]:
        """Count a batch as trained; return the episodes that are dropped."""
        self.buffer.take(formed.taken)
        for group, reason in formed.dropped:
            self.buffer.drop(group, reason)
        for group in formed.carried:
            group.carries += 1
        assert self.buffer.next_group_id == self.buffer.num_accounted
        self.before = formed.totals
        return [episode for group, _ in formed.dropped for episode in group.episodes]

    def state(self, counters: RolloutStats, generation_s: float) -> SavedRollout:
        """Return what ``restore`` continues from."""
        about = RolloutState(
            prompts=self.prompts.state(),
            generation_s=generation_s,
            counted=_since(self._totals(counters), self.before),
            sampled_version=self._sampled_version,
            settings=settings_of(self.config),
        )
        return SavedRollout(about, self.buffer.snapshot())

    def restore(self, saved: SavedRollout, has_scored: Callable[[Sample], bool]) -> None:
        """Continue from what ``state`` returned, before anything is counted.

        What was saved without its experts or the sampler's likeliest tokens, or without this
        teacher's scores (``has_scored``), is sampled or graded again; groups of earlier batches are
        dropped instead.

        Raises:
            ValueError: It is of other data or settings.
        """
        about = saved.about
        saved.check(self.config)
        self.prompts.restore(about.prompts)
        earlier = deque(saved.buffer.earlier, self.selection.replay.batches)
        self.buffer = replace(saved.buffer, earlier=earlier)
        nothing = RolloutStats(environment_errors={})
        self.before = _since(self._totals(nothing), about.counted)
        self._sampled_version = about.sampled_version

        def lacks_values(episode: Episode) -> bool:
            return not all(map(self._has_values, episode.record.all_calls()))

        def lacks_scores(episode: Episode) -> bool:
            sample = episode.sample
            return sample is not None and not all(map(has_scored, sample.sequences))

        for group in self.buffer:
            for episode in group.episodes:
                if lacks_values(episode):
                    episode.start_again()
                elif lacks_scores(episode):
                    episode.texts = None
            if self.sees_groups and not group.is_scored:
                group.start_again((), sees_groups=True)  # other reward functions may have scored it
        for number, groups in enumerate(earlier):
            earlier[number] = tuple(
                group
                for group in groups
                if not any(lacks_values(e) or lacks_scores(e) for e in group.episodes)
            )

    def _has_values(self, call: Call) -> bool:
        """Whether a restored call has what the trainer needs of the engine."""
        if not call.num_tokens:
            return True
        if self.wants_routes and call.turn.routes is None:
            return False
        if not self.top_logprobs or not call.is_trained:
            return True
        top_QK = COLUMNS[SAMPLER_TOP_LOGPROBS].of(call.turn)
        return top_QK.shape[1] == self.top_logprobs and bool(np.isfinite(top_QK).all())

    def _totals(self, counters: RolloutStats, more: Sequence[DropReason] = ()) -> RolloutStats:
        """Return all counters; ``more``: reasons of groups that are about to be dropped."""
        dropped = self.buffer.dropped + Counter(reason.value for reason in more)
        return replace(
            counters, regenerated_samples=self._num_regenerated, dropped_groups=dict(dropped)
        )


def merge(new: Groups, replayed: Groups) -> tuple[PendingGroup, ...]:
    """Spread replayed groups evenly among new ones, so that every update gets both."""
    total = len(new) + len(replayed)
    keyed = [((i + 0.5) * total / len(new), group) for i, group in enumerate(new)]
    keyed += [((i + 0.5) * total / len(replayed), group) for i, group in enumerate(replayed)]
    return tuple(group for _, group in sorted(keyed, key=lambda pair: pair[0]))


def same_answer_share(groups: Groups) -> float:
    """Return ``RolloutStats.same_answer_share`` of a batch's new groups."""
    answers = Counter(
        group.episodes[0].prompt.answer
        for group in groups
        if any(episode.finished().is_right for episode in group.episodes)
    )
    num_further = answers.total() - 1
    return (max(answers.values()) - 1) / num_further if num_further > 0 else 0.0


def _since(now: RolloutStats, before: RolloutStats) -> RolloutStats:
    """Return the counts between two totals."""
    return RolloutStats(*map(_difference, astuple(now), astuple(before)))


def _difference(now: Any, then: Any) -> Any:
    if not isinstance(now, dict):
        return now - then
    counter = Counter(now)
    counter.subtract(then or {})
    return {key: count for key, count in sorted(counter.items()) if count}
