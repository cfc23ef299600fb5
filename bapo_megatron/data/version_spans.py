"""Weights versions of the tokens of a response, as runs of equal ones.

Engines answer piece by piece with one version each, so a response of tens of thousands of tokens
has as many spans as weight syncs fell into it, plus one.

Shape legend: Q = tokens of one response that the policy sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bapo_megatron.types import VersionSpan, VersionSpans

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike


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
