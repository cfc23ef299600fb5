import errno
import os
from pathlib import Path

import pytest

from bapo_megatron.runtime import files
from bapo_megatron.runtime.files import (
    atomic_directory,
    atomic_write_bytes,
    atomic_write_text,
    naming,
    read_lines,
    read_regular,
    sampled_digest,
)


def test_a_written_file_holds_the_content_and_leaves_nothing_else_behind(tmp_path):
    atomic_write_text(tmp_path / "a" / "b.txt", "Größe\n")

    assert (tmp_path / "a" / "b.txt").read_bytes() == b"Gr\xc3\xb6\xc3\x9fe\n"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b.txt"]


def test_a_full_disk_keeps_the_old_file_and_names_the_file_that_was_wanted(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    path.write_text("old")

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match=r"'.*state\.json'"):
        atomic_write_bytes(path, b"new")

    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left"), r"'.*metrics\.jsonl'"),
        (OSError("Arrow: no codec"), r"metrics\.jsonl: Arrow: no codec$"),  # of a library
    ],
)
def test_an_error_below_an_open_stream_names_the_file(tmp_path, error, message):
    with pytest.raises(OSError, match=message), naming(tmp_path / "metrics.jsonl"):
        raise error


def test_a_directory_whose_filling_fails_never_appears(tmp_path):
    def fill() -> None:
        with atomic_directory(tmp_path / "step_1") as folder:
            (folder / "x").write_text("1")
            raise KeyError("lost")

    with pytest.raises(KeyError):
        fill()

    assert list(tmp_path.iterdir()) == []


def test_a_directory_appears_complete_in_place_of_the_old_one_and_a_killed_writer_s(tmp_path):
    for place in ("step_1/old", ".step_1.tmp/half"):
        atomic_write_text(tmp_path / place, "old")

    with atomic_directory(tmp_path / "step_1") as folder:
        atomic_write_text(folder / "sub" / "new", "new")
        assert (tmp_path / "step_1" / "old").exists()

    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    assert [p.name for p in (tmp_path / "step_1").iterdir()] == ["sub"]
    assert (tmp_path / "step_1" / "sub" / "new").read_text() == "new"
    with atomic_directory(tmp_path / "step_2") as folder:
        assert not (tmp_path / "step_2").exists()
    assert list((tmp_path / "step_2").iterdir()) == []


def test_a_line_without_end_is_refused_before_it_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 4 << 20)
    path = tmp_path / "data.jsonl"
    with path.open("wb") as stream:
        stream.write(b"{}\n")
        stream.truncate(200 << 20)  # of zeros

    with path.open("rb") as stream:
        lines = read_lines(stream, path)
        assert next(lines) == b"{}\n"
        with pytest.raises(ValueError, match=r"data\.jsonl:2: "):
            next(lines)
        assert stream.tell() < 5 << 20


def test_a_named_pipe_is_refused_and_what_a_shell_opens_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Is a named pipe") as refused:
        read_regular(tmp_path / "pipe")
    assert refused.value.filename == str(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)
    assert read_regular(Path("/dev/null")) == b""
    reading, writing = os.pipe()  # as by <(command) or | command /dev/stdin
    with os.fdopen(reading), os.fdopen(writing, "wb") as stream:
        stream.write(b"a: 1\n")
        stream.close()
        assert read_regular(Path(f"/dev/fd/{reading}")) == b"a: 1\n"


def test_a_sampled_digest_tells_names_sizes_and_sampled_bytes_apart(tmp_path):
    path, large = tmp_path / "a", tmp_path / "large"
    path.write_bytes(b"abc")
    # printf 'a 3 ', then 16 times abc, by sha256sum
    assert sampled_digest([path]) == (
        "cb29ca220b06ac8e59a2beac61cabde74a691a58ac87ae1823d775a70df51f57"
    )
    content = bytearray(4 << 20)
    digests = set()
    for place in (None, 0, len(content) - 1):
        if place is not None:
            content[place] = 1
        large.write_bytes(content)
        digests.add(sampled_digest([large]))
    large.write_bytes(content + b"\0")
    digests.add(sampled_digest([large]))
    assert len(digests) == 4
