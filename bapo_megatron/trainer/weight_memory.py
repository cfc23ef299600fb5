"""Tensors as messages that hold no data: another process of the node maps the same memory.

SGLang unpickles what torch.multiprocessing pickles: on the CPU the name of a file in shared memory,
on a GPU a handle of CUDA IPC. Its unpickler admits the classes that torch names there, no others.
"""

from __future__ import annotations

import base64
import io
import os
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_STDERR = 2
_DEVICE_ARGUMENT = 6
"""Position of the device among the arguments of ``reductions.rebuild_cuda_tensor``."""


def shared_memory_payload(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Describe named tensors for one other process, as base64.

    A payload is opened once: torch counts for each who still maps the memory. The tensors are kept
    until it has been.
    """
    buffer = io.BytesIO()
    with _files_as_handles():
        _Pickler(buffer).dump(list(tensors))
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def start_manager() -> None:
    """Start torch's process that removes the files of shared host memory.

    It lives as long as a server maps one, so beyond this process, and must not hold its standard
    error: who reads that to its end would wait.
    """
    kept, nothing = os.dup(_STDERR), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, _STDERR)
    try:
        with _files_as_handles():
            torch.zeros(1).share_memory_()  # type: ignore[no-untyped-call]
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
        os.close(nothing)


class _Pickler(ForkingPickler):
    """Names a GPU by its uuid: the other process may number GPUs in another way."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_cuda:
            return NotImplemented
        function, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        before, after = arguments[:_DEVICE_ARGUMENT], arguments[_DEVICE_ARGUMENT + 1 :]
        return function, (*before, uuid, *after)


@contextmanager
def _files_as_handles() -> Iterator[None]:
    """An open file, torch's other way to share host memory, does not travel over HTTP."""
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
