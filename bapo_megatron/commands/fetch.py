"""``bapo-megatron fetch``: fetches models and data sets, and checks those already here.

A file is downloaded to ``.<name>.<checksum>.part`` beside its place, from where a killed download
continues, compared with its checksum, and renamed. ``.<name>.source.json`` beside a fetched file or
directory keeps the commit and its checksums, so that later checks need no network; the lock
``.<name>.source.lock`` lets one process at a time download it.
"""

import contextlib
import fcntl
import hashlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Literal

import httpx
import typer
from huggingface_hub import HfApi, errors, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, logging
from huggingface_hub.utils.sha import git_hash
from pydantic import TypeAdapter

from bapo_megatron.commands.options import ConfigArgument, OverridesArgument, load
from bapo_megatron.config.data import SourceConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.rows import read_rows
from bapo_megatron.errors import describe_cause, describe_os_error
from bapo_megatron.runtime.files import atomic_write_bytes, lock
from bapo_megatron.telemetry.console import rich_table, say, uncut_console

_MAX_STREAMS = 8
_UNREAD = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".gitattributes")
"""Weights in formats that nothing here reads, and Git's settings."""

State = Literal["there", "fetched", "unchecked", "failed"]


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    """Within the directory; empty: the source is this file."""
    checksum: str
    """SHA-256, or for small files of the Hub Git's SHA-1, in hexadecimal digits."""
    size: int | None
    """Bytes; None if only the server knows."""
    url: str

    def is_at(self, path: Path) -> bool:
        if not path.is_file() or self.size not in (None, path.stat().st_size):
            return False
        if len(self.checksum) == 40:  # Git's SHA-1
            return bool(git_hash(path.read_bytes()) == self.checksum)
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == self.checksum


@dataclass(frozen=True, slots=True)
class _Listing:
    source: str
    commit: str
    files: tuple[_File, ...]


_RECORD = TypeAdapter(_Listing)


