"""The rollout buffer as JSON values for a checkpoint; arrays as base64 of little-endian bytes."""

from __future__ import annotations

import base64
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_megatron.rollout.buffer import PendingGroup, PendingSample
from bapo_megatron.types import FinishReason, Group, Prompt, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.rollout.buffer import RolloutBuffer

_FORMAT = 2
_ARRAYS = {"response_token_ids": "<i8", "behaviour_logprobs": "<f4", "versions": "<i8"}


def buffer_to_json(buffer: RolloutBuffer) -> dict[str, Any]:
    """Everything that ``buffer_from_json`` needs."""
    return {
        "format": _FORMAT,
        "next_group_id": buffer.next_group_id,
        "num_trained": buffer.num_trained,
        "dropped": dict(buffer.dropped),
        "groups": [_pending_to_json(group) for group in buffer],
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
    groups = [_pending_from_json(saved) for saved in state["groups"]]
    buffer.groups = {group.group_id: group for group in groups}
    buffer.next_group_id = state["next_group_id"]
    buffer.num_trained = state["num_trained"]
    buffer.dropped = Counter(state["dropped"])
    earlier = [tuple(_group_from_json(saved) for saved in batch) for batch in state["earlier"]]
    buffer.earlier = deque(earlier, buffer.earlier.maxlen)
    buffer.check()


def _pending_to_json(group: PendingGroup) -> dict[str, Any]:
    for pending in group.samples:
        pending.settle()
    saved = _record_to_json(group.group_id, [pending.sample for pending in group.samples])
    return {
        **saved,
        "carries": group.carries,
        "is_scored": [pending.is_scored for pending in group.samples],
    }


def _pending_from_json(saved: dict[str, Any]) -> PendingGroup:
    samples = _samples_from_json(saved)
    pending = [
        PendingSample(sample, is_scored)
        for sample, is_scored in zip(samples, saved["is_scored"], strict=True)
    ]
    return PendingGroup(saved["group_id"], pending, saved["carries"])


def _group_to_json(group: Group) -> dict[str, Any]:
    return _record_to_json(group.group_id, group.samples)


def _group_from_json(saved: dict[str, Any]) -> Group:
    return Group(saved["group_id"], tuple(_samples_from_json(saved)))


def _record_to_json(group_id: int, samples: Sequence[Sample]) -> dict[str, Any]:
    prompt = samples[0].prompt
    return {
        "group_id": group_id,
        "prompt": {
            "prompt_id": prompt.prompt_id,
            "token_ids": list(prompt.token_ids),
            "answer": prompt.answer,
            "text": prompt.text,
            "source": prompt.source,
            "row": dict(prompt.row),
        },
        "samples": [_sample_to_json(sample) for sample in samples],
    }


def _sample_to_json(sample: Sample) -> dict[str, Any]:
    arrays = {name: _encode(getattr(sample, name), dtype) for name, dtype in _ARRAYS.items()}
    return {
        **arrays,
        "finish_reason": sample.finish_reason.value,
        "response_text": sample.response_text,
        "reward": sample.reward,
        "reward_components": sample.reward_components,
        "answer_found": sample.answer_found,
    }


def _samples_from_json(saved: dict[str, Any]) -> list[Sample]:
    prompt = Prompt(**{**saved["prompt"], "token_ids": tuple(saved["prompt"]["token_ids"])})
    return [
        Sample(
            group_id=saved["group_id"],
            index=index,
            prompt=prompt,
            finish_reason=FinishReason(sample["finish_reason"]),
            response_text=sample["response_text"],
            reward=sample["reward"],
            reward_components=sample.get("reward_components", {}),  # older checkpoints have none
            answer_found=sample["answer_found"],
            **{name: _decode(sample[name], dtype) for name, dtype in _ARRAYS.items()},
        )
        for index, sample in enumerate(saved["samples"])
    ]


def _encode(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")


def _decode(encoded: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(encoded), dtype=dtype).astype(dtype[1:])
