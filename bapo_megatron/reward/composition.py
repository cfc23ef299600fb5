"""The rewards of a run: the weighted sum of all functions, and the terms that training adds.

Evaluations are scored without these terms.

Shape legend: Q = tokens of one response that the policy sampled.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import numpy as np

from bapo_megatron.config.reward import OverlongConfig, RewardConfig, RewardFunctionConfig
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
        """End every worker and connection."""
        await asyncio.gather(
            self.pool.close(), *(service.close() for service in self._services.values())
        )

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


class ShapedReward(NamedTuple):
    """The reward of a training sample and its terms."""

    reward: float
    """Σ weight · function, plus every term of ``terms``."""
    terms: dict[str, float]
    """The configured terms of shaping, by name."""
    timed_out: bool = False
    """The format's pattern exceeded a limit, which counts as no match."""


class Shaping:
    """Applies ``reward.truncated``, ``overlong``, ``format`` and ``repetition``."""

    def __init__(self, config: RewardConfig, max_response_tokens: int, pool: RewardPool) -> None:
        """Keep the reward section, L_max, and the pool that matches patterns under limits."""
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._pool = pool

    async def apply(
        self, score: Score, response: Response, token_ids_Q: np.ndarray
    ) -> ShapedReward:
        """Return the reward of a training sample from its score by the functions."""
        config, terms, timed_out = self._config, {}, False
        if config.truncated == "zero":
            terms["truncated"] = -score.reward if response.sample.is_truncated else 0.0
        if config.overlong is not None:
            terms["overlong"] = overlong_penalty(
                response.sample.num_tokens, self._max_response_tokens, config.overlong
            )
        if config.format is not None:
            matches = await self._pool.matches(config.format.pattern, response.text)
            timed_out = matches is None
            terms["format"] = config.format.reward if matches else 0.0
        if config.repetition is not None:
            # In a thread: sorting 64k tokens takes tens of milliseconds, and numpy drops the GIL.
            share = await asyncio.to_thread(
                repeated_share, token_ids_Q, config.repetition.ngram_tokens
            )
            terms["repetition"] = -config.repetition.penalty * share
        return ShapedReward(score.reward + sum(terms.values()), terms, timed_out)


def overlong_penalty(num_tokens: int, max_tokens: int, config: OverlongConfig) -> float:
    """Return DAPO's soft overlong punishment times ``penalty`` (arXiv 2503.14476, Eq. 13).

        0                                  where |y| ≤ L_max − L_cache
        (L_max − L_cache − |y|) / L_cache  up to L_max
        −1                                 beyond it

    |y| is ``num_tokens``, L_max ``max_tokens`` and L_cache ``config.buffer_tokens``.
    """
    exceeding = num_tokens - (max_tokens - config.buffer_tokens)
    return -config.penalty * min(max(exceeding / config.buffer_tokens, 0.0), 1.0)


def repeated_share(token_ids_Q: np.ndarray, ngram_tokens: int) -> float:
    """Return 1 − |distinct n-grams| / |n-grams|; 0 for a response without an n-gram.

    The measure of Yeo et al. (arXiv 2502.03373, Appendix C.2), of tokens instead of words;
    n is ``ngram_tokens``.
    """
    num_ngrams = len(token_ids_Q) - ngram_tokens + 1
    if num_ngrams < 1:
        return 0.0
    codes = np.unique(token_ids_Q, return_inverse=True)[1].astype(np.int64)
    # Codes of n-grams from those of two shorter ones, overlapping where n is not a power of 2.
    length = 1
    while length < ngram_tokens:
        step = min(length, ngram_tokens - length)
        pairs = codes[:-step] * (codes.max() + 1) + codes[step:]
        codes = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
        length += step
    return 1.0 - (int(codes.max()) + 1) / num_ngrams


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
