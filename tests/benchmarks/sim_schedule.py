"""The scheduling of generation and training, by the rules of ``bapo_megatron.rollout``.

While a batch is waited for, the buffer holds groups_per_step · (1 + async_steps) +
oversample_groups groups, and one batch less while the trainer works; a batch is the oldest finished
ones. Requests start oldest group first; a group's requests go to one engine as long as that has
room. An *age* is the number of steps (weight syncs) since a token was sampled.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tests.benchmarks.sim_cluster import Engine, Hardware, Lengths, Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from bapo_megatron.config.rollout import RolloutConfig


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run; ``max_age`` of the configuration counts optimizer updates."""

    name: str
    rollout: RolloutConfig
    updates_per_batch: int = 2
    drains: bool = False
    """Before a sync the engines finish what they have, and take nothing new meanwhile: what a
    system without partial rollout must do. Not an option of the trainer."""
    keeps_groups_together: bool = True
    """A group's requests go to one engine, for its cached prompt; else each to the least busy."""

    @property
    def max_age_steps(self) -> float:
        limit = self.rollout.staleness.max_age
        return math.inf if limit is None else limit / self.updates_per_batch


class Admission(Protocol):
    """Another rule than that of the simulation for which engine takes a request."""

    def pick(self, engines: list[Engine], sequence: Sequence) -> int | None:
        """The engine, which is then given the request; None: it must wait."""


