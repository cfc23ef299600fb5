"""avg@k, pass@k and maj@k of one problem, and confidence intervals over problems or over seeds.

Each estimate is the expectation over all subsets of k of a problem's n samples, drawn without
replacement, so that none depends on chance or on the order of the samples. The value of a set is
the mean over its problems.

Intervals over problems come from resampling the problems. A resample draws as many problems as
there are, with replacement, each with all its samples; the 95 % interval reaches from the 2.5th to
the 97.5th percentile of the means of all resamples (docs/evaluation.md says how often it covers the
true mean). Intervals over seeds, which are few, are Student's.

Shape legend: K = k + 1 (sizes of a subset), J = how many clusters may share the most votes, plus 1
(for none), P = problems, S = seeds, M = estimates, B = resamples.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NO_VOTE = -1
"""The vote of a sample without an answer."""
UNKNOWN_VOTE = -2
"""The vote of a sample with an answer that its reward function did not report."""
_RIGHT_REWARD = 1.0 - 1e-9
"""A sample with at least this reward is right; below 1, since 0.7 + 0.2 + 0.1 is."""
_TAIL = 0.025
"""Share of the resamples beyond each end of an interval."""
_ROUNDING = 1e-12
"""A mean difference this small is 0, and so is a standard error."""
_CHUNK_ENTRIES = 1 << 20
"""Draws held at a time."""


class Candidate(NamedTuple):
    """A cluster of equivalent answers to one problem."""

    num_votes: int
    num_right: int
    """The votes that are right: all or none where equivalence is exact."""

    @property
    def right_share(self) -> float:
        """The probability that one of its samples, drawn at random, is right."""
        return self.num_right / self.num_votes


def is_right(reward: float) -> bool:
    """Return whether a sample with this reward counts as right in pass@k and maj@k."""
    return reward >= _RIGHT_REWARD


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate 1 − C(n − c, k) / C(n, k) (arXiv 2107.03374, Eq. 1)."""
    assert 1 <= k <= num_samples, "larger k are left out"
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def candidates(votes: Sequence[int], rewards: Sequence[float]) -> list[Candidate]:
    """Count the votes for each cluster; a sample votes by its cluster's number or ``NO_VOTE``."""
    right = Counter(v for v, reward in zip(votes, rewards, strict=True) if is_right(reward))
    counts = sorted(Counter(votes).items())
    return [Candidate(count, right[vote]) for vote, count in counts if vote != NO_VOTE]


def majority_at_k(num_samples: int, clusters: Sequence[Candidate], k: int) -> float:
    """Return maj@k of one problem: the probability that the vote of k samples is right.

    The cluster with most votes wins. Clusters that share the most votes win equally often, and the
    winner answers with one of its samples, each equally often. Samples without an answer have no
    vote; where none of the k has one, the vote is wrong. The expectation over the subsets is exact:

        maj@k = Σ_t Σ_j (1/j) · [subsets in which j clusters have t votes, the others fewer,
                                 each counted Σ right_share of the j times] / C(n, k)

    The sum in brackets is a coefficient of a product over the clusters, which grows by one factor
    at a time; all terms are positive, so that nothing cancels.

    ``num_samples`` is n, those without an answer too.
    """
    assert 1 <= k <= num_samples, "larger k are left out"
    if not clusters:
        return 0.0
    num_silent = num_samples - sum(cluster.num_votes for cluster in clusters)
    most = max(cluster.num_votes for cluster in clusters)
    if k == num_samples:
        tied = [cluster.right_share for cluster in clusters if cluster.num_votes == most]
        return math.fsum(tied) / len(tied)
    won = [_won_with(votes, num_silent, clusters, k) for votes in range(1, min(k, most) + 1)]
    return math.fsum(won) / math.comb(num_samples, k)