def command(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """Fetch the models and data sets of CONFIG, and check those already here by checksum.

    An interrupted download continues where it ended. The exit status is 1 if something is missing.
    """
    rows = list(_fetch_all(load(config, overrides)))
    headings = ("", "what", "where", "GB", "source")
    colors = {"failed": "red", "unchecked": "yellow", "there": "green", "fetched": "green"}
    uncut_console().print(rich_table("", headings, rows, num_left=5, styles=colors))
    if any(state == "failed" for state, *_ in rows):
        raise typer.Exit(1)


def _fetch_all(config: RunConfig) -> Iterator[tuple[State, str, str, str, str]]:
    """Fetch what is missing or damaged, one model or file after the other; yield a row of each.

    The last cell is its source and what was fetched; for ``failed`` the reason and a remedy.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    logging.set_verbosity_error()  # a line for each attempt, of which the result tells the last
    sources = {source.path: source for source in config.sources}
    for key, path in (config.models | config.files).items():
        try:
            state, text = _fetch(path, sources.get(path))
        except (ValueError, OSError, httpx.HTTPError) as error:
            state, text = "failed", _reason(error)
        files = path.rglob("*") if path.is_dir() else (path,)
        size = sum(file.stat().st_size for file in files if file.is_file())
        yield state, key, str(path), f"{size / 1e9:.3f}", text
    for dataset in (*config.data.train_sets, *config.eval.sets):
        if dataset.hub:
            state, text = "there", "in the cache of the library datasets"
            try:
                next(read_rows(dataset), None)
            except ValueError as error:
                state, text = "failed", describe_cause(error)
            yield state, dataset.label, dataset.hub, "", text


def _fetch(path: Path, source: SourceConfig | None) -> tuple[State, str]:
    if source is None:
        if path.exists():
            return "unchecked", "not in sources"
        raise ValueError("missing, and not in sources; put it there, or add its source")
    record = path.with_name(f".{path.name}.source.json")
    before = _Listing("", "", ())
    if record.exists():
        before = _RECORD.validate_json(record.read_bytes())
    listing = _list(source, before)
    text = f"{listing.source} {listing.commit[:12]}".strip()
    wanted = [file for file in listing.files if not file.is_at(path / file.name)]
    if wanted:
        with _locked(path):  # another process may have fetched them before
            wanted = [file for file in wanted if not file.is_at(path / file.name)]
            num_replaced = sum((path / file.name).exists() for file in wanted)
            _download_all(path, wanted)
    if wanted:
        text += f": {len(wanted)} of {len(listing.files)} files, {num_replaced} of them replaced"
    for name in {file.name for file in before.files} - {file.name for file in listing.files}:
        (path / name).unlink(missing_ok=True)  # a shard of another commit would be read, too
    if listing != before:
        atomic_write_bytes(record, _RECORD.dump_json(listing, indent=1))
    return "fetched" if wanted else "there", text


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from fetching ``path``; wait for one that does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.source.lock").open("wb") as file:
        try:
            if not lock(file):
                say(f"{file.name}: no locks on this file system; run one fetch at a time")
        except BlockingIOError:
            say(f"{path}: another fetch downloads it; waiting for its end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download_all(path: Path, files: Sequence[_File]) -> None:
    folders = {(path / file.name).parent for file in files}
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        needed, free = sum(file.size or 0 for file in files), shutil.disk_usage(folder).free
        if free < needed:
            raise ValueError(f"needs {needed:,} bytes, but {free:,} are free; free some")
    # After an error its threads end with the process; what has come stays for the next one.
    with ThreadPool(_MAX_STREAMS) as pool:
        list(pool.imap_unordered(lambda file: _download(path / file.name, file), files))


def _list(source: SourceConfig, before: _Listing) -> _Listing:
    """Return the files of a source: those of ``before`` for its commit, or without a network."""
    if source.url:
        return _Listing(source.url, "", (_File("", source.sha256, None, source.url),))
    place = " ".join(filter(None, [source.repo, source.file, source.revision]))
    if before.source == place and before.commit == source.revision:
        return before
    kind = "dataset" if source.file else "model"
    try:
        info = HfApi().repo_info(
            source.repo, repo_type=kind, revision=source.revision, files_metadata=True
        )
    except (errors.OfflineModeIsEnabled, httpx.TransportError):
        if before.source != place:
            raise
        return before
    files = [
        _File(
            "" if source.file else entry.rfilename,
            entry.lfs.sha256 if entry.lfs else entry.blob_id,
            entry.size,
            hf_hub_url(source.repo, entry.rfilename, repo_type=kind, revision=info.sha),
        )
        for entry in info.siblings
        if entry.rfilename == source.file
        or not (source.file or "/" in entry.rfilename or entry.rfilename.endswith(_UNREAD))
    ]
    if not files:
        raise ValueError(f"{place}: no such file; correct sources")
    return _Listing(place, info.sha, tuple(files))


def _download(target: Path, file: _File) -> None:
    part = target.with_name(f".{target.name}.{file.checksum[:12]}.part")
    # Without a size nobody can tell whether a part is complete.
    with part.open("wb" if file.size is None else "ab", buffering=0) as stream:
        headers = {} if file.size is None else build_hf_headers()  # a token for the Hub alone
        done = part.stat().st_size
        if file.size is not None and done > file.size:  # such as the page of a network's portal
            stream.truncate(0)
            done = 0
        http_get(file.url, stream, resume_size=done, headers=headers, expected_size=file.size)
    if not file.is_at(part):
        part.unlink()
        raise ValueError(f"{target.name}: wrong checksum; run it again, or correct sources")
    part.replace(target)


def _reason(error: Exception) -> str:
    match error:
        case errors.HfHubHTTPError(response=response):
            remedy = "correct sources, set HF_TOKEN if it is closed, or try again later"
            return f"HTTP {response.status_code} for {response.url}; {remedy}"
        case errors.OfflineModeIsEnabled() | httpx.HTTPError():
            return f"no connection ({describe_cause(error)}); fetch it where there is a network"
        case OSError(errno=int()):
            return describe_os_error(error)
    return describe_cause(error)
