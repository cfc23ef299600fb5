"""Reading shards without running anything that they hold, and noticing what has changed.

torch's reader unpickles ``.metadata``, and its planner unpickles the objects among the shards: a
crafted checkpoint runs code. Here ``.metadata`` may name only the records that torch and Megatron
write, and objects only what ``torch.load(weights_only=True)`` admits. With checksums, whoever reads
a piece also verifies it, in a thread that reads the same part of the file (by then in the page
cache).
"""

import pickle
import re
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, EnumType
from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from bapo_megatron.errors import first_line
from bapo_megatron.policy.checkpoint_files import (
    METADATA_NAME,
    DamagedError,
    new_checksum,
    read_checksums,
    verify_small_files,
)
from bapo_megatron.processes import environment_set

_REFUSED = re.compile(r"GLOBAL (\S+)")
"""What torch calls a name that it does not admit."""

_CHUNK_BYTES = 1 << 20
"""Read size; small enough to stay in a core's cache until it is hashed."""

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


class CheckedReader(FileSystemReader):
    """torch's reader of a directory."""

    def __init__(self, directory: Path, pieces: Mapping[str, Mapping[str, str]] | None) -> None:
        """Read nothing yet; ``pieces`` are those of ``checkpoint_files.Checksums``."""
        super().__init__(directory)
        self._pieces = pieces
        self._metadata: Metadata | None = None
        self._hasher = futures.ThreadPoolExecutor(1, "checksums")
        self._checks: list[futures.Future[None]] = []

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata`` once.

        Raises:
            DamagedError: It cannot be read, or names what no checkpoint needs, or files outside the
                directory.
        """
        if self._metadata is None:
            try:
                with (Path(self.path) / METADATA_NAME).open("rb") as file:
                    metadata = _MetadataUnpickler(file).load()
            except DamagedError:
                raise
            except _UNPICKLING_ERRORS as error:
                reason = first_line(error)
                raise DamagedError(f"{METADATA_NAME} cannot be read ({reason})") from error
            if not isinstance(metadata, Metadata):
                raise DamagedError(f"{METADATA_NAME} holds no description of a checkpoint")
            for place in (metadata.storage_data or {}).values():
                if Path(place.relative_path).name != place.relative_path:
                    raise DamagedError(
                        f"{METADATA_NAME} names {place.relative_path!r}, which is not a file "
                        "beside it"
                    )
            self._metadata = metadata
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for.

        Raises:
            DamagedError: A piece has changed, or an object is refused.
        """
        try:
            with only_weights():
                read = super().read_data(plan, planner)
        except Exception as error:
            self._await_verified()  # whatever damage has led to, its place is what helps
            refused = _REFUSED.search(str(error))
            if refused and isinstance(error, pickle.UnpicklingError):
                raise DamagedError(_forbidden("a shard", refused[1])) from error
            raise
        else:
            self._await_verified()
            return read
        finally:  # the interpreter's exit would wait for those that are still queued
            for check in self._checks:
                check.cancel()
            self._checks.clear()

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        if self._pieces is not None:
            self._checks.append(self._hasher.submit(self._verify, sinfo))
        return super()._slice_file(file, sinfo)

    def _verify(self, sinfo: Any) -> None:
        """Hash a piece while torch reads it too: storage is read once, and fills the page cache."""
        assert self._pieces is not None
        found, buffer, end = new_checksum(), memoryview(bytearray(_CHUNK_BYTES)), 0
        with (Path(self.path) / sinfo.relative_path).open("rb", buffering=0) as file:
            file.seek(sinfo.offset)
            while count := file.readinto(buffer[: sinfo.length - end]):
                found.update(buffer[:count])
                end += count
        written = self._pieces.get(sinfo.relative_path, {}).get(str(sinfo.offset))
        if found.hexdigest() != written:
            raise DamagedError(
                f"{sinfo.relative_path} has changed since it was written, in the {sinfo.length} "
                f"bytes from {sinfo.offset} on"
            )

    def _await_verified(self) -> None:
        """Raise ``DamagedError`` if a piece that was read has changed."""
        for check in self._checks:
            check.result()


def open_checked(
    directory: Path, *, verify: bool = True, verifies_small_files: bool = True
) -> CheckedReader:
    """Return a reader that has read ``.metadata``.

    With ``verify`` every piece is compared with its checksum when it is read, and the small files
    are now (``verifies_small_files``: one rank does it for all).

    Raises:
        DamagedError: A file has changed, or cannot be read.
    """
    checksums = read_checksums(directory) if verify else None
    if checksums is not None and verifies_small_files:
        verify_small_files(directory, checksums)
    reader = CheckedReader(directory, None if checksums is None else checksums.pieces)
    reader.read_metadata()
    return reader


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _RECORDS.get(module, ()):
            raise DamagedError(_forbidden(METADATA_NAME, f"{module}.{name}"))
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """Be ``getattr`` for members of an enumeration, which is how Python 3.11.2 pickles them."""
    if not isinstance(kind, EnumType) or name not in kind.__members__:
        raise DamagedError(_forbidden(METADATA_NAME, "builtins.getattr"))
    return cast(Enum, kind[name])


def _forbidden(place: str, name: str) -> str:
    return f"{place} names {name}, which no checkpoint needs and which might run code"


def only_weights() -> AbstractContextManager[None]:
    """Have every ``torch.load`` of the block admit tensors and plain values only."""
    return environment_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")


@contextmanager
def megatron_reads_by(reader: CheckedReader) -> Iterator[None]:
    """Have Megatron's ``dist_checkpointing`` read the reader's directory by it in the block."""
    former = torch_strategy._get_filesystem_reader
    torch_strategy._get_filesystem_reader = lambda *_, **__: reader
    try:
        with only_weights():
            yield
    finally:
        torch_strategy._get_filesystem_reader = former
