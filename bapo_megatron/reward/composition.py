"""The rewards of a run: every configured function, weighted and added up."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Self

from bapo_megatron.reward.base import FunctionFailedError, Score
from bapo_megatron.reward.http_service import HttpReward
from bapo_megatron.reward.pool import RewardPool

if TYPE_CHECKING:
    from bapo_megatron.config.reward import RewardConfig, RewardFunctionConfig
    from bapo_megatron.reward.base import Response

_LOG = logging.getLogger(__name__)


class Rewards:
    """Scores responses by all functions of ``reward.functions``; owns their processes."""

    def __init__(self, config: RewardConfig) -> None:
        """Set everything up; nothing is started.

        Args:
            config: The reward section.

        Raises:
            RewardError: A variable that should hold a token is not set.
        """
        self._config = config
        names = tuple(entry.function for entry in config.functions if entry.function is not None)
        self.pool = RewardPool(
            config.workers, config.timeout_s, tuple(dict.fromkeys(names)), config.memory_limit_mb
        )
        """Runs the functions; ``format`` patterns as well."""
        self._services = {
            entry.name: HttpReward(entry.name, entry.url, entry.http)
            for entry in config.functions
            if entry.url is not None
        }
        self._has_failed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the functions in one worker, so that what cannot be loaded is found now.

        Raises:
            RewardError: A function cannot be imported or called.
        """
        if any(":" in (entry.function or "") for entry in self._config.functions):
            await self.pool.start()

    async def close(self) -> None:
        """End every worker and connection. Safe to call twice."""
        await asyncio.gather(
            self.pool.close(), *(service.close() for service in self._services.values())
        )

    async def score(self, response: Response) -> Score:
        """Σ weight · reward over all functions, without shaping.

        Answer, ``answer_found`` and ``reason`` are those of the first function.

        Raises:
            RewardError: A function failed, and ``reward.on_error`` is ``raise``.
        """
        entries = self._config.functions
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._score_one(entry, response)) for entry in entries]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        scores = [task.result() for task in running]
        components: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for entry, score in zip(entries, scores, strict=True):
            components[entry.name] = score.reward
            metrics |= {f"{entry.name}/{name}": value for name, value in score.metrics.items()}
        return Score(
            reward=sum(
                entry.weight * score.reward for entry, score in zip(entries, scores, strict=True)
            ),
            answer_found=scores[0].answer_found,
            extracted=scores[0].extracted,
            timed_out=any(score.timed_out for score in scores),
            reason=scores[0].reason,
            components=components,
            metrics=metrics,
            failed=any(score.failed for score in scores),
        )

    async def _score_one(self, entry: RewardFunctionConfig, response: Response) -> Score:
        try:
            if entry.function is None:
                return await self._services[entry.name].score(response)
            return await self.pool.score(response, function=entry.function)
        except FunctionFailedError as error:
            if self._config.on_error == "raise":
                raise
            if not self._has_failed:
                _LOG.warning("%s; scored 0 and counted (reward/errors), as later ones are", error)
            self._has_failed = True
            return Score(reward=0.0, answer_found=False, reason="error", failed=True)
