"""A bucket of weights as memory that processes of the same node map: a file, or CUDA IPC."""

import base64
import functools
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from bapo_megatron.engine.base import BucketLayout
from bapo_megatron.engine.collective import tensor_sizes, unpack

_STDERR = 2
_DEVICE_ARGUMENT = 6
"""Position of the device among the arguments of ``reductions.rebuild_cuda_tensor``."""


def shared_memory_payload(layout: BucketLayout, flat: Tensor) -> str:
    """Describe a bucket for one other process of the node, which maps the same memory.

    It is what torch.multiprocessing pickles, as base64: on the CPU the name of a file in shared
    memory, on a GPU one handle and one event of CUDA IPC. The pickle is SGLang's "flattened
    bucket", a dict of ``flattened_tensor`` (``flat``, uint8) and ``metadata``: the name, shape,
    dtype, first byte, end and size of each tensor, as attributes. An engine's unpickler need not
    admit other classes than those that torch names, and ``functools.partial``.

    Open a payload once: torch counts the processes that map the memory. Keep the tensor until then.
    """
    metadata, end = [], 0
    for (name, tensor), size in zip(unpack(layout, flat), tensor_sizes(layout), strict=True):
        # Of all that SGLang's unpickler admits, what may have attributes.
        entry: functools.partial[object] = functools.partial(dict)
        place = {"start_idx": end, "end_idx": end + size, "numel": size}
        vars(entry).update(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, **place)
        metadata.append(entry)
        end += size
    buffer = io.BytesIO()
    with _files_by_name():
        _Pickler(buffer).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def start_manager() -> None:
    """Start torch's process that removes the files of shared host memory.

    It lives as long as a server maps one, so beyond this process, and must not hold its standard
    error: whoever reads that to its end would wait.
    """
    before, nothing = os.dup(_STDERR), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, _STDERR)
    try:
        with _files_by_name():
            torch.zeros(1).share_memory_()  # type: ignore[no-untyped-call]
    finally:
        os.dup2(before, _STDERR)
        os.close(before)
        os.close(nothing)


class _Pickler(ForkingPickler):
    """Names a GPU by its uuid, for the other process may number GPUs in another way."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return value.__reduce__()  # multiprocessing's own loses the attributes
        if not isinstance(value, Tensor) or not value.is_cuda:
            return NotImplemented
        function, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        before, after = arguments[:_DEVICE_ARGUMENT], arguments[_DEVICE_ARGUMENT + 1 :]
        return function, (*before, uuid, *after)


@contextmanager
def _files_by_name() -> Iterator[None]:
    """Share host memory by file names; torch's other way, open files, does not travel over HTTP."""
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
