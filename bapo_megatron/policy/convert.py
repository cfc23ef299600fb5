"""Conversion between Hugging Face model directories and Megatron's torch_dist checkpoints.

One process, on the CPU, holds one layer's weights in memory and, when it writes Hugging Face, one
output file. A checkpoint written here keeps config.json and tokenizer under ``hf/``.

A checkpoint describes whole tensors, whatever layout wrote it. In models of equal layers the
parameters of all layers with the same role are one tensor whose first axis counts the layers; in
models with experts those of all experts of a layer are one, whose first axis counts the experts.
The sections of a gated delta net's fused weights are tensors of their own.
"""

import os
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import torch
from megatron.core.dist_checkpointing.core import save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.config.settings import read_settings
from bapo_megatron.policy import hf_weights, weight_export
from bapo_megatron.policy.adapters import adapter_weights, base_name
from bapo_megatron.policy.architecture import HfConfig, Weight
from bapo_megatron.policy.checkpoint_files import (
    COMMON_NAME,
    METADATA_NAME,
    checksum,
    damage_of,
    read_state,
    write_checksums,
)
from bapo_megatron.policy.checkpoint_reader import CheckpointReader
from bapo_megatron.policy.checkpoint_shards import BACKEND, torch_bytes
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.policy.lora import identity_of
from bapo_megatron.policy.megatron_setup import DTYPES
from bapo_megatron.policy.weight_table import shard_shape, weight_table
from bapo_megatron.runtime.files import atomic_directory, naming

_REMEDY = "restore the files or use another checkpoint"
COMPANIONS_NAME = "hf"
"""Where a converted checkpoint keeps the files of its Hugging Face model that hold no weights."""
KEPT_NAME = "kept.safetensors"
"""And its tensors that are not trained."""
OPTIMIZER_STATE = re.compile(r"(^|\.)optimizer\.")
"""Tensors of a checkpoint that are not parameters."""
MODULES_WITHOUT_STATE = (
    *("embedding.word_embeddings", "output_layer"),
    *(".self_attention", ".self_attention.conv1d"),  # of gated delta nets
    ".post_norm",
)
"""Modules whose FP8 state Megatron does not save."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished conversion."""

    format: str
    """``Megatron`` or ``Hugging Face``."""
    num_tensors: int
    """Counted as Hugging Face counts: query, key and value are three."""
    num_bytes: int
    """Size of the tensors in ``dtype``."""
    dtype: torch.dtype
    num_files: int
    """Files that hold weights."""


Report = Callable[[int, int], None]
"""Called after every parameter with the bytes that are done and the total."""


