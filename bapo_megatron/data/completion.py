"""What an engine samples for one request, whole or in pieces.

R = tokens of a completion, or of a piece of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bapo_megatron.data.staleness import join_spans
from bapo_megatron.types import FinishReason, VersionSpans


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens of one request, or a piece of them."""

    token_ids: np.ndarray
    """[R] int32; an end-of-sequence token comes last."""
    logprobs: np.ndarray
    """[R] float32, finite: log_softmax(logits / T); empty if not asked for."""
    versions: VersionSpans
    """The weights version of each token."""
    finish_reason: FinishReason
    """ABORT for every piece but the last."""
    routes: np.ndarray | None = None
    """[rows, layers · experts per token] int8 or int16: the experts of the tokens from
    ``GenerateRequest.routes_from`` on, layer by layer; over all pieces, of every token but the
    last, which is not processed. −1 where they are not known; meaningless in layers without
    experts."""


def join(parts: Sequence[Completion], finish_reason: FinishReason) -> Completion:
    """Join pieces into one completion."""
    if len(parts) == 1:
        return replace(parts[0], finish_reason=finish_reason)
    routes = [part.routes for part in parts if part.routes is not None]
    return Completion(
        np.concatenate([np.empty(0, np.int32), *(part.token_ids for part in parts)]),
        np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)]),
        join_spans(part.versions for part in parts),
        finish_reason,
        np.concatenate(routes) if routes else None,
    )
