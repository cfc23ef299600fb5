"""What ``.metadata`` may name."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from bapo_megatron.policy.checkpoint_files import METADATA_NAME, DamagedError
from bapo_megatron.policy.checkpoint_reader import read_metadata


@dataclass
class _Attribute:
    """Pickled as an attribute of a class."""

    owner: type
    name: str

    def __reduce__(self) -> tuple[Any, tuple[type, str]]:
        return getattr, (self.owner, self.name)


def _write(directory: Path, planner_data: Any) -> None:
    metadata = Metadata(state_dict_metadata={}, planner_data=planner_data, storage_data={})
    (directory / METADATA_NAME).write_bytes(pickle.dumps(metadata))


def test_members_of_torchs_enumerations_are_admitted(tmp_path: Path) -> None:
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    _write(tmp_path, member)
    assert read_metadata(tmp_path).planner_data is member


@pytest.mark.parametrize(("owner", "name"), [(Metadata, "__init__"), (Path, "cwd")])
def test_attributes_are_refused(tmp_path: Path, owner: type, name: str) -> None:
    _write(tmp_path, _Attribute(owner, name))
    with pytest.raises(DamagedError, match=r"\.metadata names (builtins\.getattr|pathlib\.Path)"):
        read_metadata(tmp_path)
