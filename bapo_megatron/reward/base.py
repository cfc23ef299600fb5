"""The border between responses and their scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of grading one response."""

    reward: float
    """What the response earns: 1 for a right answer, 0 else, unless the function says more."""
    answer_found: bool
    """Whether an answer could be extracted, right or wrong."""
    extracted: str = ""
    """The answer as it stands in the response, shortened; empty where none was found."""
    timed_out: bool = False
    """Grading exceeded its limit of time or memory and was ended; the reward is 0."""
    reason: str = ""
    """Why it is right or wrong, in a word: of ``math`` a ``math_answer.Reason``, ``limit`` where a
    limit ended it, else what the function says."""


class RewardFunction(Protocol):
    """Grades one response; called in a worker process, where it may take long or crash."""

    def __call__(self, response_text: str, answer: str) -> Score:
        """Score a response by the reference answer.

        Args:
            response_text: The decoded response; anything a model can write.
            answer: The reference answer, as ``Prompt.answer`` holds it.
        """
        ...


class RewardError(RuntimeError):
    """Grading cannot go on; the message is one line that says what to do."""
