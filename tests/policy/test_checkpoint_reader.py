"""What ``.metadata`` may name, and tensors that are put together from their pieces."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bapo_megatron.policy.checkpoint_files import METADATA_NAME, DamagedError
from bapo_megatron.policy.checkpoint_reader import CheckpointReader, hash_pieces, read_metadata
from bapo_megatron.policy.checkpoint_shards import torch_bytes
from tests.policy.checkpoint_damages import Crafted

MEMBER = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
WHOLE = torch.arange(24.0).view(4, 6)


def _read(directory: Path, data: Any) -> Metadata:
    metadata = Metadata(state_dict_metadata={}, planner_data=data, storage_data={})
    (directory / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    return read_metadata(directory)


def test_members_of_torchs_enumerations_are_admitted(tmp_path: Path) -> None:
    assert _read(tmp_path, MEMBER).planner_data is MEMBER


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (Crafted(getattr, Metadata, "__init__"), "builtins.getattr"),
        (Path, "pathlib.Path"),
        (eval, "builtins.eval"),
        (os.system, "posix.system"),
    ],
)
def test_other_names_are_refused(tmp_path: Path, data: Any, name: str) -> None:
    with pytest.raises(DamagedError, match=rf"\.metadata names {name}"):
        _read(tmp_path, data)


@pytest.mark.parametrize("content", [b"", b"\0", pickle.dumps({})])
def test_what_is_no_description_is_damage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / METADATA_NAME).write_bytes(content)
    with pytest.raises(DamagedError, match=r"^\.metadata "):
        read_metadata(tmp_path)


def _write(directory: Path, *chunks: tuple[slice, slice]) -> None:
    """A checkpoint of WHOLE in pieces."""
    stored = TensorStorageMetadata(TensorProperties(dtype=WHOLE.dtype), WHOLE.size(), [])
    places = {}
    with (directory / "shard").open("wb") as file:
        for rows, columns in chunks:
            piece = WHOLE[rows, columns].clone()
            offsets, content = torch.Size([rows.start, columns.start]), torch_bytes(piece)
            stored.chunks.append(ChunkStorageMetadata(offsets, piece.size()))
            places[MetadataIndex("w", offsets)] = _StorageInfo("shard", file.tell(), len(content))
            file.write(content)
    metadata = Metadata({"w": stored}, storage_data=places)
    (directory / METADATA_NAME).write_bytes(pickle.dumps(metadata))


ROWS = (slice(0, 1), slice(1, 4))
COLUMNS = (slice(0, 4), slice(4, 6))
GRID = tuple((rows, columns) for rows in ROWS for columns in COLUMNS)


@pytest.mark.parametrize("index", [None, 0, 1, 3])
def test_a_tensor_or_one_entry_of_it_is_put_together_from_unequal_pieces(
    tmp_path: Path, index: int | None
) -> None:
    _write(tmp_path, *GRID)
    expected = WHOLE if index is None else WHOLE[index]
    assert torch.equal(CheckpointReader(tmp_path).read("w", index), expected)


def test_a_missing_piece_is_found_where_it_is_read(tmp_path: Path) -> None:
    _write(tmp_path, *GRID[:3])
    reader = CheckpointReader(tmp_path)
    assert torch.equal(reader.read("w", 0), WHOLE[0])
    for index in (None, 2):
        with pytest.raises(DamagedError, match="parts of w are missing"):
            reader.read("w", index)


def test_pieces_of_another_shape_than_described_are_damage(tmp_path: Path) -> None:
    _write(tmp_path, *GRID)
    metadata = read_metadata(tmp_path)
    first, second, *_ = metadata.storage_data
    metadata.storage_data[first] = metadata.storage_data[second]
    (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match="w cannot be read"):
        CheckpointReader(tmp_path).read("w")


def test_pieces_are_hashed_in_their_order_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"first" + b"second")
    pieces = hash_pieces(tmp_path, [_StorageInfo("shard", 5, 6), _StorageInfo("shard", 0, 5)])
    assert [(place.offset, checksum) for place, checksum in pieces] == [
        (0, "370f0f1c16b0aa53"),
        (5, "30584211054b083a"),
    ]
