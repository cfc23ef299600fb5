"""The weights versions of a response's tokens, and the tokens that are too stale to train on.

Versions are stored as runs of equal ones, at most one more than weight syncs during the response.

The age of a token is the number of optimizer updates since the weights that sampled it: the version
of its batch (updates at the weight sync when the batch was formed) minus its own. An environment's
tokens have neither version nor age.

Shape legend: Q = tokens of one response that the policy sampled.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from bapo_megatron.config.rollout import StalenessConfig
from bapo_megatron.types import VersionSpan, VersionSpans


def spans_of(versions_Q: ArrayLike) -> VersionSpans:
    """Find the runs of equal versions in [Q] weights versions, one per token."""
    versions_Q = np.asarray(versions_Q, dtype=np.int64)
    starts = np.flatnonzero(np.diff(versions_Q, prepend=versions_Q[:1] - 1))
    counts = np.diff(starts, append=len(versions_Q))
    return tuple(map(VersionSpan, versions_Q[starts].tolist(), counts.tolist()))


def join_spans(parts: Iterable[VersionSpans]) -> VersionSpans:
    """Join the spans of a response's pieces; neighbours of one version become one."""
    joined: list[VersionSpan] = []
    for span in (span for part in parts for span in part):
        if joined and joined[-1].version == span.version:
            span = VersionSpan(span.version, joined.pop().num_tokens + span.num_tokens)
        joined.append(span)
    return tuple(joined)


def num_spanned(spans: VersionSpans) -> int:
    """Count the tokens that the spans cover: Q."""
    return sum(span.num_tokens for span in spans)


def token_versions(spans: Sequence[VersionSpan]) -> np.ndarray:
    """Return the weights version of every sampled token, [Q] int64."""
    versions, counts = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    return np.repeat(versions, counts)


def response_age(spans: VersionSpans, version: int, measure: Literal["mean", "oldest"]) -> float:
    """Return the age of a whole response at ``version``; 0 if it has no tokens.

    ``measure``: the ``mean`` over its tokens, or the age of its ``oldest`` one.
    """
    if not spans:
        return 0.0
    if measure == "oldest":
        return float(version - min(span.version for span in spans))
    total = sum((version - span.version) * span.num_tokens for span in spans)
    return total / num_spanned(spans)


def trainable_mask(spans: VersionSpans, version: int, limit: StalenessConfig) -> np.ndarray:
    """Return which tokens stay in the loss at ``version``, [Q] bool.

    ``measure: token`` masks each token that is older than ``max_age``; the other measures mask all
    tokens of a response that is older. Without ``max_age``, or with another ``action``, all stay.
    """
    if limit.max_age is None or limit.action != "mask":
        return np.ones(num_spanned(spans), dtype=bool)
    if limit.measure == "token":
        return version - token_versions(spans) <= limit.max_age
    is_fresh = response_age(spans, version, limit.measure) <= limit.max_age
    return np.full(num_spanned(spans), is_fresh)
