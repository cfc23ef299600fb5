"""Another process of ``acceptance ipc``: opens a bucket, or releases memory by the memory saver."""

import base64
import functools
import io
import pickle
import sys

import torch
from torch.multiprocessing import reductions

_DEVICE_ARGUMENT = 6


class _Unpickler(pickle.Unpickler):
    """Finds the GPU of a uuid, as SGLang does."""

    def find_class(self, module: str, name: str) -> object:
        value = super().find_class(module, name)
        return _rebuild if value is reductions.rebuild_cuda_tensor else value


def _rebuild(*arguments: object) -> torch.Tensor:
    uuids = [
        str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())
    ]
    values = list(arguments)
    values[_DEVICE_ARGUMENT] = uuids.index(str(values[_DEVICE_ARGUMENT]))
    return reductions.rebuild_cuda_tensor(*values)


def open_bucket(payload: str) -> float:
    """Return the sum of the first tensor of a bucket."""
    bucket = _Unpickler(io.BytesIO(base64.b64decode(payload))).load()
    meta: functools.partial[object] = bucket["metadata"][0]
    part = bucket["flattened_tensor"][meta.start_idx : meta.end_idx]  # type: ignore[attr-defined]
    return float(part.view(meta.dtype).double().sum())  # type: ignore[attr-defined]


def release(num_bytes: int = 4 << 30) -> tuple[float, float]:
    """Shares of memory that came free when it was released, and were taken again."""
    from torch_memory_saver import torch_memory_saver

    with torch_memory_saver.region(tag="weights"):
        kept = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    torch_memory_saver.pause(tag="weights")
    released, _ = torch.cuda.mem_get_info()
    torch_memory_saver.resume(tag="weights")
    after, _ = torch.cuda.mem_get_info()
    del kept
    return (released - before) / num_bytes, (released - after) / num_bytes


if __name__ == "__main__":
    if sys.argv[1] == "open":
        print(open_bucket(sys.stdin.read()))  # noqa: T201
    else:
        print(*release())  # noqa: T201
