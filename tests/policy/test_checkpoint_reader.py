"""What ``.metadata`` may name."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from bapo_megatron.policy.checkpoint_files import METADATA_NAME, DamagedError
from bapo_megatron.policy.checkpoint_reader import read_metadata


def test_members_of_torchs_enumerations_are_admitted(tmp_path: Path) -> None:
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    metadata = Metadata(state_dict_metadata={}, planner_data=member, storage_data={})
    (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    assert read_metadata(tmp_path).planner_data is member


@pytest.mark.parametrize("name", ["builtins.getattr", "os.system", "pathlib.Path"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (tmp_path / METADATA_NAME).write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(DamagedError, match=rf"\.metadata names {name}"):
        read_metadata(tmp_path)
