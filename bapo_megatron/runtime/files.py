"""Files and directories that are either complete or absent, even after a crash; lines and JSON.

Everything is written beside its destination under a name that starts with a dot and ends in
``.tmp``, flushed to disk, then renamed. Errors name the destination, not the temporary file.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, BinaryIO

MAX_LINE_BYTES = 64 << 20
"""Limit of a line, so that no file fills memory."""
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


def open_regular(path: Path) -> BufferedReader:
    """Open a file of a run or a user for reading, without waiting for a writer.

    Devices and a shell's pipes (``/dev/stdin``, ``<(…)``) can be read, too.

    Raises:
        OSError: It cannot be opened, or is a named pipe, which may never get a writer.
    """
    return open(path, "rb", opener=_descriptor_of)


def _descriptor_of(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    is_anonymous = "/pipe:[" in os.path.realpath(path)  # a shell's
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode) and not is_anonymous:
        os.close(descriptor)
        raise OSError(errno.ESPIPE, "Is a named pipe", str(path))
    os.set_blocking(descriptor, True)
    return descriptor


def read_regular(path: Path) -> bytes:
    """Return the content of a file, opened by ``open_regular``."""
    with open_regular(path) as stream, naming(path):
        return stream.read()


def read_lines(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with line ends; raise a ``ValueError`` for one that is too long."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(
                f"{path}:{number}: longer than {MAX_LINE_BYTES >> 20} MB; give one JSON object "
                "per line"
            )
        yield line


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not valid, or not UTF-8; the message does not name the file.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("not valid JSON (nested too deeply)") from error
    except ValueError as error:  # text after a semicolon is for programmers
        raise ValueError(f"not valid JSON ({str(error).partition(';')[0]})") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an ``OSError`` from an open stream, which lacks it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # from a library, such as Arrow
            raise OSError(f"{path}: {error}") from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``; readers see either the old file or the new one.

    Missing parent directories are created.

    Raises:
        OSError: The file cannot be written (disk full, no permission); ``path`` is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with naming(path):
            with temporary.open("xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _fsync(path.parent)


def atomic_write_text(path: Path, content: str) -> None:
    """Write ``content`` as UTF-8; see ``atomic_write_bytes``."""
    atomic_write_bytes(path, content.encode())


@contextmanager
def atomic_directory(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Create a directory that appears at ``path`` only if the block ends without an error.

    The block fills a temporary directory beside ``path``. An existing ``path`` is replaced: for an
    instant there is none (see ``replaced_directory``), but never a mixture. Missing parents are
    created. ``durable=False`` flushes nothing, for directories that need not survive a crash of the
    machine.

    Raises:
        OSError: The directory cannot be written; ``path`` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        publish_directory(temporary, path, durable=durable)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_directory(temporary: Path, path: Path, *, durable: bool = True) -> None:
    """Rename ``temporary`` to ``path`` in the same parent; if ``durable``, flush all of it first.

    An existing ``path`` is replaced; in between it is intact at ``replaced_directory(path)``. For
    directories that several processes fill.
    """
    if durable:
        for folder, _, names in os.walk(temporary):
            for name in (*names, ""):  # the folder itself last
                _fsync(Path(folder) / name)
    replaced = replaced_directory(path)
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    temporary.rename(path)
    if durable:
        _fsync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def replaced_directory(path: Path) -> Path:
    """Where ``path`` is while ``publish_directory`` replaces it, or still is after a kill."""
    return path.with_name(f".{path.name}.replaced.tmp")


def lock(file: IO[bytes], *, inherited: bool = True) -> bool:
    """Lock a file that is open for writing; return False if its file system has no locks.

    Processes that inherit the file hold the lock too; without ``inherited`` only this process does,
    and loses it when it closes any descriptor of the file.

    Raises:
        BlockingIOError: Another process holds the lock.
        OSError: It cannot be locked.
    """
    try:
        (fcntl.flock if inherited else fcntl.lockf)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return False
    return True


def sampled_digest(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of names, sizes and 16 samples of 64 KiB of files.

    Reading the 65 GB of a model would take minutes.
    """
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        for piece in spread_pieces(path, _SAMPLES, _SAMPLE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def spread_pieces(path: Path, number: int, num_bytes: int) -> Iterator[bytes]:
    """Yield ``number`` evenly spread pieces of a file, at least 2, its start and end among them."""
    last = max(path.stat().st_size - num_bytes, 0)
    with path.open("rb") as file:
        for place in range(number):
            file.seek(last * place // (number - 1))
            yield file.read(num_bytes)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
