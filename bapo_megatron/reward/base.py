"""Arguments and results of reward functions (docs/rewards.md)."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of grading one response."""

    reward: float
    """By default 1 for a right answer and 0 for any other."""
    answer_found: bool = True
    """Whether an answer could be extracted, right or wrong."""
    extracted: str = ""
    """The answer as the response has it, shortened; empty without one."""
    timed_out: bool = False
    """Grading exceeded its limit of time or memory; the reward is 0."""
    reason: str = ""
    """Why it is right or wrong, as the function says (``math``: a ``math_answer.Reason``), or
    ``limit`` where a limit ended it, ``error`` where it failed, ``crash`` where a built-in grader
    ended its process."""
    components: Mapping[str, float] = field(default_factory=dict)
    """The reward of each function, by its name and without its weight."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of a function; in a composition prefixed with its name and a slash."""
    failed: bool = False
    """A built-in grader failed on this response, or a function under ``reward.on_error: zero``."""


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """Facts about a response besides its text."""

    prompt_id: str = ""
    source: str = ""
    """Name of the data set."""
    prompt: str = ""
    """The rendered prompt, as text."""
    finish_reason: str = "stop"
    """``stop``, ``length`` for a truncated response, or as ``types.FinishReason``."""
    num_tokens: int = 0
    """Tokens of the response, over all turns and including the environment's."""
    num_turns: int = 1
    """Turns of the policy."""
    environment_tokens: int = 0
    """The environment's part of ``num_tokens``."""

    @property
    def is_truncated(self) -> bool:
        """Whether the response reached the limit of its length."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Response:
    """A response with everything that may be used to score it."""

    text: str
    """The decoded response, or its last turn; always the policy's text, which may be anything."""
    answer: str
    """The reference answer, as ``Prompt.answer`` holds it."""
    sample: SampleFacts = SampleFacts()
    row: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the prompt's row in its data file."""
    turns: tuple[str, ...] = ()
    """The texts of the policy and the environment in order, ending with ``text``; empty for a
    single turn."""
    state: Any = None
    """The last state of the environment, a JSON value."""


Result = float | Score | Mapping[str, Any]
"""A number, a ``Score``, or a mapping with ``reward`` and further numbers, which become metrics."""

RewardFunction = Callable[..., Result | Awaitable[Result]]
"""Scores one response in a worker process, where it may be slow or crash; it may be ``async``. Its
parameters name what it gets: ``response``, ``answer``, ``sample``, ``row``, ``turns``,
``state``."""

GroupFunction = Callable[..., Sequence[Result] | Awaitable[Sequence[Result]]]
"""Scores the responses to one prompt together, in their order; otherwise like a ``RewardFunction``.
Its parameters name at least one of ``responses``, ``samples``, ``states`` and ``rewards``, and may
name ``answer`` and ``row``."""


class RewardError(RuntimeError):
    """Grading cannot go on; the message is one line that says what to do."""


class RowError(ValueError):
    """A built-in grader cannot use a row, whatever the response to it is."""


class FunctionFailedError(RewardError):
    """A reward function raised an error, or returned what is not a reward."""
