"""What a reward function gets and returns (docs/rewards.md)."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of grading one response."""

    reward: float
    """What the response earns: by default 1 for a right answer and 0 for any other."""
    answer_found: bool = True
    """Whether an answer could be extracted, right or wrong."""
    extracted: str = ""
    """The answer as it stands in the response, shortened; empty where none was found."""
    timed_out: bool = False
    """Grading exceeded its limit of time or memory and was ended; the reward is 0."""
    reason: str = ""
    """Why it is right or wrong, in a word: what the function says (``math``: a
    ``math_answer.Reason``), ``limit`` where a limit ended it, ``error`` where it failed,
    ``crash`` where ``math`` ended its process."""
    components: Mapping[str, float] = field(default_factory=dict)
    """What each reward function gave, by its name and without its weight."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of a function; of a composition, with the function's name and a slash."""
    failed: bool = False
    """A function failed on this response, and ``reward.on_error: zero`` made it 0; or ``math``
    ended its process."""


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """What a reward function may know of a response besides its text."""

    prompt_id: str = ""
    source: str = ""
    """Name of the data set."""
    prompt: str = ""
    """The rendered prompt, as text."""
    finish_reason: str = "stop"
    """``stop``, ``length`` for a truncated response, or as ``types.FinishReason``."""
    num_tokens: int = 0
    """Tokens of the response, of all turns and of what the environment wrote between them."""
    num_turns: int = 1
    """Turns of the policy."""
    environment_tokens: int = 0
    """Those of ``num_tokens`` that the environment wrote."""

    @property
    def is_truncated(self) -> bool:
        """Whether the response reached the limit of its length."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Response:
    """One response with everything that may be used to score it."""

    text: str
    """The decoded response; the last turn if there are several. The policy wrote it, never an
    environment; it may be anything that a model can write."""
    answer: str
    """The reference answer, as ``Prompt.answer`` holds it."""
    sample: SampleFacts = SampleFacts()
    row: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the prompt's row in its data file."""
    turns: tuple[str, ...] = ()
    """The texts of the policy and of the environment by turns, in order; the last is ``text``.
    Empty where there is one turn only."""
    state: Any = None
    """The last state of the environment, a JSON value."""


Result = float | Score | Mapping[str, Any]
"""What a reward function may return: a number, a ``Score``, or a mapping with ``reward`` and
further numbers, which become metrics."""

RewardFunction = Callable[..., Result | Awaitable[Result]]
"""Scores one response, in a worker process, where it may take long or crash. It is called with
those of ``response``, ``answer``, ``sample``, ``row``, ``turns`` and ``state`` that its parameters
name; it may be ``async``."""

GroupFunction = Callable[..., Sequence[Result] | Awaitable[Sequence[Result]]]
"""Scores the responses to one prompt together, in their order. It is called with those of
``responses``, ``samples``, ``states``, ``rewards``, ``answer`` and ``row`` that its parameters
name, at least one of the first four. Otherwise it is like a ``RewardFunction``."""


class RewardError(RuntimeError):
    """Grading cannot go on; the message is one line that says what to do."""


class FunctionFailedError(RewardError):
    """A reward function raised an error, or returned something that is no reward."""
