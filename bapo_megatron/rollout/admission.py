"""Admission: which engine gets a request, and when, by the tokens that it will hold there.

An engine with too many requests preempts some and recomputes them later; one with too few has a low
throughput. Peak use of the KV cache depends on the lengths of the responses, which are predicted
from all responses so far; an engine gets a request if its cache is expected to hold the peak and
fewer requests run than it has, for instance, recurrent states for.
Engines that do not report their cache get a fixed number of requests.

N = requests of an engine; T = times ahead, in decode steps; E = bins of response lengths.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bapo_megatron.engine.pooled import PooledEngine

_EDGES_E = np.concatenate([[0.0], 16.0 * 2.0 ** (np.arange(88) / 4)])
"""Lower edges of the length bins, in tokens: four per octave, up to 56 million."""
_EDGES = _EDGES_E.tolist()
_AHEAD_T = np.concatenate([[0.0], 16.0 * 2.0 ** (np.arange(34) / 2)])
_NUM_REMEMBERED = 4096
"""Responses after which an earlier one counts for 1/e: lengths change with the weights."""
_DEVIATIONS = 1.0
"""Margin for longer responses, in standard deviations of the sum."""
_REFRESH_SHARE = 1 / 64
"""New tokens, as a fraction of the cache, after which a forecast is renewed."""
_MAX_UNREPORTED = 512
"""Limit of requests over all engines, for an engine that does not report its cache."""


class ResponseLengths:
    """Kaplan-Meier estimate over bins of lengths; unfinished responses are censored observations.

    The prior, worth one response, spreads lengths evenly over the bins up to the limit.
    """

    def __init__(self) -> None:
        self._reached_E = np.zeros(len(_EDGES))
        self._ended_E = np.zeros(len(_EDGES))
        self._prior_E = np.ones(len(_EDGES))
        self._max_length = 0
        self._log_survival_E: np.ndarray | None = None

    def begin(self, position: int, limit: int) -> None:
        """Count a response that continues at ``position``; ``limit`` is its maximum length."""
        self._reached_E[_bin_of(position)] += 1
        if limit > self._max_length:
            self._max_length, num_bins = limit, _bin_of(limit) + 1
            self._prior_E = 1 / np.maximum(num_bins - np.arange(len(_EDGES)), 1)
        self._log_survival_E = None

    def advance(self, before: int, after: int) -> None:
        """Count the growth of a response from one position to another."""
        if (last := _bin_of(after)) > (first := _bin_of(before)):
            self._reached_E[first + 1 : last + 1] += 1

    def leave(self, position: int, *, has_ended: bool) -> None:
        """Count a response that left: it has ended, or may continue later."""
        counts_E = self._ended_E if has_ended else self._reached_E
        counts_E[_bin_of(position)] += 1 if has_ended else -1
        if has_ended:
            self._reached_E *= 1 - 1 / _NUM_REMEMBERED
            self._ended_E *= 1 - 1 / _NUM_REMEMBERED
        self._log_survival_E = None

    def log_survival(self, positions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return log P(a response exceeds each position)."""
        if self._log_survival_E is None:
            at_risk_E = np.maximum(self._reached_E, self._ended_E) + 1
            hazard_E = np.minimum((self._ended_E + self._prior_E) / at_risk_E, 1 - 1e-9)
            self._log_survival_E = np.concatenate([[0.0], np.log1p(-hazard_E[:-1]).cumsum()])
        log_survival: NDArray[np.float64] = np.interp(positions, _EDGES_E, self._log_survival_E)
        return log_survival


def _bin_of(position: int) -> int:
    return bisect_right(_EDGES, position) - 1


@dataclass(slots=True, eq=False)
class Claim:
    """What one request holds in an engine's KV cache."""

    affinity: int
    """Requests of one affinity share a prompt."""
    prompt_tokens: int
    position: int
    """Response tokens so far."""
    limit: int
    """Maximum number of response tokens."""


class Forecast:
    """Mean and variance of the tokens in a cache at each time ahead."""

    def __init__(self, mean_T: np.ndarray, variance_T: np.ndarray) -> None:
        self.mean_T, self.variance_T = mean_T, variance_T
        self.expected = float(mean_T.max())
        """Expected peak, in tokens."""
        self.high = float((mean_T + _DEVIATIONS * np.sqrt(variance_T)).max())
        """The peak with a margin for longer responses."""


