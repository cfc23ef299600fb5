"""From tensor-parallel shards back to a Hugging Face model directory."""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.policy.architecture import HfConfig, Weight
from bapo_megatron.policy.hf_weights import INDEX_NAME, SINGLE_NAME, from_shards, tensor_place
from bapo_megatron.policy.weight_table import (
    EMBEDDING,
    hf_shapes,
    shard_shape,
    stored_shapes,
    weight_table,
)
from bapo_megatron.runtime.distributed import ProcessGroups

GATHER_BYTES = 256 * 1024**2
"""Most bytes of whole parameters that are sent to rank 0 at once; a larger one is sent alone."""
_ALIGNMENT = 16

MAX_FILE_BYTES = 5 * 1024**3
"""Largest weight file; it is also what rank 0 holds in host memory."""

COMPANION_PATTERNS = (
    *("generation_config.json", "tokenizer*", "vocab*", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template*", "*processor_config.json"),
)
"""Files of the source directory that belong to the model but hold no weights."""


def detached(weight: Weight, parameter: Tensor) -> Tensor:
    """Return a parameter as it is."""
    return parameter.detach()


def gather_weights(
    local: Mapping[Weight, Tensor],
    hf: HfConfig,
    groups: ProcessGroups,
    table: Sequence[Weight] | None = None,
    read: Callable[[Weight, Tensor], Tensor] = detached,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor, whole, on rank 0; elsewhere nothing.

    A collective: all ranks iterate together, to the end. Each rank of one model replica sends its
    parts to rank 0 as one message per ``GATHER_BYTES``, however small the parameters are: a model
    of 30B has 18,432 tensors of experts. Of stacked experts rank 0 holds one tensor at a time.
    ``local`` are this rank's parts of ``table``, which is ``weight_table(hf)`` if not given.
    ``read`` takes a tensor of a part's shape from it, such as its gradient; those of parameters
    have one type, ``dtype`` if a rank may have none.
    """
    dtype = dtype or read(*next(iter(local.items()))).dtype
    table = weight_table(hf) if table is None else table
    return stacked(_gathered(local, hf, groups, table, read, dtype), hf)


def _gathered(
    local: Mapping[Weight, Tensor],
    hf: HfConfig,
    groups: ProcessGroups,
    table: Sequence[Weight],
    read: Callable[[Weight, Tensor], Tensor],
    dtype: torch.dtype,
) -> Iterator[tuple[Weight, dict[str, Tensor]]]:
    sizes = [(weight, sum(weight_bytes(weight, hf, dtype).values())) for weight in table]
    for filled in _filled(sizes, GATHER_BYTES):
        bucket = [weight for weight, _ in filled]
        held: dict[int, list[Weight]] = {}  # by rank, in the order of the table
        for weight in bucket:
            for rank in _holders(weight, hf, groups):
                held.setdefault(rank, []).append(weight)
        if groups.rank == 0:
            shards = {rank: _shards(weights, hf, groups, dtype) for rank, weights in held.items()}
            _exchange(dist.irecv, {rank: flat for rank, (flat, _) in shards.items() if rank})
            parts = {rank: iter(views) for rank, (_, views) in shards.items()}
            parts[0] = (read(weight, local[weight]) for weight in held.get(0, ()))
            for weight in bucket:
                whole = [next(parts[rank]) for rank in _holders(weight, hf, groups)]
                yield weight, from_shards(weight, whole, hf)
        elif groups.rank in held:
            flat, views = _shards(held[groups.rank], hf, groups, dtype)
            for weight, view in zip(held[groups.rank], views, strict=True):
                view.copy_(read(weight, local[weight]))
            _exchange(dist.isend, {0: flat})


def stacked(
    weights: Iterable[tuple[Weight, dict[str, Tensor]]], hf: HfConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of weights, and those of stacked experts as one."""
    for weight, tensors in weights:
        if not weight.is_stacked:
            yield from tensors.items()
            continue
        ((name, tensor),) = tensors.items()
        if weight.expert == 0:
            stack = tensor.new_empty(stored_shapes(weight, hf)[name])
        stack[weight.expert] = tensor.t()
        if weight.expert == len(stack) - 1:
            yield name, stack
            del stack  # before there is another one


def _holders(weight: Weight, hf: HfConfig, groups: ProcessGroups) -> list[int]:
    """Return the rank that sends each part of a parameter, in the order of the parts."""
    # The layers are divided into pipeline × virtual chunks; chunk c is on stage c mod pipeline.
    stage = 0 if weight.megatron == EMBEDDING.megatron else groups.pipeline.size() - 1
    if weight.layer is not None:
        layers_per_chunk = hf.num_layers // (groups.pipeline.size() * groups.virtual_size)
        stage = weight.layer // layers_per_chunk % groups.pipeline.size()
    first, num_parts = 0, groups.tensor.size() if weight.axis is not None else 1
    if weight.expert is not None and hf.experts is not None:
        num_parts = groups.expert_tensor.size()
        first = weight.expert // (hf.experts.num // groups.expert.size()) * num_parts
    # Within a stage ranks are numbered tensor first, or for experts expert-tensor, then expert.
    first += stage * (groups.world_size // groups.pipeline.size())
    return list(range(first, first + num_parts))


def _shards(
    weights: Sequence[Weight], hf: HfConfig, groups: ProcessGroups, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Return memory for one rank's parts of parameters, and each of them in it."""
    shapes = [shard_shape(weight, hf, tensor_place(weight, groups)[1]) for weight in weights]
    dtypes = [stored_dtype(weight, dtype) for weight in weights]
    sizes = [math.prod(s) * kind.itemsize for s, kind in zip(shapes, dtypes, strict=True)]
    starts = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
    flat = torch.empty(starts[-1], dtype=torch.uint8, device=groups.device)
    views = [
        flat[start : start + size].view(kind).view(shape)
        for start, size, kind, shape in zip(starts, sizes, dtypes, shapes, strict=False)
    ]
    return flat, views


def _exchange(operation: Callable[..., Any], buffers: dict[int, Tensor]) -> None:
    """Send or receive a buffer to or from each rank, in the communicator of all ranks.

    Single operations would give NCCL a communicator, with its memory, for each pair of ranks.
    """
    if buffers:
        operations = [dist.P2POp(operation, flat, peer=rank) for rank, flat in buffers.items()]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def stored_dtype(weight: Weight, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a weight's tensors in a model of ``dtype``."""
    return torch.float32 if weight.is_buffer else dtype


def weight_bytes(weight: Weight, hf: HfConfig, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of each Hugging Face tensor of a parameter, or of its part of a stack."""
    size, shapes = stored_dtype(weight, dtype).itemsize, hf_shapes(weight, hf).items()
    return {name: math.prod(shape) * size for name, shape in shapes}


def plan_buckets(
    table: Sequence[Weight], hf: HfConfig, dtype: torch.dtype, max_bytes: int
) -> list[list[Weight]]:
    """Divide the parameters of a table, in order, into buckets of at most ``max_bytes``.

    A parameter above the limit has a bucket of its own.
    """
    units: list[list[Weight]] = []
    for weight in table:
        if weight.loads_with_previous:
            units[-1].append(weight)
        else:
            units.append([weight])
    sizes = [(u, sum(sum(weight_bytes(w, hf, dtype).values()) for w in u)) for u in units]
    return [[w for unit, _ in bucket for w in unit] for bucket in _filled(sizes, max_bytes)]


def plan_files(
    hf: HfConfig, dtype: torch.dtype, max_file_bytes: int, kept: Mapping[str, Tensor] | None = None
) -> list[dict[str, int]]:
    """Divide the tensors, in order, ``kept`` ones last, into files of at most ``max_file_bytes``.

    Each file is the bytes of its tensors by name; a tensor above the limit has one of its own.
    """
    sizes: dict[str, int] = {}
    for weight in weight_table(hf):
        for name, size in weight_bytes(weight, hf, dtype).items():
            sizes[name] = sizes.get(name, 0) + size
    sizes |= {name: tensor.nbytes for name, tensor in (kept or {}).items()}
    return [dict(file) for file in _filled(sizes.items(), max_file_bytes)]


def _filled[Item](
    sizes: Iterable[tuple[Item, int]], max_bytes: int
) -> list[list[tuple[Item, int]]]:
    parts: list[list[tuple[Item, int]]] = [[]]
    filled_bytes = 0
    for item, num_bytes in sizes:
        if parts[-1] and filled_bytes + num_bytes > max_bytes:
            parts.append([])
            filled_bytes = 0
        parts[-1].append((item, num_bytes))
        filled_bytes += num_bytes
    return parts


def read_kept(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """Return the tensors of ``find_kept``, mapped rather than read."""
    loaded = {path: load_file(path) for path in {*files.values()}}
    return {name: loaded[path][name] for name, path in files.items()}


def write_weights(
    weights: Iterator[tuple[str, Tensor]], files: list[dict[str, int]], directory: Path
) -> None:
    """Write the files of ``plan_files`` one after the other; only one is ever in memory.

    ``weights`` are all tensors by name, in the order of ``files``.
    """
    weight_map = {}
    for number, sizes in enumerate(files, start=1):
        name = SINGLE_NAME
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(weights, sizes, directory / name)
        weight_map.update(dict.fromkeys(sizes, name))
    if len(files) > 1:
        total_bytes = sum(sum(sizes.values()) for sizes in files)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / INDEX_NAME).write_text(text, encoding="utf-8")


def _write_file(weights: Iterator[tuple[str, Tensor]], sizes: dict[str, int], path: Path) -> None:
    # One allocation: of many small ones the allocator would retain a good part.
    content = torch.empty(sum(sizes.values()), dtype=torch.uint8)
    tensors = {}
    parts = content.split(list(sizes.values()))
    for part, (name, tensor) in zip(parts, islice(weights, len(sizes)), strict=True):
        tensors[name] = part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    assert tensors.keys() == sizes.keys(), "weights must come in the order of the table"
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    path.chmod(0o644)  # safetensors makes it private; a server may be another user


def copy_companions(source: Path, directory: Path, dtype: torch.dtype) -> None:
    """Copy config.json with the dtype of the weights, tokenizer, template, generation settings."""
    directory.mkdir(exist_ok=True)
    fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for part in (fields, fields.get("text_config", {})):
        # transformers 5 writes "dtype", older ones "torch_dtype".
        keys = [key for key in ("dtype", "torch_dtype") if key in part] or ["dtype"]
        part.update(dict.fromkeys(keys, str(dtype).removeprefix("torch.")))
    text = json.dumps(fields, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    for path in companion_files(source):
        shutil.copyfile(path, directory / path.name)


def companion_files(source: Path) -> list[Path]:
    """Return tokenizer, template and generation settings of a model.

    Raises:
        ValueError: One is a link that leads nowhere, or a directory; a copy would lack it.
    """
    paths = [path for path in source.iterdir() if any(map(path.match, COMPANION_PATTERNS))]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: must be a file; restore it, or remove it")
    return paths
