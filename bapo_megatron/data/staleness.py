"""How old the tokens of a response are, and which of them are too old to be trained on.

The age of a token is the number of optimizer updates since the weights that sampled it: the version
of its batch (updates at the weight sync when the batch was formed) minus its own.

Tokens that an environment wrote have no age.

Shape legend: Q = tokens of one response that the policy sampled.

Weights versions of the tokens of a response, as runs of equal ones.

Engines answer piece by piece with one version each, so a response of tens of thousands of tokens
has as many spans as weight syncs fell into it, plus one.

Shape legend: Q = tokens of one response that the policy sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from bapo_megatron.types import VersionSpan, VersionSpans

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike

    from bapo_megatron.config.rollout import StalenessConfig
    from bapo_megatron.types import VersionSpans


def spans_of(versions_R: ArrayLike) -> VersionSpans:
    """Find the runs of equal versions.

    Args:
        versions_R: [Q] weights version that sampled each token.
    """
    versions_R = np.asarray(versions_R, dtype=np.int64)
    starts = np.flatnonzero(np.diff(versions_R, prepend=versions_R[:1] - 1))
    counts = np.diff(starts, append=len(versions_R))
    return tuple(map(VersionSpan, versions_R[starts].tolist(), counts.tolist()))


def join_spans(parts: Iterable[VersionSpans]) -> VersionSpans:
    """The spans of a response from those of its pieces; neighbours of one version become one."""
    joined: list[VersionSpan] = []
    for span in (span for part in parts for span in part):
        if joined and joined[-1].version == span.version:
            span = VersionSpan(span.version, joined.pop().num_tokens + span.num_tokens)
        joined.append(span)
    return tuple(joined)


def num_spanned(spans: VersionSpans) -> int:
    """How many tokens the spans cover: Q."""
    return sum(span.num_tokens for span in spans)


def token_versions(spans: VersionSpans) -> np.ndarray:
    """Weights version of every sampled token, [Q] int64."""
    versions, counts = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    return np.repeat(versions, counts)


def token_ages(spans: VersionSpans, version: int) -> np.ndarray:
    """Age of every token, [Q] int64.

    Args:
        spans: Which weights version sampled which tokens.
        version: Weights version of now: that of the batch, or what the engines hold.
    """
    return version - token_versions(spans)


def response_age(spans: VersionSpans, version: int, measure: Literal["mean", "oldest"]) -> float:
    """Age of a whole response; that of one without tokens is 0.

    Args:
        spans: Which weights version sampled which tokens.
        version: Weights version of now.
        measure: The ``mean`` over its tokens, or that of its ``oldest`` one.
    """
    if not spans:
        return 0.0
    if measure == "oldest":
        return float(version - min(span.version for span in spans))
    total = sum((version - span.version) * span.num_tokens for span in spans)
    return total / num_spanned(spans)


def trainable_mask(spans: VersionSpans, version: int, limit: StalenessConfig) -> np.ndarray:
    """Which tokens stay in the loss, [Q] bool; all of them unless ``action: mask`` has a limit.

    Args:
        spans: Which weights version sampled which tokens.
        version: Weights version of the batch.
        limit: ``measure: token`` masks every token older than ``max_age`` by itself, the other
            measures all tokens of a response that is older.
    """
    age_Q = token_ages(spans, version)
    if limit.max_age is None or limit.action != "mask":
        return np.ones(age_Q.shape, dtype=bool)
    if limit.measure == "token":
        return age_Q <= limit.max_age
    is_young = response_age(spans, version, limit.measure) <= limit.max_age
    return np.full(age_Q.shape, is_young)