@dataclass(eq=False)
class CacheUse:
    """The requests of one engine, and their expected use of its KV cache."""

    lengths: ResponseLengths
    claims: dict[Claim, None] = field(default_factory=dict)
    """In order of arrival."""
    _new_tokens: int = 0
    """Tokens since the forecast."""
    _forecast: Forecast | None = None
    """None if it is outdated."""

    def add(self, claim: Claim) -> None:
        """Add a request."""
        if self._forecast is not None:
            self._forecast = self._with(claim)
        self.claims[claim] = None

    def remove(self, claim: Claim) -> None:
        """Remove a request."""
        del self.claims[claim]
        self._forecast = None

    def count(self, num_tokens: int, max_tokens: float) -> None:
        """Count new tokens; after more than ``max_tokens`` the forecast is outdated."""
        self._new_tokens += num_tokens
        if self._new_tokens > max_tokens:
            self._forecast = None

    def forecast(self, claim: Claim | None = None) -> Forecast:
        """Forecast the cache, with one more request if ``claim`` is given."""
        if self._forecast is None:
            shared = Counter(other.affinity for other in self.claims)
            prompts = [other.prompt_tokens / shared[other.affinity] for other in self.claims]
            self._forecast = self._forecast_of(list(self.claims), prompts)
            self._new_tokens = 0
        return self._forecast if claim is None else self._with(claim)

    def _with(self, claim: Claim) -> Forecast:
        assert self._forecast is not None
        is_shared = any(other.affinity == claim.affinity for other in self.claims)
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
    """Chooses an engine for each request, or makes it wait."""

    def __init__(self, max_requests: int | None) -> None:
        """``max_requests``: ``rollout.max_connections``."""
        self._lengths = ResponseLengths()
        self._max_requests = max_requests
        self._uses = defaultdict[PooledEngine, CacheUse](lambda: CacheUse(self._lengths))
        self._engine_by_affinity: dict[int, PooledEngine] = {}

    def choose(
        self, engines: Sequence[PooledEngine], claim: Claim, *, is_due: bool
    ) -> PooledEngine | None:
        """Admit a request to one of the engines; return None if it must wait.

        Prefer the engine of requests that share its prompt, unless another has much less to do:
        whole groups on one server made the end of a simulated step 1.4 times as long. A request
        that ``is_due`` does not wait.
        """
        least_busy = min(engines, key=self.load)
        least, one_more = self.load(least_busy), self.load(least_busy, claim)
        # Up to a quarter more load, plus four requests per rank.
        max_load = 1.25 * least + 4 * (one_more - least) * least_busy.properties.num_ranks
        before = self._engine_by_affinity.get(claim.affinity)
        is_near = before is not None and before in engines and self.load(before) <= max_load
        for engine in (before, least_busy) if before is not None and is_near else (least_busy,):
            if is_due or self._has_room(engine, claim):
                self._engine_by_affinity[claim.affinity] = engine
                self._lengths.begin(claim.position, claim.limit)
                self._uses[engine].add(claim)
                return engine
        return None

    def advance(self, engine: PooledEngine, claim: Claim, num_tokens: int) -> None:
        """Count new tokens of a request."""
        position, claim.position = claim.position, claim.position + num_tokens
        self._lengths.advance(position, claim.position)
        self._uses[engine].count(num_tokens, _REFRESH_SHARE * (engine.properties.cache_tokens or 0))

    def release(self, engine: PooledEngine, claim: Claim, *, has_ended: bool) -> None:
        """Remove a request; ``has_ended``: with an end token, not at a limit or by an abort."""
        self._lengths.leave(claim.position, has_ended=has_ended)
        self._uses[engine].remove(claim)

    def forget(self, affinity: int) -> None:
        """Forget the engine of an affinity."""
        self._engine_by_affinity.pop(affinity, None)

    def remove(self, engine: PooledEngine) -> None:
        """Forget an engine that has left the run and has no requests."""
        self._uses.pop(engine, None)

    def load(self, engine: PooledEngine, claim: Claim | None = None) -> float:
        """Return the expected use of the scarcer: cache or requests; or requests per rank."""
        use = self._uses[engine]
        num_requests = len(use.claims) + (claim is not None)
        if engine.properties.cache_tokens is None:
            return num_requests / engine.properties.num_ranks
        of_cache = use.forecast(claim).expected / engine.properties.cache_tokens
        return max(of_cache, num_requests / (engine.properties.max_requests or math.inf))

    def _has_room(self, engine: PooledEngine, claim: Claim) -> bool:
        use, max_requests = self._uses[engine], self._max_requests
        if engine.properties.cache_tokens is None:
            max_requests = max_requests or _MAX_UNREPORTED
        elif use.claims and use.forecast(claim).high > engine.properties.cache_tokens:
            return False  # an idle engine takes anything, or refuses it
        if (
            engine.properties.max_requests is not None
            and len(use.claims) >= engine.properties.max_requests
        ):
            return False
        num_requests = sum(len(use.claims) for use in self._uses.values())
        return max_requests is None or num_requests < max_requests

    def has_requests(self, engine: PooledEngine) -> bool:
        """Whether an engine has requests."""
        return bool(self._uses[engine].claims)
