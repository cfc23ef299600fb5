"""Conversion between Hugging Face model directories and Megatron's torch_dist checkpoints.

One process, on the CPU, without process groups; in memory are the weights of a layer and, on the
way to Hugging Face, of one file of the result. A checkpoint written here keeps what is not weights
(config.json, tokenizer, chat template, generation settings) under ``hf/``.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor

from bapo_megatron.config.settings import read_settings
from bapo_megatron.policy import hf_weights, weight_export
from bapo_megatron.policy.checkpoint_files import METADATA_NAME
from bapo_megatron.policy.convert_torch_dist import TorchDistReader, write_parameters
from bapo_megatron.policy.hf_config import HfConfig, read_hf_config_file
from bapo_megatron.policy.megatron_setup import DTYPES
from bapo_megatron.runtime.files import atomic_directory

COMPANIONS_NAME = "hf"
"""Where a converted checkpoint keeps the files of its Hugging Face model that hold no weights."""


@dataclass(frozen=True, slots=True)
class Amount:
    """A part of the work, or all of it."""

    num_tensors: int
    """Counted as Hugging Face counts: query, key and value are three."""
    num_bytes: int
    """Size of these tensors in the target's dtype."""

    def __add__(self, other: Self) -> Self:
        return type(self)(self.num_tensors + other.num_tensors, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished conversion."""

    format: Literal["Megatron", "Hugging Face"]
    amount: Amount
    dtype: torch.dtype
    num_files: int
    """Files that hold weights."""


Report = Callable[[Amount, Amount], None]
"""Called after every parameter with what is done and the total."""


def convert(
    source: Path,
    target: Path,
    *,
    hf_dir: Path | None = None,
    dtype: str | None = None,
    max_file_bytes: int,
    force: bool = False,
    report: Report,
) -> Conversion:
    """Convert a Hugging Face model to a torch_dist checkpoint, or a checkpoint to a model.

    A checkpoint is one of a run (``step_<n>``), or any of a model this project knows; its weights
    are those the model computes with, also where its optimizer holds float32 copies. ``hf_dir`` has
    the config.json and the tokenizer of its model: if None, what the checkpoint keeps itself, or
    the ``model.path`` of its run. Without ``dtype`` (``float32`` or ``bfloat16``) every weight
    keeps its bits. Weights beyond ``max_file_bytes`` are divided over several files.

    Raises:
        ValueError: The source is not complete or not of a known kind, or the target may not be
            written; one line that names the directory, file or tensor.
        OSError: The target cannot be written; nothing is left under its name.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype: {dtype} is none of {', '.join(DTYPES)}; choose one of them")
    assert max_file_bytes > 0, "the command checks it"
    wanted = None if dtype is None else DTYPES[dtype]
    if (source / METADATA_NAME).is_file():
        hf_dir = hf_dir or _find_companions(source)
        if not (hf_dir / "config.json").is_file():
            raise ValueError(f"--hf: no config.json in {hf_dir}; give a Hugging Face directory")
        _check_target(target, [source, hf_dir], force=force)
        return _to_hf(source, hf_dir, target, wanted, max_file_bytes, report)
    if not (source / "config.json").is_file():
        raise ValueError(_unknown(source))
    if hf_dir is not None:
        raise ValueError(f"--hf: {source} is a Hugging Face model itself; leave --hf out")
    _check_target(target, [source], force=force)
    return _to_megatron(source, target, wanted, max_file_bytes, report)


def _to_megatron(
    source: Path, target: Path, wanted: torch.dtype | None, max_file_bytes: int, report: Report
) -> Conversion:
    hf = read_hf_config_file(source / "config.json")
    weight_export.companion_files(source)  # what is wrong with them is better said now
    table = hf_weights.weight_table(hf)
    files = hf_weights.find_tensors(hf, source)
    dtypes = hf_weights.stored_dtypes(table, files, hf, source)
    dtype = _target_dtype(source, dtypes, wanted)

    def parameters() -> Iterator[tuple[hf_weights.Weight, Tensor]]:
        for weight in _reported(table, hf, dtype, report):
            tensors = [hf_weights.read_tensor(files[name], name).to(dtype) for name in weight.hf]
            yield weight, hf_weights.to_shard(weight, tensors, hf, rank=0, size=1)

    with atomic_directory(target) as temporary:
        num_files = write_parameters(parameters(), dtype, hf, temporary, max_file_bytes)
        companions = temporary / COMPANIONS_NAME
        companions.mkdir()
        weight_export.copy_companions(source, companions, dtype)
    return Conversion("Megatron", _amount(table, hf, dtype), dtype, num_files)


def _to_hf(
    source: Path,
    hf_dir: Path,
    target: Path,
    wanted: torch.dtype | None,
    max_file_bytes: int,
    report: Report,
) -> Conversion:
    hf = read_hf_config_file(hf_dir / "config.json")
    weight_export.companion_files(hf_dir)
    table = hf_weights.weight_table(hf)
    reader = TorchDistReader(source, hf)
    dtype = _target_dtype(source, reader.dtypes, wanted)
    tensors = (
        tensor
        for weight in _reported(table, hf, dtype, report)
        for tensor in hf_weights.from_shards(weight, [reader.read(weight).to(dtype)], hf).items()
    )
    files = weight_export.plan_files(hf, dtype, max_file_bytes)
    with atomic_directory(target) as temporary:
        weight_export.write_weights(tensors, files, temporary)
        weight_export.copy_companions(hf_dir, temporary, dtype)
    return Conversion("Hugging Face", _amount(table, hf, dtype), dtype, len(files))


def _reported(
    table: list[hf_weights.Weight], hf: HfConfig, dtype: torch.dtype, report: Report
) -> Iterator[hf_weights.Weight]:
    """Yield the parameters; whoever asks for the next one is done with the one before."""
    total, done = _amount(table, hf, dtype), Amount(0, 0)
    for weight in table:
        yield weight
        done += _amount([weight], hf, dtype)
        report(done, total)


def _target_dtype(
    source: Path, stored: Mapping[str, torch.dtype], wanted: torch.dtype | None
) -> torch.dtype:
    if wanted is not None:
        return wanted
    examples = {dtype: name for name, dtype in stored.items()}
    if len(examples) > 1:
        found = ", ".join(f"{str(dtype)[6:]} ({name})" for dtype, name in examples.items())
        raise ValueError(f"{source}: weights of several dtypes, {found}; choose one with --dtype")
    return next(iter(examples))


def _amount(weights: Iterable[hf_weights.Weight], hf: HfConfig, dtype: torch.dtype) -> Amount:
    sizes = [size for w in weights for size in weight_export.weight_bytes(w, hf, dtype).values()]
    return Amount(len(sizes), sum(sizes))


def _find_companions(source: Path) -> Path:
    """Return the Hugging Face directory that a checkpoint without ``--hf`` belongs to."""
    own = source / COMPANIONS_NAME
    if (own / "config.json").is_file():
        return own
    run_config = Path(os.path.realpath(source)).parent.parent / "config.yaml"
    if not run_config.is_file():
        raise ValueError(
            f"{source}: does not say which model it is of; give the directory with its config.json "
            "and tokenizer with --hf"
        )
    path = Path(str(read_settings(run_config).get("model.path")))
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{run_config}: its model.path {path} is not a model directory here; give the one with "
            "config.json and tokenizer with --hf"
        )
    return path


def _check_target(target: Path, sources: list[Path], *, force: bool) -> None:
    if target.name in ("", ".."):
        raise ValueError(f"{target}: must end in a name of its own; choose another target")
    real = Path(os.path.realpath(target))
    for source in sources:
        if Path(os.path.realpath(source)).is_relative_to(real):
            raise ValueError(f"{target}: writing it would delete {source}; choose another target")
    if os.path.lexists(target) and not target.is_dir():
        raise ValueError(f"{target}: not a directory; choose another target")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise ValueError(
            f"{target}: exists and is not empty; choose another target, or replace it with --force"
        )


def _unknown(source: Path) -> str:
    if not source.is_dir():
        return f"{source}: no such directory; give a Hugging Face model or a checkpoint"
    if any(source.glob("*.distcp")):
        return f"{source}: an incomplete checkpoint, {METADATA_NAME} is missing; use another one"
    return (
        f"{source}: neither a Hugging Face model (no config.json) nor a torch_dist checkpoint (no "
        f"{METADATA_NAME}); give one of them, such as <run>/checkpoints/step_<n>"
    )
