"""The rollout buffer as JSON values for a checkpoint; arrays as base64 of little-endian bytes."""

from __future__ import annotations

import base64
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_megatron.rollout.buffer import PendingGroup, PendingSample
from bapo_megatron.types import FinishReason, Prompt, Sample, VersionSpan, WrittenSpan

if TYPE_CHECKING:
    from bapo_megatron.rollout.buffer import RolloutBuffer
    from bapo_megatron.types import PromptTokens

_FORMAT = 5
_ARRAYS = {"response_token_ids": "<i4", "behaviour_logprobs": "<f4"}


def buffer_to_json(buffer: RolloutBuffer) -> dict[str, Any]:
    """Everything that ``buffer_from_json`` needs."""
    return {
        "format": _FORMAT,
        "next_group_id": buffer.next_group_id,
        "num_trained": buffer.num_trained,
        "dropped": dict(buffer.dropped),
        "groups": [_group_to_json(group) for group in buffer],
        "earlier": [[_group_to_json(group) for group in batch] for batch in buffer.earlier],
    }


def buffer_from_json(buffer: RolloutBuffer, state: dict[str, Any]) -> None:
    """Put what ``buffer_to_json`` returned into ``buffer``.

    Raises:
        ValueError: Another version of this program wrote it.
    """
    if state["format"] != _FORMAT:
        raise ValueError(
            f"cannot restore the rollout buffer: its format is {state['format']}, this version "
            f"reads {_FORMAT}; resume with the version that wrote the checkpoint"
        )
    groups = [_group_from_json(saved) for saved in state["groups"]]
    buffer.groups = {group.group_id: group for group in groups}
    buffer.next_group_id = state["next_group_id"]
    buffer.num_trained = state["num_trained"]
    buffer.dropped = Counter(state["dropped"])
    earlier = [tuple(_group_from_json(saved) for saved in batch) for batch in state["earlier"]]
    buffer.earlier = deque(earlier, buffer.earlier.maxlen)
    buffer.check()


def _group_to_json(group: PendingGroup) -> dict[str, Any]:
    prompt = group.samples[0].prompt
    return {
        "group_id": group.group_id,
        "carries": group.carries,
        "prompt": {
            "prompt_id": prompt.prompt_id,
            "token_ids": list(prompt.token_ids),
            "answer": prompt.answer,
            "text": prompt.text,
            "source": prompt.source,
            "row": dict(prompt.row),
        },
        "samples": [_sample_to_json(pending) for pending in group.samples],
    }


def _group_from_json(saved: dict[str, Any]) -> PendingGroup:
    prompt = Prompt(**{**saved["prompt"], "token_ids": tuple(saved["prompt"]["token_ids"])})
    group_id, tokens = saved["group_id"], prompt.tokens()
    samples = [
        _sample_from_json(sample, group_id, index, prompt, tokens)
        for index, sample in enumerate(saved["samples"])
    ]
    return PendingGroup(group_id, samples, saved["carries"])


def _sample_to_json(pending: PendingSample) -> dict[str, Any]:
    pending.settle()
    sample = pending.sample
    arrays = {name: _encode(getattr(sample, name), dtype) for name, dtype in _ARRAYS.items()}
    return {
        **arrays,
        "versions": [list(span) for span in sample.versions],
        "written": [list(span) for span in sample.written],
        "finish_reason": sample.finish_reason.value,
        "reward": sample.reward,
        "reward_components": sample.reward_components,
        "answer_found": sample.answer_found,
        "texts": pending.texts,
        "has_begun": pending.has_begun,
        "state": pending.state,
        "awaits_answer": pending.awaits_answer,
    }


def _sample_from_json(
    saved: dict[str, Any], group_id: int, index: int, prompt: Prompt, tokens: PromptTokens
) -> PendingSample:
    sample = Sample(
        group_id=group_id,
        index=index,
        prompt=tokens,
        versions=tuple(VersionSpan(*span) for span in saved["versions"]),
        written=tuple(WrittenSpan(*span) for span in saved["written"]),
        finish_reason=FinishReason(saved["finish_reason"]),
        reward=saved["reward"],
        reward_components=saved["reward_components"],
        answer_found=saved["answer_found"],
        **{name: _decode(saved[name], dtype) for name, dtype in _ARRAYS.items()},
    )
    return PendingSample(
        sample,
        prompt,
        texts=None if saved["texts"] is None else tuple(saved["texts"]),
        has_begun=saved["has_begun"],
        state=saved["state"],
        awaits_answer=saved["awaits_answer"],
    )


def _encode(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")


def _decode(encoded: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(encoded), dtype=dtype).astype(dtype[1:])
