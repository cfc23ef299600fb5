"""Brings a micro-batch to the device by one copy that the host does not wait for.

CUDA waits for everything before it when it copies from ordinary memory. One copy from pinned memory
takes its place among the kernels instead, while the host prepares what follows.
"""

from collections.abc import Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from bapo_megatron.types import MicroBatch

_ALIGNMENT = 16


def on_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return the micro-batch with every tensor on ``device``; those that are there stay."""
    values = {f.name: getattr(micro_batch, f.name) for f in fields(micro_batch)}
    elsewhere = {n: v for n, v in values.items() if v is not None and v.device != device}
    return replace(micro_batch, **_copied(elsewhere, device)) if elsewhere else micro_batch


def _copied(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy tensors of the host in one piece; return views of it."""
    slots = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    pinned = torch.empty(sum(slots), dtype=torch.uint8, pin_memory=True)
    for name, view in _views(tensors, pinned.split_with_sizes(slots)).items():
        view.copy_(tensors[name])
    # torch keeps the pinned memory until the copy is made.
    return _views(tensors, pinned.to(device, non_blocking=True).split_with_sizes(slots))


def _views(tensors: Mapping[str, Tensor], pieces: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """View each piece, uint8, as a tensor of the same type and shape."""
    return {
        name: piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)
    }
