"""One request to ``/generate`` and its answer, as typed records.

R = tokens of one completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bapo_megatron.types import FinishReason


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How one request samples; everything else is sent explicitly as neutral."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0

    def to_json_dict(self) -> dict[str, float | int]:
        """The request's ``sampling_params``, complete, so that no server default acts."""
        return {
            "temperature": self.temperature,
            "max_new_tokens": self.max_new_tokens,
            "top_p": self.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
        }


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request sampled."""

    token_ids: np.ndarray
    """[R] int64."""
    logprobs: np.ndarray
    """[R] float32, finite; empty if not asked for."""
    versions: np.ndarray
    """[R] int64: the weights version that sampled each token."""
    finish_reason: FinishReason


def parse_completion(
    answer: dict[str, Any], max_new_tokens: int, return_logprobs: bool
) -> Completion:
    """Check an answer of ``/generate``.

    Raises:
        ValueError: What is wrong with it.
    """
    meta = answer["meta_info"]
    token_ids = np.asarray(answer["output_ids"], dtype=np.int64)
    finish_reason = _parse_finish(meta["finish_reason"])
    if finish_reason is FinishReason.LENGTH and len(token_ids) < max_new_tokens:
        raise ValueError(
            f"cut off after {len(token_ids)} of {max_new_tokens} tokens because the server's "
            "context or KV cache is too small; raise rollout.server.max_total_tokens"
        )
    logprobs = np.empty(0, dtype=np.float32)
    if return_logprobs:
        logprobs = _parse_logprobs(meta.get("output_token_logprobs") or [], token_ids)
    return Completion(token_ids, logprobs, _parse_versions(meta, len(token_ids)), finish_reason)


def _parse_finish(finish: dict[str, Any]) -> FinishReason:
    try:
        return FinishReason(finish["type"])
    except ValueError:
        raise ValueError(f"unknown finish reason {finish}") from None


def _parse_logprobs(rows: list[list[Any]], token_ids: np.ndarray) -> np.ndarray:
    """[R] float32 from rows ``[logprob, token id, text or null]``."""
    if [row[1] for row in rows] != token_ids.tolist():
        raise ValueError(
            f"log-probs of {len(rows)} tokens do not belong to its {len(token_ids)} tokens"
        )
    # NaN is null in JSON, and becomes NaN again here.
    logprobs = np.asarray([row[0] for row in rows], dtype=np.float32)
    unusable = np.flatnonzero(~np.isfinite(logprobs))
    if len(unusable):
        position = int(unusable[0])
        raise ValueError(
            f"log-prob {rows[position][0]} at response token {position} (id "
            f"{token_ids[position]}): the weights it was given, or its numerics, are broken"
        )
    return logprobs


def _parse_versions(meta: dict[str, Any], num_tokens: int) -> np.ndarray:
    """[R] int64: the version that sampled each token."""
    spans = meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": num_tokens}
    ]
    versions = np.full(num_tokens, -1, dtype=np.int64)
    for span in spans:
        versions[span["start"] : span["end"]] = int(span["version"])
    if (versions < 0).any():
        raise ValueError(f"weight versions {spans} do not cover its {num_tokens} tokens")
    return versions
