"""Reads checkpoints: what ``resume`` and ``convert`` check before they load anything.

torch's reader unpickles ``.metadata``, and its planner unpickles the objects among the shards: a
crafted checkpoint runs code. Here ``.metadata`` may name only the records that torch and Megatron
write, which is checked before Megatron reads it; objects may name only what
``torch.load(weights_only=True)`` admits.
"""

import io
import pickle
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from bapo_megatron.policy.checkpoint_files import (
    CHECKSUMS_NAME,
    METADATA_NAME,
    DamagedError,
    read_checksums,
    reading,
)

_CHUNK_BYTES = 1 << 20
"""Read size; small enough to stay in a core's cache until it is hashed."""

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.planner": {
        *("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "pathlib": {"PosixPath"},
    "collections": {"OrderedDict"},
}
"""Names in ``.metadata`` by module, beside the dtypes; making one has no effect."""


class CheckpointReader:
    """A checkpoint with trusted metadata, and the checksums of its pieces."""

    def __init__(self, directory: Path, *, verify: bool = True, small_files: bool = True) -> None:
        """Read the metadata and, with ``verify``, check small files; may raise ``DamagedError``.

        Pieces are compared with checksums.json, if there is one, when read or passed to ``verify``.
        """
        self._directory = directory
        self._checksums = read_checksums(directory, small_files=small_files) if verify else None
        self.metadata = read_metadata(directory)
        """torch's description: tensors, and the file and offset of each of their pieces."""
        self.places: dict[MetadataIndex, _StorageInfo] = self.metadata.storage_data or {}

    def verify(self, places: Iterable[_StorageInfo]) -> None:
        """Raise ``DamagedError`` for a piece that has changed since it was written."""
        if self._checksums is None:
            return
        with reading("a checkpoint shard"):
            for place, actual in hash_pieces(self._directory, places):
                name, start = place.relative_path, str(place.offset)
                where = f"the {place.length} bytes from {start} on"
                expected = self._checksums.pieces.get(name, {}).get(start)
                if expected is None:
                    raise DamagedError(f"{CHECKSUMS_NAME} has no checksum of {name} for {where}")
                if actual != expected:
                    raise DamagedError(f"{name} has changed since it was written, in {where}")

    def read(self, key: str, index: int | None = None) -> Tensor:
        """Return a stored tensor, whole, or one entry of its first axis.

        Raises:
            DamagedError: A piece is damaged or missing.
        """
        stored = self.metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata), key
        with reading(key):
            start, end = (0, stored.size[0]) if index is None else (index, index + 1)
            shape = (end - start, *stored.size[1:])
            whole, num_read = torch.empty(shape, dtype=stored.properties.dtype), 0
            for chunk in stored.chunks:
                first, *others = chunk.offsets
                part = slice(max(start, first), min(end, first + chunk.sizes[0]))
                if part.start >= part.stop:
                    continue
                target = whole[part.start - start : part.stop - start]
                for axis, offset in enumerate(others, start=1):
                    target = target.narrow(axis, offset, chunk.sizes[axis])
                piece = self._read_piece(self.places[MetadataIndex(key, chunk.offsets)])
                target.copy_(piece.view(chunk.sizes)[part.start - first : part.stop - first])
                num_read += target.numel()
        if num_read != whole.numel():
            raise DamagedError(f"parts of {key} are missing")
        return whole if index is None else whole[0]

    def _read_piece(self, place: _StorageInfo) -> Tensor:
        self.verify([place])
        with reading(place.relative_path):
            with (self._directory / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                content = file.read(place.length)
            return torch.load(io.BytesIO(content), weights_only=True)


def hash_pieces(
    directory: Path, places: Iterable[_StorageInfo]
) -> Iterator[tuple[_StorageInfo, str]]:
    """Yield pieces of files with their checksum, as they are read now."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    in_order = sorted(places, key=attrgetter("relative_path", "offset"))
    for name, file_places in groupby(in_order, attrgetter("relative_path")):
        with (directory / name).open("rb", buffering=0) as file:
            for place in file_places:
                hashed, num_left = xxhash.xxh3_64(), place.length
                file.seek(place.offset)
                while num_read := file.readinto(buffer[:num_left]):
                    hashed.update(buffer[:num_read])
                    num_left -= num_read
                yield place, hashed.hexdigest()


def read_metadata(directory: Path) -> Metadata:
    """Read ``.metadata``; ``DamagedError`` if it names anything that no checkpoint needs."""
    with reading(METADATA_NAME):
        with (directory / METADATA_NAME).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise DamagedError(f"{METADATA_NAME} is not the metadata of a checkpoint")
        for place in (metadata.storage_data or {}).values():
            if Path(place.relative_path).name != place.relative_path:
                raise DamagedError(
                    f"{METADATA_NAME} names {place.relative_path!r}, which is not a file beside it"
                )
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _RECORDS.get(module, ()):
            raise DamagedError(
                f"{METADATA_NAME} names {module}.{name}, which no checkpoint needs and which might "
                "run code"
            )
        return super().find_class(module, name)
