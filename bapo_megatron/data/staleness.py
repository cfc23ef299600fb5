"""How old the tokens of a response are, and which of them are too old to be trained on.

The age of a token is the number of optimizer updates since the weights that sampled it: the version
of its batch (updates at the weight sync when the batch was formed) minus its own.

Shape legend: R = response tokens of one sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from bapo_megatron.config.rollout import StalenessConfig


def token_ages(versions_R: ArrayLike, version: int) -> np.ndarray:
    """Age of every token, [R] int64.

    Args:
        versions_R: [R] weights version that sampled each token.
        version: Weights version of now: that of the batch, or what the engines hold.
    """
    return version - np.asarray(versions_R, dtype=np.int64)


def response_age(versions_R: ArrayLike, version: int, measure: Literal["mean", "oldest"]) -> float:
    """Age of a whole response; that of one without tokens is 0.

    Args:
        versions_R: [R] weights version that sampled each token.
        version: Weights version of now.
        measure: The ``mean`` over its tokens, or that of its ``oldest`` one.
    """
    age_R = token_ages(versions_R, version)
    if not age_R.size:
        return 0.0
    return float(age_R.mean() if measure == "mean" else age_R.max())


def trainable_mask(versions_R: ArrayLike, version: int, limit: StalenessConfig) -> np.ndarray:
    """Which tokens stay in the loss, [R] bool; all of them unless ``action: mask`` has a limit.

    Args:
        versions_R: [R] weights version that sampled each token.
        version: Weights version of the batch.
        limit: ``measure: token`` masks every token older than ``max_age`` by itself, the other
            measures all tokens of a response that is older.
    """
    age_R = token_ages(versions_R, version)
    if limit.max_age is None or limit.action != "mask":
        return np.ones(age_R.shape, dtype=bool)
    if limit.measure == "token":
        return age_R <= limit.max_age
    is_young = response_age(versions_R, version, limit.measure) <= limit.max_age
    return np.full(age_R.shape, is_young)