@dataclass(slots=True)
class Group:
    """The responses to one prompt."""

    group_id: int
    sequences: list[Sequence]
    unfinished: int
    carries: int = 0
    """Batches that were formed without it after it had its first token."""

    @property
    def tokens(self) -> float:
        return sum(sequence.done for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trained on and when."""

    formed_s: float
    waited_s: float
    """Time that the trainer had waited for it."""
    training_s: float
    lengths: list[float]
    tokens_by_age: dict[int, float]
    masked_tokens: float
    oldest_ages: list[int]
    """Age of the oldest token of each response."""
    carries: list[int]
    """Batches that each group missed."""


@dataclass(slots=True)
class Snapshot:
    """Totals of the engines at one moment; all times are sums over the engines."""

    now_s: float
    decode_s: float
    prefill_s: float
    tokens: float
    wasted_tokens: float


@dataclass(slots=True)
class Record:
    batches: list[Batch] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    """One when each batch was formed."""
    running: list[tuple[float, int]] = field(default_factory=list)
    """Time and number of running sequences."""
    drawn: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups by reason."""
    wasted_tokens: float = 0.0
    retracted: int = 0
    """How often a full engine gave a request back."""
    peak_context: float = 0.0
    """Most tokens in the contexts of one engine."""


class Simulation:
    """A cluster from its first request to the last batch."""

    def __init__(
        self,
        mode: Mode,
        hardware: Hardware,
        lengths: Lengths,
        seed: int,
        admission: Admission | None = None,
    ) -> None:
        self._mode = mode
        self._admission = admission
        self._config = mode.rollout
        self._hardware = hardware
        self._lengths = lengths
        self._rng = np.random.default_rng(seed)
        self._engines = [Engine(hardware, lengths.prompt_tokens) for _ in range(hardware.engines)]
        self._loads = [0] * hardware.engines
        self._affinity: dict[int, int] = {}
        self.buffer: dict[int, Group] = {}
        self._finished: dict[int, Group] = {}
        self._unchecked: list[Group] = []
        """Finished since their ages were looked at."""
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._agenda: list[tuple[float, int, int]] = []
        """(time, number, engine): a heap; only the newest entry of an engine counts."""
        self._newest = [-1] * hardware.engines
        self._numbers = itertools.count()
        self._accepts = True
        self._now_s = 0.0
        self._version = 0
        self.record = Record()

    def run(self, steps: int) -> Record:
        config = self._config
        ahead = config.async_steps * config.groups_per_step
        for _ in range(steps):
            asked_s = self._now_s
            self._admit(config.groups_per_step + ahead)
            self._run_until(self._has_batch)
            batch = self._take(asked_s)
            if ahead:
                self._admit(ahead)
            else:
                self._interrupt()
            if not config.partial:
                self._drop(list(self.buffer.values()), "surplus")
            trained_s = self._now_s + batch.training_s
            self._run_until(lambda end_s=trained_s: self._next_event_s() > end_s)
            self._advance(trained_s)
            self._sync()
        self._snapshot()
        return self.record

    def _sync(self) -> None:
        """Give the engines the new weights."""
        was_running = any(self._loads)
        if self._mode.drains:
            self._accepts = False
            self._run_until(lambda: not any(self._loads))
            self._accepts = True
        stops = self._config.weight_sync.in_flight != "in_place"
        if stops:
            self._interrupt()
        for engine in self._engines:
            engine.settle(self._version)
        self._advance(self._now_s + self._hardware.sync_s, paused=True)
        self._version += 1
        self._unchecked.clear()
        self._drop([g for g in self.buffer.values() if self._is_stale(g, stops)], "stale")
        for number in range(len(self._engines)):  # their next events are later by the pause
            self._reschedule(number)
        if was_running:
            self._dispatch()

    def _take(self, asked_s: float) -> Batch:
        """The oldest finished groups become the batch."""
        self._snapshot()
        ids = sorted(self._finished)[: self._config.groups_per_step]
        groups = [self._finished.pop(group_id) for group_id in ids]
        for group_id in ids:
            del self.buffer[group_id]
        for engine in self._engines:
            engine.settle(self._version)
        for group in self.buffer.values():
            group.carries += group.unfinished > 0 and group.tokens > 0
        self.record.trained += len(groups)
        sequences = [sequence for group in groups for sequence in group.sequences]
        ages: Counter[int] = Counter()
        for sequence in sequences:
            for version, tokens in sequence.versions.items():
                ages[self._version - version] += tokens
        batch = Batch(
            formed_s=self._now_s,
            waited_s=self._now_s - asked_s,
            training_s=self._hardware.training_s([s.length for s in sequences]),
            lengths=[sequence.length for sequence in sequences],
            tokens_by_age=dict(ages),
            masked_tokens=self._masked_tokens(ages),
            oldest_ages=[self._version - min(sequence.versions) for sequence in sequences],
            carries=[group.carries for group in groups],
        )
        self.record.batches.append(batch)
        return batch

    def _masked_tokens(self, ages: dict[int, float]) -> float:
        if self._config.staleness.action != "mask":
            return 0.0
        assert self._config.staleness.measure == "token"
        return sum(tokens for age, tokens in ages.items() if age > self._mode.max_age_steps)

    def _is_stale(self, group: Group, has_stopped: bool) -> bool:
        """Whether no batch may have the group any more.

        That of an unfinished one is asked while nothing is in flight, and only of its oldest
        tokens: the mean may become younger.
        """
        limit, staleness = self._mode.max_age_steps, self._config.staleness
        if math.isinf(limit) or staleness.action == "mask":
            return False
        assert staleness.action == "drop"
        if group.unfinished and not (has_stopped and staleness.measure == "oldest"):
            return False
        return any(self._age(sequence) > limit for sequence in group.sequences)

    def _age(self, sequence: Sequence) -> float:
        if not sequence.versions:
            return 0.0
        if self._config.staleness.measure == "oldest":
            return self._version - min(sequence.versions)
        weighted = sum(version * tokens for version, tokens in sequence.versions.items())
        return self._version - weighted / sequence.done

    def _admit(self, num_groups: int) -> None:
        """Draw prompts until the buffer holds these groups and the oversampling."""
        config = self._config
        while len(self.buffer) < num_groups + config.oversample_groups:
            group_id = self.record.drawn
            self.record.drawn += 1
            drawn = self._lengths.draw(self._rng, config.samples_per_group)
            sequences = [Sequence(group_id, index, length) for index, length in enumerate(drawn)]
            self.buffer[group_id] = Group(group_id, sequences, unfinished=len(sequences))
            self._wait(sequences)
        self._dispatch()

    def _wait(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            heapq.heappush(self._waiting, (sequence.group_id, sequence.index, sequence))

    def _dispatch(self) -> None:
        """Send what waits as long as an engine has room."""
        changed = set()
        while self._waiting and self._accepts:
            sequence = self._waiting[0][2]
            number = self._pick(sequence)
            if number is None:
                break
            heapq.heappop(self._waiting)
            self._engines[number].advance(self._now_s)
            self._engines[number].add(sequence)
            self._loads[number] += 1
            changed.add(number)
        for number in changed:
            self._reschedule(number)

    def _pick(self, sequence: Sequence) -> int | None:
        """The engine of the sequence's group, else the least busy one; None: all are full."""
        if self._admission is not None:
            return self._admission.pick(self._engines, sequence)
        favourite = self._affinity.get(sequence.group_id)
        if favourite is not None and self._has_room(favourite, sequence):
            return favourite
        by_load = sorted(range(len(self._loads)), key=self._loads.__getitem__)
        number = next((n for n in by_load if self._has_room(n, sequence)), None)
        if number is None:
            return None
        if self._mode.keeps_groups_together:
            self._affinity.setdefault(sequence.group_id, number)
        return number

    def _has_room(self, number: int, sequence: Sequence) -> bool:
        if self._loads[number] >= self._hardware.max_running:
            return False
        self._engines[number].advance(self._now_s)
        return self._engines[number].has_room(sequence)

    def _interrupt(self) -> None:
        """Abort everything; it waits with what it has."""
        self._advance(self._now_s)
        self._affinity.clear()
        for number, engine in enumerate(self._engines):
            self._wait(engine.abort(self._version))
            self._loads[number] = 0

    def _drop(self, groups: list[Group], reason: str) -> None:
        if not groups:
            return
        ids = {group.group_id for group in groups if group.unfinished}
        for number, engine in enumerate(self._engines if ids else []):
            engine.remove(ids, self._version)
            self._loads[number] = len(engine)
            self._reschedule(number)
        self._waiting = [entry for entry in self._waiting if entry[0] not in ids]
        heapq.heapify(self._waiting)
        for group in groups:
            del self.buffer[group.group_id]
            self._finished.pop(group.group_id, None)
            self.record.wasted_tokens += group.tokens
        self.record.dropped[reason] += len(groups)

    def _run_until(self, is_reached: Callable[[], bool]) -> None:
        """Handle the engines' events until the condition holds."""
        while not is_reached():
            self._now_s = self._next_event_s()  # drops outdated entries
            _, _, number = heapq.heappop(self._agenda)
            engine = self._engines[number]
            engine.advance(self._now_s)
            for sequence in engine.pop_finished(self._version):
                self._end(self.buffer[sequence.group_id])
            retracted = engine.retract(self._version)
            self.record.retracted += len(retracted)
            self._wait(retracted)
            self._loads[number] = len(engine)
            self._dispatch()
            self._reschedule(number)
            self.record.running.append((self._now_s, sum(self._loads)))

    def _end(self, group: Group) -> None:
        group.unfinished -= 1
        if not group.unfinished:
            self._finished[group.group_id] = group
            self._unchecked.append(group)

    def _has_batch(self) -> bool:
        """Whether enough groups are finished; what is too old is given up and replaced."""
        stale = [group for group in self._unchecked if self._is_stale(group, has_stopped=False)]
        self._unchecked.clear()
        if stale:
            self._drop(stale, "stale")
            self._admit(self._config.groups_per_step * (1 + self._config.async_steps))
        return len(self._finished) >= self._config.groups_per_step

    def _next_event_s(self) -> float:
        while self._agenda and self._agenda[0][1] != self._newest[self._agenda[0][2]]:
            heapq.heappop(self._agenda)
        return self._agenda[0][0] if self._agenda else math.inf

    def _reschedule(self, number: int) -> None:
        event_s = self._engines[number].next_event_s()
        self._newest[number] = next(self._numbers)
        if event_s < math.inf:
            heapq.heappush(self._agenda, (event_s, self._newest[number], number))

    def _advance(self, now_s: float, *, paused: bool = False) -> None:
        self._now_s = now_s
        for engine in self._engines:
            engine.advance(now_s, paused=paused)
        self.record.running.append((now_s, 0 if paused else sum(self._loads)))

    def _snapshot(self) -> None:
        self._advance(self._now_s)
        engines = self._engines
        self.record.peak_context = max(engine.peak_context for engine in engines)
        self.record.snapshots.append(
            Snapshot(
                now_s=self._now_s,
                decode_s=math.fsum(engine.decode_s for engine in engines),
                prefill_s=math.fsum(engine.prefill_s for engine in engines),
                tokens=math.fsum(engine.tokens for engine in engines),
                wasted_tokens=self.record.wasted_tokens,
            )
        )