def convert(
    source: Path,
    target: Path,
    *,
    hf_dir: Path | None = None,
    dtype: str | None = None,
    max_file_bytes: int,
    ignored_fields: Collection[str] = (),
    force: bool = False,
    report: Report,
) -> Conversion:
    """Convert a Hugging Face model to a torch_dist checkpoint, or a checkpoint to a model.

    A checkpoint is one of a run (``step_<n>``), or any other of a supported model; its weights are
    those the model computes with, even if its optimizer holds float32 copies. Adapters are merged
    into the weights of their base, which ``hf_dir`` then holds too. ``hf_dir`` has the config.json
    and the tokenizer of its model; None: the checkpoint's own, or the ``model.path`` of its run.
    Without ``dtype`` (``float32`` or ``bfloat16``) every weight keeps its bits. Weights beyond
    ``max_file_bytes`` are split over several files. ``ignored_fields`` of config.json are not
    checked.

    Raises:
        ValueError: The source is incomplete or of no known kind, or the target must not be
            written; one line that names the directory, file or tensor.
        OSError: The target cannot be written; nothing is left under its name.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype: must be one of {', '.join(DTYPES)}, got {dtype}")
    is_checkpoint = (source / METADATA_NAME).is_file()
    if not is_checkpoint and not (source / "config.json").is_file():
        raise ValueError(
            f"{source}: neither a Hugging Face model (no config.json) nor a torch_dist checkpoint "
            f"(no {METADATA_NAME}); give one of them, such as <run>/checkpoints/step_<n>"
        )
    if not is_checkpoint and hf_dir is not None:
        raise ValueError(f"--hf: {source} is a Hugging Face model itself; leave --hf out")
    hf_dir = hf_dir or (_find_companions(source) if is_checkpoint else source)
    if target.name in ("", ".."):
        raise ValueError(f"{target}: must end in a name of its own; choose another target")
    target = Path(os.path.realpath(target))
    _check_target(target, [source, hf_dir], force=force)
    hf = read_hf_config_file(hf_dir / "config.json", ignored_fields)
    weight_export.companion_files(hf_dir)  # fail before the work
    kept = weight_export.read_kept(hf_weights.find_kept(hf, hf_dir))
    if is_checkpoint:
        read, dtypes = _open_checkpoint(source, hf, hf_dir)
    else:
        read, dtypes = _open_model(source, hf)
    table = weight_table(hf)
    buffers = {name for w in table if w.is_buffer for name in (w.megatron, *w.hf)}
    trained = {name: kind for name, kind in dtypes.items() if name not in buffers}
    target_dtype = _target_dtype(source, trained, dtype)
    sizes = [weight_export.weight_bytes(weight, hf, target_dtype).values() for weight in table]
    total_bytes = sum(map(sum, sizes))

    def parameters() -> Iterator[tuple[Weight, Tensor]]:
        done_bytes = 0
        for weight, tensor_bytes in zip(table, sizes, strict=True):
            yield weight, read(weight).to(weight_export.stored_dtype(weight, target_dtype))
            done_bytes += sum(tensor_bytes)
            report(done_bytes, total_bytes)

    with atomic_directory(target) as temporary:
        if is_checkpoint:
            weights = ((w, hf_weights.from_shards(w, [part], hf)) for w, part in parameters())
            tensors = weight_export.stacked(weights, hf)
            files = weight_export.plan_files(hf, target_dtype, max_file_bytes, kept)
            weight_export.write_weights(chain(tensors, kept.items()), files, temporary)
            num_files, companions = len(files), temporary
        else:
            num_files = _write_checkpoint(parameters(), hf, target_dtype, temporary, max_file_bytes)
            companions = temporary / COMPANIONS_NAME
        weight_export.copy_companions(hf_dir, companions, target_dtype)
        if kept and not is_checkpoint:
            save_file(kept, companions / KEPT_NAME)
    kind = "Hugging Face" if is_checkpoint else "Megatron"
    num_tensors = len({name for weight in table for name in weight.hf})
    return Conversion(kind, num_tensors, total_bytes, target_dtype, num_files)


Read = Callable[[Weight], Tensor]
"""Returns a parameter as one rank without parallelism would hold it."""


def _open_model(directory: Path, hf: HfConfig) -> tuple[Read, dict[str, torch.dtype]]:
    files, dtypes = hf_weights.find_tensors(hf, directory)

    def read(weight: Weight) -> Tensor:
        with hf_weights.reading_shards(files, hf) as read_shard:
            return read_shard(weight, 0, 1)

    return read, dtypes


def _stacked(weight: Weight, hf: HfConfig) -> tuple[str, tuple[int, ...], int | None]:
    """Return key and shape of the stored tensor that holds a parameter, and its place there.

    That is the layer's or the expert's number, on the first axis; None: the stored tensor is the
    parameter.
    """
    shape = shard_shape(weight, hf, size=1)
    if weight.expert is not None and hf.experts is not None:
        key = weight.megatron.replace(f".experts.{weight.expert}.", ".experts.experts.")
        return key, (hf.experts.num, *shape), weight.expert
    if weight.layer is None or not hf.stacks_layers:
        return weight.megatron, shape, None
    key = weight.megatron.replace(f".{weight.layer}.", ".", 1)
    return key, (hf.num_layers, *shape), weight.layer


def _parts(weight: Weight) -> list[Weight]:
    """Return the stored parts of a parameter, each as a weight: its sections, or itself."""
    rows = [part for shape in weight.shapes for part in shape.split()[0].split("+")]
    rest = weight.shapes[0].partition(" ")[2]
    return [
        replace(
            weight,
            megatron=f"{weight.megatron}.{section}",
            hf=weight.hf[:1],
            shapes=(f"{number} {rest}",),
            sections=(),
        )
        for section, number in zip(weight.sections, rows, strict=False)
    ] or [weight]


def _open_adapters(
    directory: Path, reader: CheckpointReader, hf: HfConfig, base: Path
) -> tuple[Read, dict[str, torch.dtype]]:
    """Return a reader of the base's weights with the adapters of a checkpoint."""
    with damage_of(directory, _REMEDY):
        saved = read_state(directory).lora
    assert saved is not None, "a checkpoint of adapters"
    lora = LoraConfig(rank=saved["rank"], alpha=saved["alpha"], targets=tuple(saved["targets"]))
    if identity_of(lora, hf, base)["base"] != saved["base"]:
        raise ValueError(
            f"{directory}: its adapters belong to another base than {base}; name the model.path of "
            "its run by --hf"
        )
    read_base, dtypes = _open_model(base, hf)

    def read(weight: Weight) -> Tensor:
        tensors = hf_weights.from_shards(weight, [read_base(weight)], hf)
        for pair in adapter_weights(weight, hf, lora):
            with damage_of(directory, _REMEDY):
                a, b = (reader.read(f"lora.{entry.megatron}") for entry in pair)
            name = base_name(pair[0])
            whole = tensors[name]
            scale = lora.alpha / lora.rank
            tensors[name] = torch.addmm(whole.float(), scale * b, a).to(whole.dtype)
        return hf_weights.to_shard(weight, list(tensors.values()), hf, 0, 1)

    return read, dtypes


