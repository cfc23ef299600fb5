"""Megatron's torch_dist checkpoints, read and written parameter by parameter in one process.

The format describes whole tensors and the pieces of them that each file holds, so it does not know
the layout it came from: a parameter is what a single rank without any parallelism would hold. The
parameters of all layers with the same role are one tensor whose first axis counts the layers.
"""

import io
import math
import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import torch
from megatron.core.dist_checkpointing.core import maybe_load_config, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from bapo_megatron.errors import first_line
from bapo_megatron.policy import hf_weights
from bapo_megatron.policy.checkpoint_files import (
    COMMON_NAME,
    damage_of,
    piece_checksums,
    read_checksums,
    verify_pieces,
    verify_small_files,
    write_checksums,
)
from bapo_megatron.policy.checkpoint_reader import read_metadata
from bapo_megatron.policy.checkpoint_shards import BACKEND, torch_bytes
from bapo_megatron.policy.hf_config import HfConfig
from bapo_megatron.policy.hf_weights import Weight
from bapo_megatron.runtime.files import atomic_write_bytes

_OTHER = "restore the files or use another checkpoint"

OPTIMIZER_STATE = re.compile(r"(^|\.)optimizer\.")
"""Tensors of a checkpoint that are not parameters."""

MODULES_WITHOUT_STATE = {
    w.megatron.removesuffix(".weight") for w in (hf_weights.EMBEDDING, hf_weights.OUTPUT)
}
"""Modules whose 8-bit state Megatron does not save."""


