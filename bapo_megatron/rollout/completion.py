"""One request to ``/generate`` and what it sampled, as typed records.

R = tokens of one completion, or of one piece of it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_megatron.data.version_spans import join_spans
from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.types import VersionSpans


_NUM_JOINED = 64


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How one request samples; everything else is sent explicitly as neutral."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    seed: int | None = None
    """Of this response; servers look at it with ``--enable-deterministic-inference`` only, and
    without it give all responses the same one then."""

    def to_json_dict(self) -> dict[str, float | int]:
        """The request's ``sampling_params``, complete, so that no server default acts."""
        return {
            "temperature": self.temperature,
            "max_new_tokens": self.max_new_tokens,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            **({} if self.seed is None else {"sampling_seed": self.seed}),
        }


def sample_seed(*identity: str | int) -> int:
    """A seed of its own for every response.

    Args:
        identity: The run's seed, and what tells the response from all others of the run.
    """
    return int.from_bytes(hashlib.sha256(json.dumps(identity).encode()).digest()[:4])


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request sampled, or a piece of it."""

    token_ids: np.ndarray
    """[R] int32."""
    logprobs: np.ndarray
    """[R] float32, finite; empty if not asked for."""
    versions: VersionSpans
    """Which weights version sampled which tokens."""
    finish_reason: FinishReason
    """ABORT for a piece that is not the last one."""


def join(parts: Sequence[Completion], finish_reason: FinishReason) -> Completion:
    """The pieces as one completion."""
    empty = Completion(
        np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32), (), finish_reason
    )
    return Completion(
        np.concatenate([empty.token_ids, *(part.token_ids for part in parts)]),
        np.concatenate([empty.logprobs, *(part.logprobs for part in parts)]),
        join_spans(part.versions for part in parts),
        finish_reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request to one server."""

    input_ids: Sequence[int]
    """Prompt, and what was sampled before."""
    sampling: SamplingSettings
    label: str
    """Names the request in errors."""
    version: int | None = None
    """Weights version that the server holds; if none, there is one piece, at the end."""
    return_logprobs: bool = True
    stream_tokens: int = 64
    """Length of a piece."""

    def to_json_dict(self) -> dict[str, Any]:
        """The body of the call."""
        stream = {"stream_interval": self.stream_tokens}
        return {
            "input_ids": list(self.input_ids),
            "sampling_params": self.sampling.to_json_dict() | stream,
            "return_logprob": self.return_logprobs,
            "stream": True,
        }


class CompletionSink:
    """Takes what a request yields, and keeps it."""

    def __init__(self) -> None:
        self._parts: list[Completion] = []
        self._num_small = 0

    def is_known(self, version: int) -> bool:
        """Whether this weights version may have sampled."""
        return True

    def first_tokens(self, cached_tokens: int) -> None:
        """The first tokens came; the server had so many tokens of the input in its cache."""

    def take(self, part: Completion) -> None:
        """A piece; the last one has the reason why the request ended, and may have no token."""
        self._parts.append(part)
        self._num_small += 1
        if self._num_small == _NUM_JOINED:
            # A piece of few tokens takes 100 times their memory.
            self._parts[-_NUM_JOINED:] = [join(self._parts[-_NUM_JOINED:], part.finish_reason)]
            self._num_small = 0

    def completion(self) -> Completion:
        """What was taken so far; ABORT if nothing was."""
        reason = self._parts[-1].finish_reason if self._parts else FinishReason.ABORT
        return join(self._parts, reason)
