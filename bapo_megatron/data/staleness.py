"""How old the tokens of a response are, and which of them are too old to be trained on.

The age of a token is the number of optimizer updates since the weights that sampled it: the version
of its batch (updates at the weight sync when the batch was formed) minus its own.

Tokens that an environment wrote have no age.

Shape legend: Q = tokens of one response that the policy sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from bapo_megatron.data.version_spans import num_spanned, token_versions

if TYPE_CHECKING:
    from bapo_megatron.config.rollout import StalenessConfig
    from bapo_megatron.types import VersionSpans


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
