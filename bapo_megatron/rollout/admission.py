"""Which engine a request goes to, and when: by the tokens that it will hold in the engine's cache.

A cache that is too full retracts requests and computes them again later; one that is too empty
samples slowly. How full it becomes depends on how long the responses get. That is learnt from all
responses so far, and an engine takes a request if its cache is expected to suffice at the fullest
moment to come. Engines that do not report their cache take a fixed number of requests.

N = requests of an engine; T = moments ahead, in decode steps; E = bins of response lengths.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bapo_megatron.engine.pooled import PooledEngine

_EDGES_E = np.concatenate([[0.0], 16.0 * 2.0 ** (np.arange(88) / 4)])
"""Where the bins of lengths begin, in tokens: four to an octave, up to 56 million."""
_EDGES = _EDGES_E.tolist()
_AHEAD_T = np.concatenate([[0.0], 16.0 * 2.0 ** (np.arange(34) / 2)])
_NUM_REMEMBERED = 4096
"""Ended responses after which an earlier one counts 1/e: lengths change with the weights."""
_DEVIATIONS = 1.0
"""Room for responses that become longer than expected, in standard deviations of their sum."""
_REFRESH_SHARE = 1 / 64
"""A forecast is made anew when its requests have got this share of the cache as new tokens."""
_MAX_UNREPORTED = 512
"""Limit of requests over all engines, if one does not report its cache."""


class ResponseLengths:
    """Survival function of response lengths; unfinished responses are censored observations.

    A product-limit (Kaplan-Meier) estimate over bins. The prior, worth one response, spreads
    lengths evenly over the bins up to the limit.
    """

    def __init__(self) -> None:
        self._reached_E = np.zeros(len(_EDGES))
        self._ended_E = np.zeros(len(_EDGES))
        self._prior_E = np.ones(len(_EDGES))
        self._max_length = 0
        self._log_survival_E: np.ndarray | None = None

    def begin(self, position: int, limit: int) -> None:
        """Count a response that goes on at ``position`` and has at most ``limit`` tokens."""
        self._reached_E[_bin_of(position)] += 1
        if limit > self._max_length:
            self._max_length, num_bins = limit, _bin_of(limit) + 1
            self._prior_E = 1 / np.maximum(num_bins - np.arange(len(_EDGES)), 1)
        self._log_survival_E = None

    def advance(self, before: int, after: int) -> None:
        """Count that a response has got from one position to another."""
        if (last := _bin_of(after)) > (first := _bin_of(before)):
            self._reached_E[first + 1 : last + 1] += 1

    def leave(self, position: int, *, has_ended: bool) -> None:
        """Count that a response has ended there by itself; else it may go on later."""
        counts_E = self._ended_E if has_ended else self._reached_E
        counts_E[_bin_of(position)] += 1 if has_ended else -1
        if has_ended:
            self._reached_E *= 1 - 1 / _NUM_REMEMBERED
            self._ended_E *= 1 - 1 / _NUM_REMEMBERED
        self._log_survival_E = None

    def log_survival(self, positions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Logarithm of the probability that a response gets beyond each position."""
        if self._log_survival_E is None:
            at_risk_E = np.maximum(self._reached_E, self._ended_E) + 1
            hazard_E = np.minimum((self._ended_E + self._prior_E) / at_risk_E, 1 - 1e-9)
            self._log_survival_E = np.concatenate([[0.0], np.log1p(-hazard_E[:-1]).cumsum()])
        found: NDArray[np.float64] = np.interp(positions, _EDGES_E, self._log_survival_E)
        return found


def _bin_of(position: int) -> int:
    return bisect_right(_EDGES, position) - 1


@dataclass(slots=True, eq=False)
class Claim:
    """What one request holds in an engine's cache."""

    affinity: int
    """Requests of one affinity share a prompt."""
    prompt_tokens: int
    position: int
    """Response tokens so far."""
    limit: int
    """Most response tokens."""


class Forecast:
    """Expectation and variance of the tokens in a cache at each moment ahead."""

    def __init__(self, mean_T: np.ndarray, variance_T: np.ndarray) -> None:
        self.mean_T, self.variance_T = mean_T, variance_T
        self.expected = float(mean_T.max())
        """Tokens at the fullest moment."""
        self.high = float((mean_T + _DEVIATIONS * np.sqrt(variance_T)).max())
        """The same with room for responses that become longer than expected."""


