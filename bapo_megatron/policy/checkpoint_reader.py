"""Reading what describes a checkpoint without running anything that it holds.

torch's reader unpickles ``.metadata``, and its planner unpickles the objects among the shards: a
crafted checkpoint runs code. Here ``.metadata`` may name only the records that torch and Megatron
write, and must have been read so before Megatron reads it; objects may name only what
``torch.load(weights_only=True)`` admits.
"""

import pickle
import re
from contextlib import AbstractContextManager
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from bapo_megatron.errors import first_line
from bapo_megatron.policy.checkpoint_files import METADATA_NAME, DamagedError
from bapo_megatron.runtime.processes import environment_set

_REFUSED = re.compile(r"GLOBAL (\S+)")
"""What torch calls a name that it does not admit."""

_UNPICKLING_ERRORS = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
)
"""What damaged bytes may raise, depending on which of them changed."""

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "pathlib": {"PosixPath"},
    "collections": {"OrderedDict"},
}
"""Names in ``.metadata`` by module, beside the dtypes; making one has no effect."""


def read_metadata(directory: Path) -> Metadata:
    """Read ``.metadata``, which torch would unpickle whatever it names.

    Raises:
        DamagedError: It cannot be read, or names what no checkpoint needs, or files outside the
            directory.
    """
    try:
        with (directory / METADATA_NAME).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except DamagedError:
        raise
    except _UNPICKLING_ERRORS as error:
        raise DamagedError(f"{METADATA_NAME} cannot be read ({first_line(error)})") from error
    if not isinstance(metadata, Metadata):
        raise DamagedError(f"{METADATA_NAME} holds no description of a checkpoint")
    for place in (metadata.storage_data or {}).values():
        if Path(place.relative_path).name != place.relative_path:
            raise DamagedError(
                f"{METADATA_NAME} names {place.relative_path!r}, which is not a file beside it"
            )
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _RECORDS.get(module, ()):
            raise DamagedError(_forbidden(METADATA_NAME, f"{module}.{name}"))
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """Stand in for ``getattr``: Python 3.11.2 pickles a member as ``getattr(class, name)``."""
    if not isinstance(kind, EnumType) or name not in kind.__members__:
        raise DamagedError(_forbidden(METADATA_NAME, "builtins.getattr"))
    member: Enum = kind[name]
    return member


def check_admitted(error: BaseException) -> None:
    """Raise ``DamagedError`` where an object named what ``only_weights`` bars."""
    refused = _REFUSED.search(str(error))
    if refused and isinstance(error, pickle.UnpicklingError):
        raise DamagedError(_forbidden("a file", refused[1])) from error


def _forbidden(place: str, name: str) -> str:
    return f"{place} names {name}, which no checkpoint needs and which might run code"


def only_weights() -> AbstractContextManager[None]:
    """Have every ``torch.load`` of the block admit tensors and plain values only."""
    return environment_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
