"""Terms that training adds to the functions' rewards; evaluations are scored without them.

Q = tokens of one response that the policy sampled.
"""

import asyncio
from typing import NamedTuple

import numpy as np

from bapo_megatron.config.reward import OverlongConfig, RewardConfig
from bapo_megatron.reward.base import Response, Score
from bapo_megatron.reward.pool import RewardPool


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
