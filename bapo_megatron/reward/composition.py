"""The rewards of a run: the weighted sum of all configured functions."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from bapo_megatron.config.reward import RewardConfig, RewardFunctionConfig
from bapo_megatron.reward.base import FunctionFailedError, Response, RewardError, Score
from bapo_megatron.reward.functions import BUILT_IN
from bapo_megatron.reward.http_service import HttpReward
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.types import FinishReason

_LOG = logging.getLogger(__name__)
_FAILED_EPISODE = Score(0.0, answer_found=False, reason=FinishReason.ENVIRONMENT.value)
"""The score of an episode whose environment failed."""


class Rewards:
    """Scores responses by all functions of ``reward.functions``; owns their processes."""

    def __init__(self, config: RewardConfig) -> None:
        """Set up everything; nothing is started."""
        self._config = config
        names = tuple(entry.function for entry in config.functions if entry.function is not None)
        self.pool = RewardPool(
            config.workers,
            config.timeout_s,
            tuple(dict.fromkeys(names)),
            config.memory_limit_mb,
            config.program,
        )
        """Runs the functions; ``format`` patterns as well."""
        self._services = {
            entry.name: HttpReward(entry.name, entry.url, entry.http)
            for entry in config.functions
            if entry.url is not None
        }
        self._singles: tuple[RewardFunctionConfig, ...] = config.functions
        self._groups: tuple[RewardFunctionConfig, ...] = ()
        self._has_failed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def group_names(self) -> tuple[str, ...]:
        """The functions for ``score_group``; known after ``start``."""
        return tuple(entry.name for entry in self._groups)

    def require_single(self) -> None:
        """Refuse evaluations, which score single responses, without a function that does.

        Call it after ``start``.
        """
        if not self._singles:
            raise RewardError(
                "eval.functions: must have one that scores a single response, got "
                f"{', '.join(self.group_names)}, which evaluations leave out; name one"
            )

    async def start(self) -> None:
        """Load the functions in one worker, so that ``RewardError`` is raised now."""
        entries = self._config.functions
        if any(entry.function not in (None, *BUILT_IN) for entry in entries):
            names = await self.pool.start()
            self._groups = tuple(entry for entry in entries if entry.function in names)
            self._singles = tuple(entry for entry in entries if entry.function not in names)

    async def close(self) -> None:
        """End every worker and connection. Safe to call twice."""
        await asyncio.gather(
            self.pool.close(), *(service.close() for service in self._services.values())
        )

    async def score(self, response: Response) -> Score:
        """Return Σ weight · reward over the functions of single responses, without shaping.

        Answer, ``answer_found`` and ``reason`` are those of the first function. An episode whose
        environment failed gets 0 from each without a call.

        Raises:
            RewardError: A function failed, and ``reward.on_error`` is ``raise``.
        """
        entries, none = self._singles, Score(0.0)
        if _has_failed(response):
            none = _FAILED_EPISODE
            scores = [none] * len(entries)
        else:
            scores = [score for [score] in await self._run_all(entries, [response])]
        return _add(scores[0] if scores else none, none, entries, scores)

    async def score_group(
        self, responses: Sequence[Response], scores: Sequence[Score]
    ) -> list[Score]:
        """Add Σ weight · reward over the functions of whole groups; raises as ``score``.

        Takes all responses to one prompt, at least one, with their ``scores`` from ``score``, and
        returns the complete ones. Answer, ``answer_found`` and ``reason`` stay, or are those of the
        first function if none scores single responses.
        """
        entries = self._groups
        groups = await self._run_all(entries, responses, [score.reward for score in scores])
        totals = []
        for number, before in enumerate(scores):
            group_scores = [group[number] for group in groups]
            if _has_failed(responses[number]):
                group_scores = [_FAILED_EPISODE] * len(groups)
            first = group_scores[0] if group_scores and not self._singles else before
            totals.append(_add(first, before, entries, group_scores))
        return totals

    async def _run_all(
        self,
        entries: Sequence[RewardFunctionConfig],
        responses: Sequence[Response],
        rewards: Sequence[float] | None = None,
    ) -> list[list[Score]]:
        """The scores of each function for the responses, or the first error."""

        async def run(entry: RewardFunctionConfig) -> list[Score]:
            try:
                if entry.function is not None:
                    return await self.pool.run(entry.function, responses, rewards)
                return [await self._services[entry.name].score(item) for item in responses]
            except FunctionFailedError as error:
                if self._config.on_error == "raise":
                    raise FunctionFailedError(f"{error}, or set reward.on_error=zero") from error
                if not self._has_failed:
                    _LOG.warning(
                        "%s; scored 0 and counted (reward/errors), as later ones will be", error
                    )
                self._has_failed = True
                failed = Score(reward=0.0, answer_found=False, reason="error", failed=True)
                return [failed] * len(responses)

        try:
            async with asyncio.TaskGroup() as tasks:
                runs = [tasks.create_task(run(entry)) for entry in entries]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [task.result() for task in runs]


def _has_failed(response: Response) -> bool:
    return response.sample.finish_reason == FinishReason.ENVIRONMENT


def _add(
    first: Score, before: Score, entries: Sequence[RewardFunctionConfig], scores: Sequence[Score]
) -> Score:
    components, metrics = dict(before.components), dict(before.metrics)
    for entry, score in zip(entries, scores, strict=True):
        components[entry.name] = score.reward
        metrics |= {f"{entry.name}/{name}": value for name, value in score.metrics.items()}
    return replace(
        first,
        reward=before.reward
        + sum(entry.weight * score.reward for entry, score in zip(entries, scores, strict=True)),
        timed_out=before.timed_out or any(score.timed_out for score in scores),
        components=components,
        metrics=metrics,
        failed=before.failed or any(score.failed for score in scores),
    )
