"""The hardware of the simulation: engines that share themselves among sequences, and a trainer.

A decoding step of an engine takes ``step_s + sequence_s · n + token_s · C`` with n sequences and C
tokens in their contexts. All n get one token, so C grows by n with each step and m steps take

    (step_s + sequence_s · n + token_s · C) · m + token_s · n · m² / 2

which is solved for m, not stepped through: events are needed only where n changes. Tokens are
continuous. Reading a request's context (prefill) stops the engine's decoding for its time. An
engine whose memory is full gives back the request that came last.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field

import numpy as np

ROOM_SHARE = 0.05
"""Memory that stays free when a request is taken in."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Engines and trainer; the defaults are DeepSeek-R1-Distill-Qwen-7B in bfloat16 on H100."""

    engines: int = 128
    """One GPU each."""
    max_running: int = 48
    """Sequences of an engine's batch."""
    trainer_gpus: int = 32
    parameters: float = 7.62e9
    layers: int = 28
    attention_width: int = 3584
    """Heads times their size."""
    kv_bytes_per_token: int = 57_344
    """2 · 28 layers · 4 heads · 128 · 2 bytes."""
    peak_flops: float = 989e12
    mfu_share: float = 0.4
    """Share of the peak, for training and prefill."""
    memory_bytes_per_s: float = 3.35e12
    memory_share: float = 0.7
    """Share of the bandwidth, while decoding."""
    memory_bytes: float = 0.88 * 80e9
    """For weights, keys and values."""
    overhead_s: float = 1e-3
    """Overhead of a decoding step: sampling, scheduling."""
    sync_s: float = 5.0
    """From the end of training until every engine has the new weights."""

    @property
    def step_s(self) -> float:
        """Reading the weights once."""
        return self.overhead_s + 2 * self.parameters / (self.memory_bytes_per_s * self.memory_share)

    @property
    def sequence_s(self) -> float:
        """Products of one token."""
        return 2 * self.parameters / (self.peak_flops * self.mfu_share)

    @property
    def token_s(self) -> float:
        """Reading the keys and values of one token."""
        return self.kv_bytes_per_token / (self.memory_bytes_per_s * self.memory_share)

    @property
    def kv_tokens(self) -> float:
        """Tokens whose keys and values fit."""
        return (self.memory_bytes - 2 * self.parameters) / self.kv_bytes_per_token

    def prefill_s(self, tokens: float) -> float:
        """Time to read a context; nothing of it is cached."""
        attention = 2 * self.layers * self.attention_width * tokens**2
        return (2 * self.parameters * tokens + attention) / (self.peak_flops * self.mfu_share)

    def training_s(self, lengths: list[float]) -> float:
        """Time of one forward and backward pass over sequences, perfectly balanced."""
        flops = sum(
            6 * self.parameters * length + 6 * self.layers * self.attention_width * length**2
            for length in lengths
        )
        return flops / (self.trainer_gpus * self.peak_flops * self.mfu_share)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Response lengths: log-normal and cut off; a part of the variance belongs to the prompt."""

    median: float = 7_400.0
    sigma: float = 1.1
    """Standard deviation of the logarithm."""
    prompt_share: float = 0.5
    """Share of the variance: hard prompts have long responses in the whole group."""
    longest: int = 65_536
    prompt_tokens: int = 256

    def draw(self, rng: np.random.Generator, samples: int) -> list[float]:
        """Lengths of the responses to one new prompt."""
        of_prompt = rng.standard_normal() * math.sqrt(self.prompt_share)
        of_samples = rng.standard_normal(samples) * math.sqrt(1 - self.prompt_share)
        lengths = self.median * np.exp(self.sigma * (of_prompt + of_samples))
        return [float(length) for length in np.clip(np.ceil(lengths), 1, self.longest)]


@dataclass(eq=False, slots=True)
class Sequence:
    """One response; what is known about its future only the engine looks at."""

    group_id: int
    index: int
    length: float
    done: float = 0.0
    """Tokens so far; up to date when it is not running, or after ``Engine.settle``."""
    versions: dict[int, float] = field(default_factory=dict)
    """Tokens by the version that sampled them."""

    @property
    def is_finished(self) -> bool:
        return self.done >= self.length

    def record(self, done: float, version: int) -> None:
        """Count the tokens up to ``done`` as sampled by ``version``."""
        gained = done - self.done
        if gained > 0:
            self.versions[version] = self.versions.get(version, 0.0) + gained
        self.done = done


class Engine:
    """One server. Times only ever grow; call ``advance`` before anything else at a new time."""

    def __init__(self, hardware: Hardware, prompt_tokens: int) -> None:
        self._hardware = hardware
        self._prompt_tokens = prompt_tokens
        self._order = itertools.count()
        self._ends: list[tuple[float, int, Sequence]] = []
        """(progress at the sequence's last token, tie-breaker, sequence): a heap."""
        self._progress = 0.0
        """Tokens that a sequence that ran from the beginning would have."""
        self._context = 0.0
        self._now_s = 0.0
        self._stall_s = 0.0
        self.decode_s = 0.0
        self.prefill_s = 0.0
        self.tokens = 0.0
        self.peak_context = 0.0

    def __len__(self) -> int:
        return len(self._ends)

    def running(self) -> dict[Sequence, float]:
        """The running sequences, each with its tokens so far."""
        return {s: s.length - (end - self._progress) for end, _, s in self._ends}

    def advance(self, now_s: float, *, paused: bool = False) -> None:
        """Let time pass; a paused engine keeps what it has."""
        wait_s, self._now_s = now_s - self._now_s, now_s
        if paused or not self._ends:
            return
        stalled_s = min(wait_s, self._stall_s)
        self._stall_s -= stalled_s
        self.prefill_s += stalled_s
        decode_s = wait_s - stalled_s
        self.decode_s += decode_s
        count, gained = len(self._ends), self._steps_in(decode_s)
        self._progress += gained
        self._context += count * gained
        self.tokens += count * gained
        self.peak_context = max(self.peak_context, self._context)

    def next_event_s(self) -> float:
        """When the first of the running sequences ends, or the memory is full."""
        if not self._ends:
            return math.inf
        until_end = self._ends[0][0] - self._progress
        until_full = (self._hardware.kv_tokens - self._context) / len(self._ends)
        steps = max(min(until_end, until_full), 0.0)
        return self._now_s + self._stall_s + self._time_of(steps)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a request may be added, with some memory left to go on."""
        if len(self._ends) >= self._hardware.max_running:
            return False
        context = self._context + self._prompt_tokens + sequence.done
        return not self._ends or context <= (1 - ROOM_SHARE) * self._hardware.kv_tokens

    def add(self, sequence: Sequence) -> None:
        """Read a request's context, then sample."""
        context = self._prompt_tokens + sequence.done
        self._stall_s += self._hardware.prefill_s(context)
        self._context += context
        end = self._progress + sequence.length - sequence.done
        heapq.heappush(self._ends, (end, next(self._order), sequence))

    def pop_finished(self, version: int) -> list[Sequence]:
        """Take out the sequences that have their last token."""
        finished = []
        while self._ends and self._ends[0][0] - self._progress <= 1e-6:
            _, _, sequence = heapq.heappop(self._ends)
            self._context -= self._prompt_tokens + sequence.length
            sequence.record(sequence.length, version)
            finished.append(sequence)
        return finished

    def retract(self, version: int) -> list[Sequence]:
        """Take out what came last until the memory is not full any more."""
        retracted: list[Sequence] = []
        while len(self._ends) > 1 and self._context >= self._hardware.kv_tokens - 1e-3:
            entry = max(self._ends, key=lambda entry: entry[1])
            self._ends.remove(entry)
            heapq.heapify(self._ends)
            end, _, sequence = entry
            sequence.record(sequence.length - (end - self._progress), version)
            self._context -= self._prompt_tokens + sequence.done
            retracted.append(sequence)
        return retracted

    def settle(self, version: int) -> None:
        """Bring every running sequence up to date; all new tokens are of ``version``."""
        for end, _, sequence in self._ends:
            sequence.record(sequence.length - (end - self._progress), version)

    def abort(self, version: int) -> list[Sequence]:
        """Take out everything, in the order in which it was added."""
        self.settle(version)
        aborted = [entry[2] for entry in sorted(self._ends, key=lambda entry: entry[1])]
        self._ends.clear()
        self._context = self._stall_s = 0.0
        return aborted

    def remove(self, group_ids: set[int], version: int) -> None:
        """Take out the sequences of these groups."""
        self.settle(version)
        kept = [entry for entry in self._ends if entry[2].group_id not in group_ids]
        if len(kept) == len(self._ends):
            return
        self._ends = kept
        heapq.heapify(self._ends)
        self._context = sum(self._prompt_tokens + sequence.done for _, _, sequence in kept)

    def _time_of(self, steps: float) -> float:
        first_s, growth_s = self._speed()
        return first_s * steps + growth_s * steps**2 / 2

    def _steps_in(self, time_s: float) -> float:
        first_s, growth_s = self._speed()
        # The root of growth/2 · m² + first · m = t, in the form without cancellation.
        return 2 * time_s / (first_s + math.sqrt(first_s**2 + 2 * growth_s * time_s))

    def _speed(self) -> tuple[float, float]:
        """Time of the next step, and by how much each step is longer than the one before."""
        hardware, count = self._hardware, len(self._ends)
        first_s = hardware.step_s + hardware.sequence_s * count + hardware.token_s * self._context
        return first_s, hardware.token_s * count
