r"""The tiny task: sums of two to four digits, calculated briefly or guessed at length.

A solution writes one line per addition and ends in a boxed answer::

    careful             sloppy
    3+5=8               3+5 maybe 9, no 7, no 10
    +2=10               +2=12
    \boxed{10}          \boxed{12}

A careful step calculates. A sloppy step guesses several times around the truth and goes on with its
last guess, which is usually wrong. So wrong solutions are longer than right ones, as the paper
observes of negative samples, and whoever learns to calculate instead of guessing is right.
"""

import itertools
import random
from dataclasses import dataclass
from typing import NamedTuple

NUM_TRAIN, NUM_HELDOUT = 2048, 512
"""Problems of train.jsonl and heldout.jsonl."""

GUESS_OFFSETS = (-3, -2, -1, 1, 2, 3)
"""Differences of wrong guesses from the true sum."""


@dataclass(frozen=True, slots=True)
class SolutionMixture:
    """How often and how badly the written-out solutions of the warm-up guess."""

    sloppy_step_share: float = 0.4
    """Share of additions that are guessed."""
    right_guess_share: float = 0.15
    """Share of guesses that hit the sum."""
    min_guesses: int = 5
    """Minimum number of guesses in a sloppy step."""
    max_guesses: int = 7
    """Maximum number of guesses in a sloppy step."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum of digits."""

    digits: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """What the user asks, e.g. ``3+5+2=?``."""
        return "+".join(str(digit) for digit in self.digits) + "=?"

    @property
    def answer(self) -> str:
        """The true sum."""
        return str(sum(self.digits))


class ProblemSplits(NamedTuple):
    """Three sets of problems without a common element, each without duplicates."""

    warmup: tuple[Problem, ...]
    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]


def split_problems(seed: int) -> ProblemSplits:
    """Deal all 11,100 problems, shuffled by ``seed``; the warm-up gets the rest."""
    problems = [
        Problem(digits)
        for count in (2, 3, 4)
        for digits in itertools.product(range(10), repeat=count)
    ]
    random.Random(f"problems-{seed}").shuffle(problems)
    return ProblemSplits(
        warmup=tuple(problems[NUM_HELDOUT + NUM_TRAIN :]),
        train=tuple(problems[NUM_HELDOUT : NUM_HELDOUT + NUM_TRAIN]),
        heldout=tuple(problems[:NUM_HELDOUT]),
    )


def write_solution(problem: Problem, mixture: SolutionMixture, rng: random.Random) -> str:
    """Write one solution, each of its steps careful or sloppy, without an end-of-sequence token."""
    total = problem.digits[0]
    text = str(total)
    for index, digit in enumerate(problem.digits[1:]):
        text += f"{'' if index == 0 else chr(10)}+{digit}"
        if rng.random() < mixture.sloppy_step_share:
            guesses = _guesses(total + digit, mixture, rng)
            text += " maybe " + ", no ".join(str(guess) for guess in guesses)
            total = guesses[-1]
        else:
            total += digit
            text += f"={total}"
    return f"{text}\n\\boxed{{{total}}}"


def _guesses(truth: int, mixture: SolutionMixture, rng: random.Random) -> list[int]:
    """Draw the guesses of one sloppy step; none is negative."""
    offsets = [offset for offset in GUESS_OFFSETS if truth + offset >= 0]
    return [
        truth if rng.random() < mixture.right_guess_share else truth + rng.choice(offsets)
        for _ in range(rng.randint(mixture.min_guesses, mixture.max_guesses))
    ]
