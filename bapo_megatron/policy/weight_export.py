"""From tensor-parallel shards back to a Hugging Face model directory."""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bapo_megatron.policy.hf_config import HfConfig
from bapo_megatron.policy.hf_weights import (
    EMBEDDING,
    INDEX_NAME,
    SINGLE_NAME,
    Weight,
    from_shards,
    hf_shapes,
    local_weights,
    shard_shape,
    weight_table,
)
from bapo_megatron.runtime.distributed import ProcessGroups

MAX_FILE_BYTES = 5 * 1024**3
"""Largest weight file; it is also what rank 0 holds in host memory."""

COMPANION_PATTERNS = (
    *("generation_config.json", "tokenizer*", "vocab*", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template*"),
)
"""Files of the source directory that belong to the model but hold no weights."""


def gather_weights(
    chunks: Sequence[GPTModel],
    hf: HfConfig,
    groups: ProcessGroups,
    table: Sequence[Weight] | None = None,
    read: Callable[[Tensor], Tensor] = Tensor.detach,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor, whole, on the ranks of the first stage; elsewhere nothing.

    One parameter is gathered at a time. A collective: the ranks of a model replica (its tensor and
    pipeline groups) iterate together, to the end. ``table`` is a part of ``weight_table(hf)``;
    ``read`` takes a tensor of a parameter's shape from it, such as its gradient, all of one dtype.
    """
    local = {weight.megatron: read(parameter) for weight, parameter in local_weights(chunks, hf)}
    dtype = next(iter(local.values())).dtype
    for weight in weight_table(hf) if table is None else table:
        # The layers are divided into pipeline × virtual chunks; chunk c is on stage c mod pipeline.
        stage = 0 if weight.megatron == EMBEDDING.megatron else groups.pipeline_size - 1
        if weight.layer is not None:
            layers_per_chunk = hf.num_layers // (groups.pipeline_size * groups.virtual_size)
            stage = weight.layer // layers_per_chunk % groups.pipeline_size
        if groups.pipeline_rank == stage:
            shard = local[weight.megatron].contiguous()
            if stage != 0:
                dist.send(shard, group=groups.pipeline, group_dst=0)
        elif groups.is_first_stage:
            shape = shard_shape(weight, hf, groups.tensor_size)
            shard = torch.empty(shape, dtype=dtype, device=groups.device)
            dist.recv(shard, group=groups.pipeline, group_src=stage)
        if not groups.is_first_stage:
            continue
        shards = [shard]
        if weight.axis is not None and groups.tensor_size > 1:
            shards = [torch.empty_like(shard) for _ in range(groups.tensor_size)]
            dist.all_gather(shards, shard, group=groups.tensor)
        yield from from_shards(weight, shards, hf).items()


def weight_bytes(weight: Weight, hf: HfConfig, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of each Hugging Face tensor of a parameter."""
    shapes = hf_shapes(weight, hf).items()
    return {name: math.prod(shape) * dtype.itemsize for name, shape in shapes}


def plan_buckets(hf: HfConfig, dtype: torch.dtype, max_bytes: int) -> list[list[Weight]]:
    """Divide the parameters, in order, into buckets of at most ``max_bytes``.

    A parameter above the limit has a bucket of its own.
    """
    sizes = [(weight, sum(weight_bytes(weight, hf, dtype).values())) for weight in weight_table(hf)]
    return [[weight for weight, _ in bucket] for bucket in _filled(sizes, max_bytes)]


def plan_files(hf: HfConfig, dtype: torch.dtype, max_file_bytes: int) -> list[dict[str, int]]:
    """Divide the tensors, in order, into files of at most ``max_file_bytes``.

    Each file is the bytes of its tensors by name; a tensor above the limit has one of its own.
    """
    sizes = [size for w in weight_table(hf) for size in weight_bytes(w, hf, dtype).items()]
    return [dict(file) for file in _filled(sizes, max_file_bytes)]


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
    # transformers 5 writes "dtype", older ones "torch_dtype".
    keys = [key for key in ("dtype", "torch_dtype") if key in fields] or ["dtype"]
    fields.update(dict.fromkeys(keys, str(dtype).removeprefix("torch.")))
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