def _won_with(num_votes: int, num_silent: int, clusters: Sequence[Candidate], k: int) -> float:
    """The sum of ``majority_at_k`` for one t: Σ_j (1/j) · […], as a number of subsets."""
    num_tied = min(k // num_votes, len(clusters))
    # How many subsets of the samples seen so far have each size, with j clusters of t votes and
    # none above; and the same, each counted Σ right_share times.
    subsets_KJ = np.zeros((k + 1, num_tied + 1))
    right_KJ = np.zeros_like(subsets_KJ)
    for size in range(min(num_silent, k) + 1):
        subsets_KJ[size, 0] = math.comb(num_silent, size)
    for cluster in clusters:
        max_below = min(num_votes - 1, cluster.num_votes)
        below_K = [math.comb(cluster.num_votes, v) for v in range(max_below + 1)]
        grown_KJ, grown_right_KJ = (_shifted_sum(t, below_K) for t in (subsets_KJ, right_KJ))
        if cluster.num_votes >= num_votes:
            ways = math.comb(cluster.num_votes, num_votes)
            rest = k + 1 - num_votes
            grown_KJ[num_votes:, 1:] += ways * subsets_KJ[:rest, :-1]
            grown_right_KJ[num_votes:, 1:] += ways * (
                right_KJ[:rest, :-1] + cluster.right_share * subsets_KJ[:rest, :-1]
            )
        subsets_KJ, right_KJ = grown_KJ, grown_right_KJ
    return math.fsum(right_KJ[k, j] / j for j in range(1, num_tied + 1))


def _shifted_sum(table_KJ: np.ndarray, ways: Sequence[int]) -> np.ndarray:
    """Σ_v ways[v] · (the table, v samples further)."""
    total_KJ = np.zeros_like(table_KJ)
    for shift, factor in enumerate(ways):
        total_KJ[shift:] += factor * table_KJ[: len(table_KJ) - shift]
    return total_KJ


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The mean difference of two results on the same problems, or by the same seeds."""

    difference: float
    low: float
    """Low end of the 95 % interval."""
    high: float
    p_value: float
    """Two-sided. Over problems twice the smaller share of resamples, itself added to them, whose
    mean difference is at most 0, and at least 0; at most 1. Over seeds that of Student's t-test."""


def intervals(values_PM: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    """Return the 95 % intervals of means over problems, [2, M]: low and high ends.

    Args:
        values_PM: [P, M] float64, each problem's estimates; all columns share the resamples.
        num_resamples: B.
        seed: Decides the resamples.
    """
    means_BM = _resampled_means(values_PM, num_resamples, seed)
    ends_2M: np.ndarray = np.quantile(means_BM, [_TAIL, 1 - _TAIL], axis=0)
    return ends_2M


def paired_difference(differences_P: np.ndarray, num_resamples: int, seed: int) -> PairedDifference:
    """Compare two results problem by problem.

    Args:
        differences_P: [P] float64, the second result minus the first.
        num_resamples: B; the smallest p-value is 2 / (B + 1).
        seed: Decides the resamples.
    """
    means_B = _resampled_means(differences_P[:, None], num_resamples, seed)[:, 0]
    low, high = np.quantile(means_B, [_TAIL, 1 - _TAIL])
    beyond = min(int((means_B <= _ROUNDING).sum()), int((means_B >= -_ROUNDING).sum()))
    return PairedDifference(
        difference=float(differences_P.mean()),
        low=float(low),
        high=float(high),
        p_value=min(1.0, 2 * (beyond + 1) / (num_resamples + 1)),
    )


def _resampled_means(values_PM: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    """Means of all resamples, [B, M]."""
    rng = np.random.default_rng(seed)
    num_problems = len(values_PM)
    rows = max(1, _CHUNK_ENTRIES // num_problems)
    equal_P = np.full(num_problems, 1 / num_problems)
    means = []
    for start in range(0, num_resamples, rows):
        # How often each problem is drawn.
        counts = rng.multinomial(num_problems, equal_P, size=min(rows, num_resamples - start))
        means.append(counts @ values_PM / num_problems)
    return np.concatenate(means)


def difference_over_seeds(differences_S: np.ndarray, limit: float = math.inf) -> PairedDifference:
    """Compare two groups of runs seed by seed, by Student's paired t-test.

    Values that are all equal say nothing about their spread: p is then 0, or 1 where they are 0.

    Args:
        differences_S: [S] float64 with S ≥ 2, the second group's score minus the first's.
        limit: Largest absolute difference that is possible: 1 for scores in [0, 1].
    """
    from scipy import special  # takes a fifth of a second

    mean, error = float(differences_S.mean()), _standard_error(differences_S)
    if abs(mean) <= _ROUNDING:
        p_value = 1.0
    elif error <= _ROUNDING:
        p_value = 0.0
    else:
        p_value = 2 * float(special.stdtr(len(differences_S) - 1, -abs(mean) / error))
    ends = student_interval(differences_S, limits=(-limit, limit))
    return PairedDifference(mean, *ends, p_value)


def student_interval(
    values_S: np.ndarray, level: float = 0.95, limits: tuple[float, float] = (-math.inf, math.inf)
) -> tuple[float, float]:
    """Return the ends of Student's interval of the mean: x̄ ± t · s / √S with S − 1 degrees.

    An end beyond the limits is cut to them, which leaves the coverage as it is.

    Args:
        values_S: [S] float64 with S ≥ 2.
        level: Share of such intervals that cover the true mean, if the values are normal.
        limits: Least and greatest value that the mean can have.
    """
    from scipy import special

    mean, error = float(values_S.mean()), _standard_error(values_S)
    half = error * float(special.stdtrit(len(values_S) - 1, (1 + level) / 2))
    return max(mean - half, limits[0]), min(mean + half, limits[1])


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979), in the given order."""
    count, largest = len(p_values), 0.0
    corrected = [0.0] * count
    for rank, index in enumerate(sorted(range(count), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def _standard_error(values_S: np.ndarray) -> float:
    """The standard error of the mean: s / √S, where s² divides by S − 1."""
    assert len(values_S) > 1, "one seed has no spread"
    return float(values_S.std(ddof=1)) / math.sqrt(len(values_S))
