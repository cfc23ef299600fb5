"""What has been sampled and not yet been given to the trainer.

A group enters when its prompt is drawn and leaves when the trainer gets it. In between each of its
samples is unfinished (it may have a prefix from earlier steps), finished, or scored. The whole
buffer becomes JSON for a checkpoint, bit for bit.

R = response tokens of one sample.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_megatron.types import FinishReason, Group, Prompt, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bapo_megatron.rollout.completion import Completion

_FORMAT = 1


@dataclass(slots=True)
class PendingSample:
    """A sample on its way, and whether its reward is known."""

    sample: Sample
    is_scored: bool = False

    @property
    def is_finished(self) -> bool:
        """Nothing more is to be sampled."""
        return self.sample.finish_reason is not FinishReason.ABORT

    @property
    def num_tokens(self) -> int:
        """Response tokens so far."""
        return len(self.sample.response_token_ids)

    def input_ids(self) -> list[int]:
        """Prompt and response so far: what the engine continues."""
        return [*self.sample.prompt.token_ids, *self.sample.response_token_ids.tolist()]

    def append(self, completion: Completion, max_response_tokens: int) -> None:
        """Add what one request sampled.

        Args:
            completion: Tokens after ``input_ids()``.
            max_response_tokens: Longest response over all requests; reaching it is LENGTH, also
                where the request was aborted at that very token.
        """
        sample = self.sample
        sample.response_token_ids = np.concatenate(
            (sample.response_token_ids, completion.token_ids)
        )
        sample.behaviour_logprobs = np.concatenate((sample.behaviour_logprobs, completion.logprobs))
        sample.versions = np.concatenate((sample.versions, completion.versions))
        sample.finish_reason = completion.finish_reason
        if not self.is_finished and self.num_tokens >= max_response_tokens:
            sample.finish_reason = FinishReason.LENGTH


@dataclass(slots=True)
class PendingGroup:
    """The G samples of one prompt."""

    group_id: int
    samples: list[PendingSample]

    @classmethod
    def start(cls, group_id: int, prompt: Prompt, samples_per_group: int) -> PendingGroup:
        """A group without any token."""
        samples = [
            Sample(
                group_id=group_id,
                index=index,
                prompt=prompt,
                response_token_ids=np.empty(0, dtype=np.int64),
                behaviour_logprobs=np.empty(0, dtype=np.float32),
                versions=np.empty(0, dtype=np.int64),
                finish_reason=FinishReason.ABORT,
            )
            for index in range(samples_per_group)
        ]
        return cls(group_id, [PendingSample(sample) for sample in samples])

    @property
    def is_finished(self) -> bool:
        """Every sample is finished; rewards may still be missing."""
        return all(pending.is_finished for pending in self.samples)

    def to_group(self) -> Group:
        """The record for the trainer; every sample is finished and scored."""
        assert all(pending.is_finished and pending.is_scored for pending in self.samples)
        return Group(self.group_id, tuple(pending.sample for pending in self.samples))


class RolloutBuffer:
    """Groups by id; the oldest come first."""

    def __init__(self) -> None:
        self._groups: dict[int, PendingGroup] = {}
        self._next_group_id = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[PendingGroup]:
        return iter(self._groups.values())

    def start_group(self, prompt: Prompt, samples_per_group: int) -> PendingGroup:
        """Add a group for a new prompt."""
        group = PendingGroup.start(self._next_group_id, prompt, samples_per_group)
        self._groups[group.group_id] = group
        self._next_group_id += 1
        return group

    def finished(self) -> list[PendingGroup]:
        """Groups whose samples are all finished, oldest first."""
        return [group for group in self if group.is_finished]

    def take(self, groups: list[PendingGroup]) -> tuple[Group, ...]:
        """Remove groups and return them as records."""
        for group in groups:
            del self._groups[group.group_id]
        return tuple(group.to_group() for group in groups)

    def discard_all(self) -> None:
        """Forget every group; ids are not used again."""
        self._groups.clear()

    def num_unfinished_samples(self) -> int:
        """Samples that still need tokens."""
        return sum(not pending.is_finished for group in self for pending in group.samples)

    def state(self) -> dict[str, Any]:
        """Everything as JSON values; arrays as base64 of their little-endian bytes."""
        return {
            "format": _FORMAT,
            "next_group_id": self._next_group_id,
            "groups": [_group_to_json(group) for group in self],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned.

        Raises:
            ValueError: Another version of this program wrote it.
        """
        if state["format"] != _FORMAT:
            raise ValueError(
                f"cannot restore the rollout buffer: its format is {state['format']}, this version "
                f"reads {_FORMAT}; resume with the version that wrote the checkpoint"
            )
        groups = [_group_from_json(saved) for saved in state["groups"]]
        self._groups = {group.group_id: group for group in groups}
        self._next_group_id = state["next_group_id"]


def _group_to_json(group: PendingGroup) -> dict[str, Any]:
    prompt = group.samples[0].sample.prompt
    return {
        "group_id": group.group_id,
        "prompt": {
            "prompt_id": prompt.prompt_id,
            "token_ids": list(prompt.token_ids),
            "answer": prompt.answer,
            "text": prompt.text,
        },
        "samples": [_sample_to_json(pending) for pending in group.samples],
    }


def _group_from_json(saved: dict[str, Any]) -> PendingGroup:
    prompt = Prompt(**{**saved["prompt"], "token_ids": tuple(saved["prompt"]["token_ids"])})
    samples = [
        _sample_from_json(sample, saved["group_id"], index, prompt)
        for index, sample in enumerate(saved["samples"])
    ]
    return PendingGroup(saved["group_id"], samples)


def _sample_to_json(pending: PendingSample) -> dict[str, Any]:
    sample = pending.sample
    return {
        "response_token_ids": _encode(sample.response_token_ids, "<i8"),
        "behaviour_logprobs": _encode(sample.behaviour_logprobs, "<f4"),
        "versions": _encode(sample.versions, "<i8"),
        "finish_reason": sample.finish_reason.value,
        "response_text": sample.response_text,
        "reward": sample.reward,
        "answer_found": sample.answer_found,
        "is_scored": pending.is_scored,
    }


def _sample_from_json(
    saved: dict[str, Any], group_id: int, index: int, prompt: Prompt
) -> PendingSample:
    sample = Sample(
        group_id=group_id,
        index=index,
        prompt=prompt,
        response_token_ids=_decode(saved["response_token_ids"], "<i8"),
        behaviour_logprobs=_decode(saved["behaviour_logprobs"], "<f4"),
        versions=_decode(saved["versions"], "<i8"),
        finish_reason=FinishReason(saved["finish_reason"]),
        response_text=saved["response_text"],
        reward=saved["reward"],
        answer_found=saved["answer_found"],
    )
    return PendingSample(sample, is_scored=saved["is_scored"])


def _encode(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")


def _decode(encoded: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(encoded), dtype=dtype).astype(dtype[1:])
