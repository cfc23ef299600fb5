"""What the reader of ``.metadata`` admits beside records: members of enumerations."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
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
