"""The rules by which groups enter the buffer, make a batch, or are given up.

Nothing here waits or sends: ``batching.BatchCollector`` asks, and acts on the answers. The rules
are those of ``config.rollout``; docs/rollout.md shows them as states and transitions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bapo_megatron.config.rollout import ReplayConfig, RolloutConfig
from bapo_megatron.data.staleness import response_age
from bapo_megatron.rollout.buffer import DropReason, PendingGroup, PendingSample, RolloutBuffer


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What the run asks of its batches."""

    seed: int
    total_steps: int
    """Nothing is generated for steps beyond the last."""
    updates_per_batch: int
    """The number of groups of a batch is a multiple of this."""


LeftOver = Sequence[tuple[PendingGroup, DropReason | None]]
"""Groups in the buffer that a batch does not take, and why no later one gets them, if none does."""


class Selection:
    """Decides what becomes of the groups of a buffer."""

    def __init__(
        self, buffer: RolloutBuffer, config: RolloutConfig, replay: ReplayConfig, plan: BatchPlan
    ) -> None:
        """Keep the rules, and the buffer, which the caller changes."""
        self._buffer = buffer
        self._config = config
        self._replay = replay
        self._plan = plan
        self._young: set[int] = set()
        self._young_version = -1
        limit = config.staleness
        self._is_dynamic = config.dynamic_sampling.enabled
        self._has_limit = limit.max_age is not None and limit.action != "mask"
        self.needs_scores = self._is_dynamic or self._has_limit
        """Whether it decides by scores, not only by which responses are complete."""

    def steps_ahead(self, step: int) -> int:
        """For how many steps after ``step`` generation may go on while it is trained."""
        return max(0, min(self._config.steps_ahead, self._plan.total_steps - step))

    def num_to_draw(self, num_groups: int) -> int:
        """Prompts to draw so that ``num_groups`` batch groups, and the oversampling, are there.

        With ``partial_tokens``, those of a new round; none where no new round is to begin.
        """
        if self._config.partial_tokens is not None:
            return 0 if self._is_round_open() or self.choose(num_groups, 0, 0) else num_groups
        num_useful = sum(not self.is_useless(group) for group in self._buffer)
        return max(0, num_groups + self._config.oversample_groups - num_useful)

    def choose(self, num_new: int, num_replayed: int, spent_tokens: int) -> list[PendingGroup]:
        """The new groups of a batch, oldest first; none while there are not enough.

        ``spent_tokens``: response tokens generated for the batch so far.
        """
        if self._is_round_open():
            return []
        ready = self.ready()
        if len(ready) >= num_new:
            return ready[:num_new]
        equal = [group for group in self._buffer if self.is_useless(group)]
        ratio = self._config.dynamic_sampling.max_groups_ratio
        if equal and len(ready) + len(equal) >= ratio * self._config.groups_per_step:
            missing = num_new - len(ready)
            return sorted([*ready, *equal[-missing:]], key=lambda group: group.group_id)
        budget = self._config.tokens_per_step
        if budget is not None and spent_tokens >= budget:
            updates = self._plan.updates_per_batch
            total = (num_replayed + len(ready)) // updates * updates
            return ready[: max(0, total - num_replayed)]
        return []

    def ready(self) -> list[PendingGroup]:
        """Groups that may be trained on, oldest first."""
        if self.needs_scores:
            # For ages too: a group that is not scored may still turn out to be too old.
            return [g for g in self._buffer if g.is_scored and not self.is_useless(g)]
        return [group for group in self._buffer if group.is_finished]

    def stale_samples(
        self, version: int, *, unfinished: bool
    ) -> list[tuple[PendingGroup, list[PendingSample]]]:
        """Groups with responses that are older than allowed at ``version``, and these responses.

        With ``unfinished`` also unfinished groups, of which nothing may be sampled meanwhile: their
        oldest tokens do not become younger, the mean over a response may.
        """
        if not self._has_limit:
            return []
        if version != self._young_version:
            self._young, self._young_version = set(), version
        found = []
        for group in self._buffer:
            if group.is_scored:
                if group.group_id in self._young:
                    continue
                self._young.add(group.group_id)
            elif not unfinished or self._config.staleness.measure != "oldest":
                continue
            if old := [pending for pending in group.samples if self._is_stale(pending, version)]:
                self._young.discard(group.group_id)
                found.append((group, old))
        return found

    def left_over(self, taken: Sequence[PendingGroup]) -> LeftOver:
        """What becomes of the groups in the buffer that a batch does not take."""
        taken_ids = {group.group_id for group in taken}
        return [(g, self._reason_to_drop(g)) for g in self._buffer if g.group_id not in taken_ids]

    def _is_round_open(self) -> bool:
        """Whether a response may get tokens in this round, or a group a score to decide by."""
        if self._config.partial_tokens is None:
            return False
        return any(
            (self.needs_scores and not group.is_scored)
            if group.is_finished
            else not all(pending.is_finished or pending.is_resting for pending in group.samples)
            for group in self._buffer
        )

    def _reason_to_drop(self, group: PendingGroup) -> DropReason | None:
        max_carries = self._config.max_carries
        if self.is_useless(group):
            return DropReason.EQUAL_REWARDS
        if not self._config.partial:
            return DropReason.SURPLUS
        if group.is_underway and max_carries is not None and group.carries >= max_carries:
            return DropReason.CARRIED
        return None

    def replayed(self, step: int, version: int) -> list[PendingGroup]:
        """Groups of earlier batches for the batch of ``step``; the seed decides which."""
        if not self._replay.batches:
            return []
        limit = self._replay.max_age

        def is_young(group: PendingGroup) -> bool:
            ages = (response_age(p.sample.versions, version, "oldest") for p in group.samples)
            return limit is None or max(ages) <= limit

        candidates = [group for batch in self._buffer.earlier for group in batch if is_young(group)]
        max_groups = math.floor(round(self._replay.share * self._config.groups_per_step, 9))
        count = min(max_groups, len(candidates))
        # The 1 tells these random numbers from others of the same seed and step.
        generator = np.random.default_rng([self._plan.seed, 1, step])
        picked = generator.choice(len(candidates), size=count, replace=False)
        return [candidates[index] for index in sorted(picked.tolist())]

    def is_useless(self, group: PendingGroup) -> bool:
        """Whether dynamic sampling leaves a group out."""
        return self._is_dynamic and group.is_scored and group.has_equal_rewards

    def _is_stale(self, pending: PendingSample, version: int) -> bool:
        limit = self._config.staleness
        assert limit.max_age is not None
        assert limit.measure != "token"
        pending.settle()
        return response_age(pending.sample.versions, version, limit.measure) > limit.max_age


def merge(
    new: Sequence[PendingGroup], replayed: Sequence[PendingGroup]
) -> tuple[PendingGroup, ...]:
    """Spread replayed groups evenly among new ones, so that every update has its part of both."""
    total = len(new) + len(replayed)
    keyed = [((i + 0.5) * total / len(new), group) for i, group in enumerate(new)]
    keyed += [((i + 0.5) * total / len(replayed), group) for i, group in enumerate(replayed)]
    return tuple(group for _, group in sorted(keyed, key=lambda pair: pair[0]))