def _open_checkpoint(
    directory: Path, hf: HfConfig, hf_dir: Path
) -> tuple[Read, dict[str, torch.dtype]]:
    """Return a reader of a checkpoint of any layout, and the dtypes of its tensors by key."""
    with damage_of(directory, _REMEDY):
        reader = CheckpointReader(directory)
    if any(key.startswith("lora.") for key in reader.metadata.state_dict_metadata):
        return _open_adapters(directory, reader, hf, hf_dir)
    stored = {
        key: tensor
        for key, tensor in reader.metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata) and not OPTIMIZER_STATE.search(key)
    }
    sizes = {key: tuple(tensor.size) for key, tensor in stored.items()}
    places: dict[Weight, tuple[str, int | None]] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for weight in (part for whole in weight_table(hf) for part in _parts(whole)):
        key, shape, place = _stacked(weight, hf)
        if place is not None and weight.megatron in stored:
            # Other tools may store the layers one by one.
            key, shape, place = weight.megatron, shape[1:], None
        if weight.form == "vocab" and sizes.get(key, (0,))[0] >= hf.vocab_size:
            # The vocabulary may be padded by another rule than ours.
            shape = (sizes[key][0], *shape[1:])
        places[weight], expected[key] = (key, place), shape
    remedy = "give the Hugging Face directory of the model that was trained (--hf)"
    hf_weights.check_shapes(sizes, expected, directory, remedy)

    def read(weight: Weight) -> Tensor:
        with damage_of(directory, _REMEDY):
            parts = [reader.read(*places[part]) for part in _parts(weight)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

    return read, {key: tensor.properties.dtype for key, tensor in stored.items()}


def _write_checkpoint(
    parameters: Iterator[tuple[Weight, Tensor]],
    hf: HfConfig,
    dtype: torch.dtype,
    directory: Path,
    max_file_bytes: int,
) -> int:
    """Write a checkpoint of ``parameters``, in the order of the table; return the file count."""
    states, tensors = _empty_states(hf), dict[str, TensorStorageMetadata]()
    places: dict[MetadataIndex, _StorageInfo] = {}
    pieces: dict[str, dict[str, str]] = {}

    def append(file: BinaryIO, index: MetadataIndex, value: object) -> None:
        name, start, content = Path(file.name).name, file.tell(), torch_bytes(value)
        file.write(content)
        places[index] = _StorageInfo(name, start, len(content))
        pieces.setdefault(name, {})[str(start)] = checksum(content)

    buckets = weight_export.plan_buckets(weight_table(hf), hf, dtype, max_file_bytes)
    for number, bucket in enumerate(buckets):
        path = directory / f"__{number}_0.distcp"
        with naming(path), path.open("wb") as file:
            for state in states if number == 0 else ():
                append(file, MetadataIndex(state), [None])  # an entry per rank that shares it
            for part, content in _divided(islice(parameters, len(bucket)), hf):
                key, shape, place = _stacked(part, hf)
                piece = content if place is None else content[None]
                offsets = torch.Size([place or 0] + [0] * (len(shape) - 1))
                if key not in tensors:
                    properties = TensorProperties(dtype=content.dtype)
                    tensors[key] = TensorStorageMetadata(properties, torch.Size(shape), [])
                tensors[key].chunks.append(ChunkStorageMetadata(offsets, piece.size()))
                append(file, MetadataIndex(key, offsets), piece)
    assert next(parameters, None) is None, "every parameter has its place"
    # The version tells Megatron's trainer the order of the rows of linear_qkv; without it the
    # trainer assumes the oldest. Releases before 0.17 know no other place for it than this file.
    common = torch_bytes({"checkpoint_version": 3.0, "iteration": 0})
    (directory / COMMON_NAME).write_bytes(common)
    metadata = Metadata({**dict.fromkeys(states, BytesStorageMetadata()), **tensors})
    metadata.storage_data = places
    (directory / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    save_config(BACKEND, str(directory))
    write_checksums(directory, pieces)
    return len(buckets)


def _divided(
    parameters: Iterator[tuple[Weight, Tensor]], hf: HfConfig
) -> Iterator[tuple[Weight, Tensor]]:
    """Yield the stored parts of parameters."""
    for weight, parameter in parameters:
        parts = _parts(weight)
        sizes = [shard_shape(part, hf, size=1)[0] for part in parts]
        whole = [parameter] if len(parts) == 1 else parameter.split(sizes)
        yield from zip(parts, whole, strict=True)


def _empty_states(hf: HfConfig) -> list[str]:
    """Return the keys of the FP8 states that models ask for, whether they use them or not.

    A model with Transformer Engine has them in every module below but attention, for which other
    releases of Megatron ask; one of Megatron's own layers has them in the linear modules. A missing
    one is an error when loading, a superfluous one is not.
    """
    states: dict[str, None] = {}
    for weight in weight_table(hf):
        key, shape, place = _stacked(weight, hf)
        modules = [key.rpartition(".")[0]]
        layer, is_attention, _ = key.partition(".self_attention.")
        if is_attention:
            modules.append(f"{layer}.self_attention.core_attention")
        sizes = ((1,), (0,)) if place is None else (shape[:1], (place,))
        for module in modules:
            is_joint_norm = weight.axis is not None and module.endswith("_layernorm")
            without = is_joint_norm or module.endswith(MODULES_WITHOUT_STATE)
            if not without and not module.endswith(".mlp.router"):
                states[ShardedObject(f"{module}._extra_state", None, *sizes).unique_key] = None
    return list(states)


def _target_dtype(source: Path, stored: Mapping[str, torch.dtype], name: str | None) -> torch.dtype:
    if name is not None:
        return DTYPES[name]
    examples = {dtype: key for key, dtype in stored.items()}
    if len(examples) > 1:
        kinds = ", ".join(f"{str(dtype)[6:]} ({key})" for dtype, key in examples.items())
        raise ValueError(f"{source}: weights of several dtypes, {kinds}; choose one with --dtype")
    return next(iter(examples))


def _find_companions(source: Path) -> Path:
    companions = source / COMPANIONS_NAME
    if (companions / "config.json").is_file():
        return companions
    run_config = Path(os.path.realpath(source)).parent.parent / "config.yaml"
    if run_config.is_file():
        companions = Path(str(read_settings(run_config).get("model.path")))
    if not (companions / "config.json").is_file():
        raise ValueError(
            f"{source}: unknown model: no config.json in {COMPANIONS_NAME}/ or by "
            f"model.path in {run_config}; name a directory with config.json and tokenizer by --hf"
        )
    return companions


def _check_target(target: Path, sources: list[Path], *, force: bool) -> None:
    for source in sources:
        if Path(os.path.realpath(source)).is_relative_to(target):
            raise ValueError(f"{target}: writing it would delete {source}; choose another target")
    if target.exists() and any(target.iterdir()) and not force:
        raise ValueError(
            f"{target}: exists and is not empty; choose another target, or replace it with --force"
        )
