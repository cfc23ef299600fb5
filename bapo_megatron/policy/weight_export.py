"""From tensor-parallel shards back to a Hugging Face model directory."""

from __future__ import annotations

import json
import math
import shutil
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bapo_megatron.distributed import fail_together
from bapo_megatron.files import atomic_directory
from bapo_megatron.policy.hf_weights import (
    INDEX_NAME,
    SINGLE_NAME,
    from_shards,
    hf_shapes,
    local_parameters,
    weight_table,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from megatron.core.models.gpt import GPTModel

    from bapo_megatron.distributed import ProcessGroups
    from bapo_megatron.policy.hf_config import HfConfig

MAX_FILE_BYTES = 5 * 1024**3
"""Largest weight file; it is also what rank 0 holds in host memory."""

COMPANION_PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)
"""Files of the source directory that belong to the model but hold no weights."""


def gather_weights(
    gpt: GPTModel, hf: HfConfig, groups: ProcessGroups
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor, whole, on every rank of the tensor group.

    One parameter is gathered at a time. A collective: the group's ranks iterate together.
    """
    parameters = local_parameters(gpt)
    for weight in weight_table(hf):
        shard = parameters[weight.megatron].detach()
        shards = [shard]
        if weight.axis is not None and groups.tensor_size > 1:
            shards = [torch.empty_like(shard) for _ in range(groups.tensor_size)]
            dist.all_gather(shards, shard.contiguous(), group=groups.tensor)
        yield from from_shards(weight, shards, hf).items()


def export_hf(
    gpt: GPTModel,
    hf: HfConfig,
    source: Path,
    directory: Path,
    groups: ProcessGroups,
    max_file_bytes: int,
) -> None:
    """Write the model to ``directory``; see ``MegatronPolicy.export_hf``."""
    dtype = gpt.config.params_dtype
    weights = gather_weights(gpt, hf, groups)
    with fail_together(groups):
        try:
            if groups.rank == 0:
                with atomic_directory(directory) as temporary:
                    _write_weights(weights, plan_files(hf, dtype, max_file_bytes), temporary)
                    _write_config(source, temporary, dtype)
                    _copy_companions(source, temporary)
        finally:
            # The other ranks of the tensor group take part in every gather, also after a failure.
            if groups.data_rank == 0:
                for _ in weights:
                    pass


def plan_files(hf: HfConfig, dtype: torch.dtype, max_file_bytes: int) -> list[dict[str, int]]:
    """Divide the tensors, in order, into files of at most ``max_file_bytes``.

    Returns:
        For each file, the bytes of each of its tensors by name; a tensor above the limit has a file
        of its own.
    """
    files: list[dict[str, int]] = [{}]
    for weight in weight_table(hf):
        for name, shape in hf_shapes(weight, hf).items():
            num_bytes = math.prod(shape) * dtype.itemsize
            if files[-1] and sum(files[-1].values()) + num_bytes > max_file_bytes:
                files.append({})
            files[-1][name] = num_bytes
    return files


def _write_weights(
    weights: Iterator[tuple[str, Tensor]], files: list[dict[str, int]], directory: Path
) -> None:
    """Write the files one after the other; only one is ever in memory."""
    weight_map = {}
    for number, sizes in enumerate(files, start=1):
        name = SINGLE_NAME
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        # Copies: parameters may lie in one shared buffer, which safetensors does not accept.
        tensors = {key: t.to("cpu", copy=True) for key, t in islice(weights, len(sizes))}
        assert tensors.keys() == sizes.keys(), "weights must come in the order of the table"
        try:
            save_file(tensors, directory / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{directory / name}: {error}") from error
        (directory / name).chmod(
            0o644
        )  # safetensors makes it private; a server may be another user
        weight_map.update(dict.fromkeys(tensors, name))
    if len(files) > 1:
        total_bytes = sum(sum(sizes.values()) for sizes in files)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / INDEX_NAME).write_text(text, encoding="utf-8")


def _write_config(source: Path, directory: Path, dtype: torch.dtype) -> None:
    """Copy config.json with the dtype of the weights beside it."""
    fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    # transformers 5 writes "dtype", older ones "torch_dtype".
    key = "torch_dtype" if "torch_dtype" in fields else "dtype"
    fields[key] = str(dtype).removeprefix("torch.")
    text = json.dumps(fields, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def _copy_companions(source: Path, directory: Path) -> None:
    for pattern in COMPANION_PATTERNS:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, directory / path.name)