class _Slot(NamedTuple):
    """Where a checkpoint keeps one parameter: in the stored tensor of this key and shape."""

    key: str
    shape: tuple[int, ...]
    layer: int | None
    """Its place on the first axis; None: the stored tensor is the parameter."""

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of the parameter as a piece of the stored tensor."""
        return self.shape if self.layer is None else (1, *self.shape[1:])


def _stacked_slot(weight: Weight, hf: HfConfig) -> _Slot:
    """Return where a checkpoint with the layers on a first axis keeps ``weight``."""
    shape = hf_weights.shard_shape(weight, hf, size=1)
    if weight.layer is None:
        return _Slot(weight.megatron, shape, None)
    key = weight.megatron.replace(f".{weight.layer}.", ".", 1)
    return _Slot(key, (hf.num_layers, *shape), weight.layer)


class TorchDistReader:
    """The parameters of a checkpoint of any layout, checked before the first is read.

    Attributes:
        dtypes: The dtype of each stored parameter by its key.
    """

    def __init__(self, directory: Path, hf: HfConfig) -> None:
        """Read the checkpoint's description.

        Raises:
            ValueError: The checkpoint is of another format, damaged, or of another model; one line
                that names files or keys.
        """
        self.directory = directory
        with damage_of(directory, _OTHER):
            self._checksums = read_checksums(directory)
            if self._checksums is not None:
                verify_small_files(directory, self._checksums)
            self._metadata = read_metadata(directory)
        _check_format(directory)
        self._stored = {
            key: stored
            for key, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and not OPTIMIZER_STATE.search(key)
        }
        self._slots: dict[str, _Slot] = {}
        table = hf_weights.weight_table(hf)
        for weight in table:
            slot = _stacked_slot(weight, hf)
            if weight.layer is not None and weight.megatron in self._stored:
                # Other tools may store the layers one by one.
                slot = _Slot(weight.megatron, slot.shape[1:], None)
            self._slots[weight.megatron] = slot
        keys = dict.fromkeys(slot.key for slot in self._slots.values())
        hf_weights.refuse_differences(
            keys,
            self._stored,
            f"{directory}: parameters do not fit config.json",
            "give the Hugging Face directory of the model that was trained (--hf)",
        )
        shapes = []
        for weight in table:
            key, expected, _ = self._slots[weight.megatron]
            found = tuple(self._stored[key].size)
            is_padded = weight.form == "vocab" and found[0] >= hf.vocab_size
            if not (is_padded and found[1:] == expected[1:]):
                shapes.append((key, found, expected))
        hf_weights.refuse_shapes(shapes, directory)
        self._check_files()
        self._reader = FileSystemReader(directory)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.dtypes = {key: self._stored[key].properties.dtype for key in keys}

    def read(self, weight: Weight) -> Tensor:
        """Return a parameter as one rank without parallelism would hold it.

        Raises:
            ValueError: Its bytes are damaged.
        """
        slot = self._slots[weight.megatron]
        # The vocabulary may be padded by another rule than ours.
        stored = self._stored[slot.key]
        shape = stored.size if slot.layer is None else slot.piece_shape
        piece = torch.empty(shape, dtype=stored.properties.dtype)
        division = () if slot.layer is None else ((0, slot.layer, slot.shape[0]),)
        target = ShardedTensor.from_rank_offsets(slot.key, piece, *division)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(
            {slot.key: CheckpointableShardedTensor.from_sh_ten(target)}, self._metadata
        )
        plan = planner.create_local_plan()
        try:
            if self._checksums is not None:
                places = [self._metadata.storage_data[item.storage_index] for item in plan.items]
                with damage_of(self.directory, _OTHER):
                    verify_pieces(self.directory, self._checksums, places)
            with _first_error(str(self.directory)):
                self._reader.read_data(plan, planner).wait()
        except (RuntimeError, EOFError, pickle.UnpicklingError, BadZipFile) as error:
            raise ValueError(
                f"{self.directory}: {slot.key} is damaged ({first_line(error)}); restore the "
                "files or use another checkpoint"
            ) from error
        return piece if slot.layer is None else piece[0]

    def _check_files(self) -> None:
        """Refuse missing pieces and short files: reading would leave parameters half filled."""
        for key, stored in sorted(self._stored.items()):
            if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
                raise ValueError(
                    f"{self.directory}: damaged, parts of {key} are missing; use another checkpoint"
                )
        ends: dict[str, int] = {}
        for index, place in self._metadata.storage_data.items():
            if index.fqn in self._stored:
                end = place.offset + place.length
                ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
        for name, num_bytes in sorted(ends.items()):
            path = self.directory / name
            if not path.is_file() or path.stat().st_size < num_bytes:
                actual = f"has {path.stat().st_size} bytes" if path.is_file() else "is missing"
                raise ValueError(
                    f"{self.directory}: damaged, {name} {actual}, at least {num_bytes} bytes are "
                    "needed; restore the files or use another checkpoint"
                )


class _Planner(DefaultSavePlanner):
    """Gives the writer what comes next, in the order of the plan."""

    def __init__(self, data: Iterator[Tensor | io.BytesIO]) -> None:
        super().__init__()
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the next parameter, or the next object."""
        data = next(self._data)
        if isinstance(data, Tensor):
            assert write_item.tensor_data is not None
            assert data.shape == write_item.tensor_data.chunk.sizes, write_item.index
        return data


def write_parameters(
    parameters: Iterable[tuple[Weight, Tensor]],
    dtype: torch.dtype,
    hf: HfConfig,
    directory: Path,
    max_file_bytes: int,
) -> int:
    """Write a checkpoint of ``parameters`` alone, and return the number of its files.

    They come in the order of the table of weights, all of ``dtype``, as one rank without
    parallelism would hold them. torch keeps the newest one of each key until its file ends: a
    layer. The directory exists and is empty.
    """
    # Publishing it flushes it. Copying ahead, as beside a GPU, torch would ask by size.
    storage = FileSystemWriter(directory, sync_files=False, per_thread_copy_ahead=0)
    storage.set_up_storage_writer(True)
    items = [_parameter_item(hf, weight, dtype) for weight in hf_weights.weight_table(hf)]
    objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in _empty_states(hf)]
    files = _divide(items, max_file_bytes)
    files[0] = objects + files[0]  # torch writes the objects of a file first
    # As if a rank had written each file.
    plans, metadata = create_default_global_save_plan([SavePlan(items) for items in files])
    state = torch_bytes([None])  # a list: one entry per rank that shares the object
    pieces = (_whole_piece(hf, weight, parameter) for weight, parameter in parameters)
    data: Iterator[Tensor | io.BytesIO] = chain(repeat(state, len(objects)), pieces)
    planner = _Planner(data)
    results = []
    for plan in storage.prepare_global_plan(plans):
        with _first_error(str(directory)):
            results.append(storage.write_data(plan, planner).wait())
    assert next(data, None) is None, "every parameter has its place"
    # The version tells Megatron's trainer the order of the rows of linear_qkv; without it the
    # trainer assumes the oldest. Releases before 0.17 know no other place for it than this file.
    common = torch_bytes({"checkpoint_version": 3.0, "iteration": 0}).getvalue()
    atomic_write_bytes(directory / COMMON_NAME, common)
    storage.finish(metadata, results)
    save_config(BACKEND, str(directory))
    places = [result.storage_data for written in results for result in written]
    write_checksums(directory, piece_checksums(directory, places))
    return len(plans)


