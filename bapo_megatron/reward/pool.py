"""Grading in worker processes, each answer under a limit of time and memory.

Nothing that a model writes can hang or crash the collector. Workers import neither torch nor
transformers unless a reward function does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Self

from bapo_megatron.reward.base import FunctionFailedError, Response, RewardError, Score
from bapo_megatron.reward.functions import BUILT_IN
from bapo_megatron.workers import (
    HandlerNotLoadedError,
    Outcome,
    WorkerNotStartedError,
    WorkerPool,
    WorkersClosedError,
)

_LIMIT = "limit"
"""``Score.reason`` of an answer that exceeded a limit."""


class RewardPool:
    """Grades concurrently; belongs to the event loop that first calls ``score``."""

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        functions: Sequence[str] = ("math",),
        memory_limit_mb: int = 2048,
    ) -> None:
        """Set the pool up; each worker starts with the first answer it gets.

        Args:
            workers: Number of worker processes.
            timeout_s: Time limit of one answer, or of one group that is scored as a whole, not
                counting the wait for a free worker.
            functions: What the workers can run: ``math``, ``package.module:function``.
            memory_limit_mb: Limit of a worker's address space, in 10^6 · 1.048576 bytes; sympy
                itself needs some 60 MB.
        """
        self.num_workers = workers
        """How many requests are worked on at a time."""
        self._functions = tuple(functions)
        self._workers = WorkerPool(
            "bapo_megatron.reward.functions:build",
            self._functions,
            workers=workers,
            timeout_s=timeout_s,
            memory_limit_mb=memory_limit_mb,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def num_killed(self) -> int:
        """Workers so far that were ended because an answer exceeded a limit, or died on it."""
        return self._workers.num_killed

    async def start(self) -> frozenset[str]:
        """Start one worker, so that a function that cannot be loaded is found now.

        Returns:
            Those of the functions that see whole groups: for ``score_group``.

        Raises:
            RewardError: A function cannot be loaded, or no worker starts.
        """
        with _reward_errors():
            return frozenset(await self._workers.start())

    async def score(self, response: str | Response, answer: str = "", function: str = "") -> Score:
        """Grade one response; waits for a free worker.

        Args:
            response: The decoded response, or all that is known of it.
            answer: The reference answer, where ``response`` is a text.
            function: Which of the pool's functions; the first one if empty.

        Returns:
            The score; with ``timed_out`` and reward 0 where a limit was exceeded.

        Raises:
            RewardError: The reward function failed, no worker starts, or the pool is closed.
        """
        if not isinstance(response, Response):
            response = Response(response, answer)
        function = function or self._functions[0]
        if function in BUILT_IN:  # these need no more, and a row may be large
            response = Response(response.text, response.answer)
        outcome = await self._ask(_request(function, [response]))
        if outcome.kind == "result":
            return Score(**outcome.result)
        return _unscored(function, outcome)

    async def score_group(
        self, responses: Sequence[Response], rewards: Sequence[float], function: str
    ) -> list[Score]:
        """Have the responses to one prompt scored by a function that sees them all.

        Args:
            responses: At least one.
            rewards: What each has earned from the functions that see one response.
            function: Which of the pool's functions.

        Returns:
            A score for each; all with ``timed_out`` and reward 0 where a limit was exceeded.

        Raises:
            RewardError: As ``score``.
        """
        outcome = await self._ask(_request(function, responses) | {"rewards": list(rewards)})
        if outcome.kind == "result":
            return [Score(**score) for score in outcome.result]
        return [_unscored(function, outcome)] * len(responses)

    async def matches(self, pattern: str | None, text: str) -> bool | None:
        r"""Return whether a text has what ``reward.format`` wants; None: a limit was exceeded.

        Args:
            pattern: A regular expression that is searched for; None: a closed ``\boxed{…}``.
            text: A response.

        Raises:
            RewardError: No worker starts, or the pool is closed.
        """
        outcome = await self._ask({"pattern": pattern, "text": text})
        if outcome.kind == "error":
            raise RewardError(f"reward.format.pattern failed: {outcome.error}; correct it")
        return bool(outcome.result) if outcome.kind == "result" else None

    async def close(self) -> None:
        """End every worker; answers in progress raise ``RewardError``. Safe to call twice."""
        await self._workers.close()

    async def _ask(self, request: dict[str, Any]) -> Outcome:
        with _reward_errors():
            return await self._workers.ask(request)


def _request(function: str, responses: Sequence[Response]) -> dict[str, Any]:
    """What ``RewardHandler.answer`` is asked; the prompt's answer and row travel once."""
    return {
        "function": function,
        "answer": responses[0].answer,
        "row": dict(responses[0].row),
        "responses": [
            {
                "text": response.text,
                "sample": asdict(response.sample),
                "turns": response.turns,
                "state": response.state,
            }
            for response in responses
        ],
    }


def _unscored(function: str, outcome: Outcome) -> Score:
    """The score of an answer that exceeded a limit; an error if the function raised one."""
    if outcome.kind == "error":
        raise FunctionFailedError(
            f"reward function '{function}' failed: {outcome.error}; correct it, or set "
            "reward.on_error=zero"
        )
    return Score(reward=0.0, answer_found=False, timed_out=True, reason=_LIMIT)


@contextmanager
def _reward_errors() -> Iterator[None]:
    """Errors of the pool of workers, in the words of rewards."""
    try:
        yield
    except HandlerNotLoadedError as error:
        raise RewardError(f"reward function {error}") from error
    except WorkerNotStartedError as error:
        raise RewardError(f"a reward {error}") from error
    except WorkersClosedError as error:
        raise RewardError("the reward pool is closed; score before closing it") from error
