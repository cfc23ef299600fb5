"""What the reader admits beside records, and what it leaves when it is interrupted."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from bapo_megatron.policy.checkpoint_files import METADATA_NAME, DamagedError
from bapo_megatron.policy.checkpoint_reader import CheckedReader


@dataclass
class _Attribute:
    """Pickled as an attribute of a class, as Python 3.11.2 pickles members of enumerations."""

    owner: type
    name: str

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[type, str]]:
        return getattr, (self.owner, self.name)


def _read(directory: Path, attribute: _Attribute) -> Metadata:
    metadata = Metadata(state_dict_metadata={}, planner_data=attribute, storage_data={})
    (directory / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    return CheckedReader(directory, None).read_metadata()


def test_a_member_of_an_enumeration_may_be_pickled_as_an_attribute(tmp_path: Path) -> None:
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    found = _read(tmp_path, _Attribute(_MEM_FORMAT_ENCODING, member.name))
    assert found.planner_data is member


@pytest.mark.parametrize(
    ("owner", "name"),
    [(_MEM_FORMAT_ENCODING, "__init_subclass__"), (Metadata, "__init__"), (Path, "cwd")],
)
def test_another_attribute_is_refused(tmp_path: Path, owner: type, name: str) -> None:
    with pytest.raises(DamagedError, match=r"\.metadata names (builtins\.getattr|pathlib\.Path)"):
        _read(tmp_path, _Attribute(owner, name))


@pytest.mark.parametrize("error", [DamagedError, KeyboardInterrupt])
def test_damage_and_an_interrupt_do_not_wait_for_pieces_that_are_still_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    reader, verified, is_over = CheckedReader(tmp_path, {}), [], Event()

    def verify(piece: int) -> None:
        verified.append(piece)
        if piece == 0:
            raise error
        is_over.wait(30)

    def read(own: CheckedReader, plan: Any, planner: Any) -> None:
        for piece in range(3):
            own._slice_file(None, piece)

    monkeypatch.setattr(reader, "_verify", verify)
    monkeypatch.setattr(FileSystemReader, "_slice_file", lambda *_: None)
    monkeypatch.setattr(FileSystemReader, "read_data", read)
    with pytest.raises(error):
        reader.read_data(None, None)
    is_over.set()
    reader._hasher.shutdown()
    assert 2 not in verified