@dataclass(eq=False)
class CacheUse:
    """The requests of one engine, and what they are expected to hold in its cache."""

    lengths: ResponseLengths
    claims: dict[Claim, None] = field(default_factory=dict)
    """In the order in which they came."""
    _new_tokens: int = 0
    """Tokens since the forecast."""
    _forecast: Forecast | None = None
    """None if it is outdated."""

    def add(self, claim: Claim) -> None:
        """Take a request."""
        if self._forecast is not None:
            self._forecast = self._with(claim)
        self.claims[claim] = None

    def remove(self, claim: Claim) -> None:
        """Forget a request."""
        del self.claims[claim]
        self._forecast = None

    def count(self, num_tokens: int, max_tokens: float) -> None:
        """Count new tokens; after more than ``max_tokens`` the forecast is outdated."""
        self._new_tokens += num_tokens
        if self._new_tokens > max_tokens:
            self._forecast = None

    def forecast(self, claim: Claim | None = None) -> Forecast:
        """What will be in the cache, with one more request if it is given."""
        if self._forecast is None:
            shared = Counter(each.affinity for each in self.claims)
            prompts = [each.prompt_tokens / shared[each.affinity] for each in self.claims]
            self._forecast = self._forecast_of(list(self.claims), prompts)
            self._new_tokens = 0
        return self._forecast if claim is None else self._with(claim)

    def _with(self, claim: Claim) -> Forecast:
        assert self._forecast is not None
        is_shared = any(each.affinity == claim.affinity for each in self.claims)
        more = self._forecast_of([claim], [0 if is_shared else claim.prompt_tokens])
        before = self._forecast
        return Forecast(before.mean_T + more.mean_T, before.variance_T + more.variance_T)

    def _forecast_of(self, claims: Sequence[Claim], prompts: Sequence[float]) -> Forecast:
        position_N = np.array([claim.position for claim in claims], dtype=float)
        limit_N = np.array([claim.limit for claim in claims], dtype=float)
        position_NT = position_N[:, None] + _AHEAD_T
        log_survival_NT = self.lengths.log_survival(position_NT)
        alive_NT = np.exp(log_survival_NT - log_survival_NT[:, :1])
        alive_NT[position_NT > limit_N[:, None]] = 0
        tokens_NT = np.array(prompts, dtype=float)[:, None] + position_NT
        variance_T = (tokens_NT**2 * alive_NT * (1 - alive_NT)).sum(axis=0)
        return Forecast((tokens_NT * alive_NT).sum(axis=0), variance_T)


class Admission:
    """Chooses an engine for each request, or lets it wait."""

    def __init__(self, max_requests: int | None) -> None:
        """``max_requests``: ``rollout.max_connections``."""
        self._lengths = ResponseLengths()
        self._max_requests = max_requests
        self._uses: dict[PooledEngine, CacheUse] = {}
        self._engine_by_affinity: dict[int, PooledEngine] = {}

    def choose(
        self, engines: Sequence[PooledEngine], claim: Claim, *, is_due: bool
    ) -> PooledEngine | None:
        """Take a request in at one of the engines; None if it must wait until others have ended.

        It goes to the engine of those that share its prompt, unless another has much less to do: a
        cached prompt saves little beside a long response, and in the simulation of docs/benchmarks
        whole groups on one server made the end of a step 1.4 times as long. A request that
        ``is_due`` does not wait.
        """
        least_busy = min(engines, key=self.load)
        least, one_more = self.load(least_busy), self.load(least_busy, claim)
        # A quarter more, and four requests per rank.
        max_load = 1.25 * least + 4 * (one_more - least) * least_busy.num_ranks
        before = self._engine_by_affinity.get(claim.affinity)
        is_near = before is not None and before in engines and self.load(before) <= max_load
        for engine in (before, least_busy) if before is not None and is_near else (least_busy,):
            if is_due or self._has_room(engine, claim):
                self._engine_by_affinity[claim.affinity] = engine
                self._lengths.begin(claim.position, claim.limit)
                self._use(engine).add(claim)
                return engine
        return None

    def advance(self, engine: PooledEngine, claim: Claim, num_tokens: int) -> None:
        """Count new tokens of a request."""
        position, claim.position = claim.position, claim.position + num_tokens
        self._lengths.advance(position, claim.position)
        self._use(engine).count(num_tokens, _REFRESH_SHARE * (engine.cache_tokens or 0))

    def release(self, engine: PooledEngine, claim: Claim, *, has_ended: bool) -> None:
        """Forget a request; ``has_ended``: by itself, not at a limit and not by an abort."""
        self._lengths.leave(claim.position, has_ended=has_ended)
        self._use(engine).remove(claim)

    def forget(self, affinity: int) -> None:
        """Forget where requests of an affinity went."""
        self._engine_by_affinity.pop(affinity, None)

    def remove(self, engine: PooledEngine) -> None:
        """Forget an engine that leaves the run, and has no requests any more."""
        self._uses.pop(engine, None)

    def load(self, engine: PooledEngine, claim: Claim | None = None) -> float:
        """Expected share of the cache at its fullest moment to come, or requests per rank.

        With ``claim``, as it would be with one more request.
        """
        use = self._use(engine)
        if engine.cache_tokens is None:
            return (len(use.claims) + (claim is not None)) / engine.num_ranks
        return use.forecast(claim).expected / engine.cache_tokens

    def _has_room(self, engine: PooledEngine, claim: Claim) -> bool:
        use, max_requests = self._use(engine), self._max_requests
        if engine.cache_tokens is None:
            max_requests = max_requests or _MAX_UNREPORTED
        elif use.claims and use.forecast(claim).high > engine.cache_tokens:
            return False  # an empty one takes anything, or says why it cannot
        return max_requests is None or self.num_requests < max_requests

    @property
    def num_requests(self) -> int:
        """Requests that engines have."""
        return sum(len(use.claims) for use in self._uses.values())

    def has_requests(self, engine: PooledEngine) -> bool:
        """Whether an engine has any of them."""
        return bool(self._use(engine).claims)

    def _use(self, engine: PooledEngine) -> CacheUse:
        if engine not in self._uses:
            self._uses[engine] = CacheUse(self._lengths)
        return self._uses[engine]
