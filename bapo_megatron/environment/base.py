"""The interface of environments.

    start(task) → state; then for every turn of the policy: step(state, turn) → Step

until a step is done. Only the state is kept between two calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from bapo_megatron.errors import RolloutError

if TYPE_CHECKING:
    from bapo_megatron.data.tools import Message, ToolCall


@dataclass(frozen=True, slots=True)
class Task:
    """The prompt that an episode is about, and its seed."""

    prompt_id: str
    source: str
    """Name of the data set."""
    prompt: str
    """The rendered prompt, as text."""
    answer: str
    """The reference answer, as ``Prompt.answer`` holds it."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the prompt's row in its data file."""
    seed: int = 0
    """Seed of the episode, also after a resume."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy has just written."""

    number: int
    """Number of the turn in the episode, from 0."""
    text: str
    """The decoded tokens, without special tokens."""
    token_ids: tuple[int, ...]
    remaining_tokens: int
    """Tokens that the episode may still take, including the environment's."""
    prompt_id: str = ""
    """The task's, for messages."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls in the turn, also those that cannot be run; none without
    ``rollout.tool_format``."""


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to a turn: it ends the episode, or writes something."""

    state: Any
    """A JSON value for the next ``step``; the last one goes to the reward functions."""
    messages: Sequence[Message] = ()
    """Chat messages (``role``, ``content``; the role of a tool's output is ``tool``), rendered once
    by the chat template. Either these or ``token_ids`` unless the episode is done."""
    token_ids: Sequence[int] = ()
    """Written as they are, instead of ``messages``."""
    is_done: bool = False
    """Whether the episode ends with this turn; then nothing is written."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers of this step, such as seconds; ``rollout/environment_<name>_per_response`` is their
    sum since the previous batch, over the batch's responses."""


class Environment(Protocol):
    """Runs episodes; any number at a time.

    ``start`` and ``step`` raise ``EnvironmentFailedError`` if the environment failed in this
    episode, and another ``RolloutError`` if it cannot run at all.
    """

    async def open(self) -> None:
        """Prepare; raise a ``RolloutError`` if it cannot be loaded, whatever ``on_error`` says."""

    async def start(self, task: Task) -> Any:
        """Begin an episode; return the first state, a JSON value."""

    async def step(self, state: Any, turn: Callable[[], Turn]) -> Step:
        """Answer a turn, which is decoded only when ``turn`` is called."""

    async def close(self) -> None:
        """Stop; calls in progress raise ``RolloutError``. Safe to call twice."""


class UserEnvironment(Protocol):
    """The class that ``rollout.environment`` names; its constructor takes no arguments.

    Each worker process has one instance for many episodes, and the steps of an episode may run in
    different processes. Everything to remember is therefore in the state, a JSON value that travels
    with the sample. ``step`` must be a function of ``state`` and ``turn``: no clock, no random
    numbers except from a seed in the state, no attribute that an earlier call has set (except as a
    cache). It may be called again with the same arguments. Both methods may be ``async``.
    """

    def start(self, task: Task) -> Any | Awaitable[Any]:
        """Return the first state: all that ``step`` needs of the task and its seed."""

    def step(self, state: Any, turn: Turn) -> Step | Awaitable[Step]:
        """Answer a turn; after JSON, tuples in ``state`` are lists, and keys are strings."""


class EnvironmentFailedError(RolloutError):
    """An environment failed in one episode; the message is one line with a remedy."""

    def __init__(self, message: str, kind: Literal["error", "timeout", "tokens", "lost"]) -> None:
        super().__init__(message)
        self.kind = kind
        """``timeout``: it exceeded ``rollout.episodes.step_timeout_s``. ``tokens``: its answer
        cannot be used as tokens. ``lost``: an agent was killed. ``error``: everything else."""