def _parameter_item(hf: HfConfig, weight: Weight, dtype: torch.dtype) -> WriteItem:
    slot = _stacked_slot(weight, hf)
    offsets = torch.Size([slot.layer or 0] + [0] * (len(slot.shape) - 1))
    chunk = ChunkStorageMetadata(offsets, torch.Size(slot.piece_shape))
    properties = TensorProperties(dtype=dtype)
    return WriteItem(
        MetadataIndex(slot.key, offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, properties, torch.Size(slot.shape)),
    )


def _divide(items: list[WriteItem], max_file_bytes: int) -> list[list[WriteItem]]:
    """Divide the parameters over files in their order; a larger one has a file of its own."""
    files: list[list[WriteItem]] = []
    num_free = 0
    for item in items:
        assert item.tensor_data is not None
        num_elements = math.prod(item.tensor_data.chunk.sizes)
        num_bytes = num_elements * item.tensor_data.properties.dtype.itemsize
        if num_bytes > num_free or not files:
            files.append([])
            num_free = max_file_bytes
        files[-1].append(item)
        num_free -= num_bytes
    return files


def _whole_piece(hf: HfConfig, weight: Weight, parameter: Tensor) -> Tensor:
    slot = _stacked_slot(weight, hf)
    assert parameter.numel() == math.prod(slot.piece_shape), (weight.megatron, parameter.shape)
    return parameter.reshape(slot.piece_shape)


@contextmanager
def _first_error(place: str) -> Iterator[None]:
    """Raise what made torch's reader or writer fail, where it hides that behind its own error."""
    try:
        yield
    except (RuntimeError, SystemError) as error:
        first = error.__context__
        if isinstance(first, OSError):
            first.filename = place
        if isinstance(first, OSError | KeyboardInterrupt | SystemExit):
            raise first from None
        raise


def _empty_states(hf: HfConfig) -> Iterable[str]:
    """Return the keys of the 8-bit states that models ask for, whether they use them or not.

    A model with Transformer Engine has them in every module below but attention, for which other
    releases of Megatron ask; one of Megatron's own layers has them in the linear modules. A missing
    one is an error when loading, a superfluous one is not.
    """
    states: dict[str, None] = {}
    for weight in hf_weights.weight_table(hf):
        modules = [weight.megatron.rpartition(".")[0]]
        if weight.layer is not None:
            modules.append(f"decoder.layers.{weight.layer}.self_attention.core_attention")
        for module in modules:
            if module in MODULES_WITHOUT_STATE:
                continue
            shape, offset = (1,), (0,)
            if weight.layer is not None:
                module = module.replace(f".{weight.layer}.", ".", 1)
                shape, offset = (hf.num_layers,), (weight.layer,)
            states[ShardedObject(f"{module}._extra_state", None, shape, offset).unique_key] = None
    return states


def _check_format(directory: Path) -> None:
    backend = BACKEND.sharded_backend
    try:
        config = maybe_load_config(str(directory))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{directory / 'metadata.json'}: damaged ({first_line(error)}); restore the file"
        ) from error
    if config is None or config.sharded_backend != backend:
        found = "metadata.json is missing" if config is None else config.sharded_backend
        raise ValueError(
            f"{directory}: not a {backend} checkpoint ({found}); save it with --ckpt-format "
            f"{backend}, or restore the file"
        )
