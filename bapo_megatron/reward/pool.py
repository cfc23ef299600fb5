"""Grading in worker processes, each answer under a limit of time and memory.

No response can hang or crash the collector. Workers import neither torch nor transformers unless a
reward function does.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Self

from bapo_megatron.config.reward import ProgramConfig
from bapo_megatron.reward.base import FunctionFailedError, Response, RewardError, Score
from bapo_megatron.reward.functions import BUILT_IN, GRADERS, PROGRAM, label
from bapo_megatron.runtime.workers import WorkerPool

_PROGRAM_DEFAULTS = ProgramConfig()


class RewardPool:
    """Grades concurrently; belongs to the event loop that first calls ``score``.

    Every method raises ``RewardError`` if a function cannot be loaded, no worker starts, or the
    pool is closed.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        functions: Sequence[str] = ("math",),
        memory_limit_mb: int = 2048,
        program: ProgramConfig = _PROGRAM_DEFAULTS,
    ) -> None:
        """Set the pool up; each worker starts with its first request.

        Limits are those of ``WorkerPool``; sympy itself needs some 60 MB. ``functions`` are those
        that the workers can run: ``math``, ``program``, ``gym``, ``package.module:function``.
        """
        self.num_workers = workers
        self._functions = tuple(functions)
        self._workers = WorkerPool(
            "bapo_megatron.reward.functions:build",
            (program.model_dump(mode="json"), *self._functions),
            label=label(*([name for name in functions if name not in BUILT_IN] or functions)),
            workers=workers,
            timeout_s=timeout_s,
            memory_limit_mb=memory_limit_mb,
            error=RewardError,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def start(self) -> frozenset[str]:
        """Load the functions in one worker; return those of whole groups."""
        return frozenset(await self._workers.start())

    async def score(self, response: str | Response, answer: str = "", function: str = "") -> Score:
        """Grade one response by ``run``, by default with the pool's first function.

        ``answer`` is the reference answer if ``response`` is a text.
        """
        if not isinstance(response, Response):
            response = Response(response, answer)
        [score] = await self.run(function or self._functions[0], [response])
        return score

    async def run(
        self, function: str, responses: Sequence[Response], rewards: Sequence[float] | None = None
    ) -> list[Score]:
        """Have one of the pool's functions score responses; waits for a free worker.

        A function of groups gets all responses to a prompt, with the ``rewards`` of the functions
        of single responses; any other gets one response. All scores are 0, with ``timed_out``, if a
        limit was exceeded, and with ``failed``, if a built-in grader ended its process, so that no
        response ends the run.

        Raises:
            FunctionFailedError: The function raised an error, returned what is not a reward, or
                ended its process.
        """
        if function in (*BUILT_IN, PROGRAM):  # these need no more, and a row may be large
            responses = [Response(response.text, response.answer) for response in responses]
        request = {
            "function": function,
            "answer": responses[0].answer,  # the prompt's answer and row travel once
            "row": dict(responses[0].row),
            "rewards": rewards,
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
        outcome = await self._workers.ask(request)
        if outcome.kind == "result":
            return [Score(**score) for score in outcome.value]
        if outcome.kind == "error":
            raise FunctionFailedError(f"{label(function)} failed: {outcome.value}; correct it")
        if outcome.kind == "died" and function not in GRADERS:
            raise FunctionFailedError(
                f"{label(function)} failed: it ended two processes, wrote into their replies, or "
                "returned more than they can send; correct it"
            )
        ended = Score(reward=0.0, answer_found=False, timed_out=True, reason="limit")
        if outcome.kind == "died":
            ended = Score(reward=0.0, answer_found=False, failed=True, reason="crash")
        return [ended] * len(responses)

    async def matches(self, pattern: str | None, text: str) -> bool | None:
        r"""Return whether a text has the format; None if a limit was exceeded.

        The format is a match of the regular expression, or without one a closed ``\boxed{…}``.
        """
        outcome = await self._workers.ask({"pattern": pattern, "text": text})
        if outcome.kind == "error":
            raise RewardError(f"reward.format.pattern failed: {outcome.value}; correct it")
        return bool(outcome.value) if outcome.kind == "result" else None

    async def close(self) -> None:
        """End every worker; answers in progress raise ``RewardError``. Safe to call twice."""
        await self._workers.close()
