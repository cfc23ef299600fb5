"""Weights bucket by bucket, so that no rank ever holds the whole model.

Rank 0 says which bucket is next, and the ranks of its replica gather it with rank 0. All others
wait for its word outside the collectives of the model, for as long as a server takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bapo_megatron.distributed import broadcast_bytes
from bapo_megatron.policy.hf_weights import hf_shapes
from bapo_megatron.policy.weight_export import gather_weights, plan_buckets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bapo_megatron.policy.megatron_policy import MegatronPolicy

_END = b"end"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some Hugging Face tensors in one piece of memory, one after the other."""

    flat: Tensor
    """uint8 [bytes], on the policy's device."""
    dtype: torch.dtype
    """Of every tensor."""
    shapes: dict[str, tuple[int, ...]]
    """By name, in their order."""
    is_last: bool

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of ``flat`` by name."""
        sizes = [math.prod(shape) * self.dtype.itemsize for shape in self.shapes.values()]
        parts = self.flat.split(sizes)  # type: ignore[no-untyped-call]
        for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
            yield name, part.view(self.dtype).view(shape)

    @property
    def dtype_name(self) -> str:
        """Such as ``float32``."""
        return str(self.dtype).removeprefix("torch.")


class WeightBuckets:
    """The buckets of a policy; rank 0 calls ``gather`` and ``end``, all others ``follow``."""

    def __init__(self, policy: MegatronPolicy, max_bytes: int) -> None:
        """Plan them, alike on all ranks.

        Args:
            policy: Holds the weights, finished by ``finish_weights``.
            max_bytes: Largest bucket, except for one with a single larger parameter.
        """
        self._policy = policy
        self._dtype: torch.dtype = policy.chunks[0].config.params_dtype
        self._plan = plan_buckets(policy.hf, self._dtype, max_bytes)

    def __len__(self) -> int:
        return len(self._plan)

    def gather(self, number: int) -> Bucket:
        """Gather a bucket on rank 0, with the ranks that ``follow``."""
        policy = self._policy
        broadcast_bytes(str(number).encode(), policy.groups)
        shapes = {
            name: shape
            for weight in self._plan[number]
            for name, shape in hf_shapes(weight, policy.hf).items()
        }
        num_bytes = sum(math.prod(shape) for shape in shapes.values()) * self._dtype.itemsize
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=policy.device)
        bucket = Bucket(flat, self._dtype, shapes, number + 1 == len(self))
        for (name, target), (gathered, tensor) in zip(
            bucket.tensors(), self._iterate(number), strict=True
        ):
            assert name == gathered, "weights come in the order of the table"
            target.copy_(tensor)
        return bucket

    def end(self) -> None:
        """Tell the ranks that ``follow`` that no bucket is needed any more."""
        broadcast_bytes(_END, self._policy.groups)

    def follow(self) -> None:
        """Take part in what rank 0 gathers, until it ends."""
        while (word := broadcast_bytes(None, self._policy.groups)) != _END:
            if self._policy.groups.is_first_replica:
                for _ in self._iterate(int(word)):
                    pass

    def _iterate(self, number: int) -> Iterator[tuple[str, Tensor]]:
        policy = self._policy
        return gather_weights(policy.chunks, policy.hf, policy.groups, self._plan[number])
