"""What ``.metadata`` may name."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from bapo_megatron.policy.checkpoint_files import METADATA_NAME, DamagedError
from bapo_megatron.policy.checkpoint_reader import read_metadata

MEMBER = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


@dataclass
class _Attribute:
    """Pickled as an attribute of a class, as Python 3.11.2 pickles members of enumerations."""

    owner: type
    name: str

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[type, str]]:
        return getattr, (self.owner, self.name)


def _read(directory: Path, data: Any) -> Metadata:
    metadata = Metadata(state_dict_metadata={}, planner_data=data, storage_data={})
    (directory / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    return read_metadata(directory)


@pytest.mark.parametrize("data", [MEMBER, _Attribute(_MEM_FORMAT_ENCODING, MEMBER.name)])
def test_members_of_torchs_enumerations_are_admitted(tmp_path: Path, data: Any) -> None:
    assert _read(tmp_path, data).planner_data is MEMBER


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (_Attribute(_MEM_FORMAT_ENCODING, "__init_subclass__"), "builtins.getattr"),
        (_Attribute(Metadata, "__init__"), "builtins.getattr"),
        (_Attribute(Path, "cwd"), "pathlib.Path"),
        (eval, "builtins.eval"),
        (os.system, "posix.system"),
    ],
)
def test_other_names_are_refused(tmp_path: Path, data: Any, name: str) -> None:
    with pytest.raises(DamagedError, match=rf"\.metadata names {name}"):
        _read(tmp_path, data)
