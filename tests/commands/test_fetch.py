"""``fetch`` from a local hub: what is there, what comes, what is damaged, and what cannot come."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from bapo_megatron.commands.fetch import command
from tests.fakes.fake_hub import COMMIT, FakeHub
from tests.launch import REPOSITORY, free_port

NEXT_COMMIT = "b" * 40
SHARD = bytes(range(256)) * (44 << 10)
"""11 MiB."""
WRITTEN_BYTES = 10 << 20
"""What huggingface_hub writes at a time."""
MODEL = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": SHARD,
    "model-00002-of-00002.safetensors": SHARD[::-1],
    "pytorch_model.bin": SHARD,
    "original/consolidated.safetensors": SHARD,
}
READ = sorted(MODEL)[:3]
ROWS = b'{"prompt": "1+1?", "answer": "2"}\n'


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A hub with one model, one data set, and a file at an address of its own."""
    with FakeHub(
        datasets={"acme/sums": {"data/train.jsonl": ROWS * 100}},
        models={"acme/model": dict(MODEL)},
        others={"/aime.jsonl": ROWS},
        commits={"main": COMMIT, "next": NEXT_COMMIT},
    ) as server:
        yield server


@pytest.fixture
def config(hub: FakeHub, tmp_path: Path) -> Path:
    """A run whose model, training set and evaluation set are on the hub."""
    aime = {"url": f"{hub.address}/aime.jsonl", "sha256": hashlib.sha256(ROWS).hexdigest()}
    return write(
        tmp_path,
        {"path": "model", "repo": "acme/model", "revision": COMMIT},
        {"path": "data/train.jsonl", "repo": "acme/sums", "file": "data/train.jsonl"},
        {"path": "data/aime.jsonl", **aime},
    )


def write(folder: Path, *sources: dict[str, Any]) -> Path:
    settings = {
        "name": "x",
        "run_dir": "run",
        "model": {"path": "model"},
        "data": {"train": {"path": "data/train.jsonl"}},
        "eval": {"sets": [{"path": "data/aime.jsonl"}]},
        "sources": list(sources),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder / "run.yaml"


def start(config: Path, hub: FakeHub, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bapo_megatron", "fetch", str(config)],
        cwd=config.parent,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(config.parent / "hf"),
            "NO_PROXY": "127.0.0.1",
            "COLUMNS": "1000",
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fetch(
    config: Path, hub: FakeHub, **variables: str
) -> tuple[tuple[int, list[str]], dict[str, str]]:
    """The exit status with each row's state, and the last cells of the rows by what was fetched."""
    process = start(config, hub, **variables)
    out, err = process.communicate(timeout=120)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    rows = [row for row in rows if row]
    assert rows, err
    return (process.returncode, [row[0] for row in rows]), {row[1]: row[4] for row in rows}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.slow
def test_what_is_missing_is_fetched_once(config: Path, hub: FakeHub) -> None:
    states, results = fetch(config, hub)
    assert states == (0, ["fetched"] * 3)
    assert results == {
        "model.path": f"acme/model {COMMIT} {COMMIT[:12]}: 3 of 3 files, 0 of them replaced",
        "data.train: train.jsonl": (
            "acme/sums data/train.jsonl main aaaaaaaaaaaa: 1 of 1 files, 0 of them replaced"
        ),
        "eval.sets: aime.jsonl": f"{hub.address}/aime.jsonl: 1 of 1 files, 0 of them replaced",
    }
    assert contents(config.parent / "model") == {name: MODEL[name] for name in READ}
    data = contents(config.parent / "data")
    assert (data["train.jsonl"], data["aime.jsonl"]) == (ROWS * 100, ROWS)
    assert {path for path, _ in hub.downloads} == {"/aime.jsonl", "data/train.jsonl", *READ}
    assert fetch(config, hub)[0] == (0, ["there"] * 3)
    assert len(hub.downloads) == 5
    assert not list(config.parent.rglob("*.part"))
    # Without a network, checksums that were kept still find damage.
    assert fetch(config, hub, HF_HUB_OFFLINE="1")[0] == (0, ["there"] * 3)
    shard = config.parent / "model" / READ[2]
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    (config.parent / "data" / "train.jsonl").unlink()
    states, results = fetch(config, hub, HF_HUB_OFFLINE="1")
    assert states == (1, ["failed", "failed", "there"])
    for key in ("model.path", "data.train: train.jsonl"):
        assert results[key].startswith("no connection (Cannot reach")
        assert results[key].endswith("; fetch it where there is a network")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_damaged_file_is_not_kept_and_alone_fetched_again(config: Path, hub: FakeHub) -> None:
    hub.damaged = {READ[1]}
    states, results = fetch(config, hub)
    assert states == (1, ["failed", "fetched", "fetched"])
    assert results["model.path"].startswith(f"{READ[1]}: wrong checksum; run it again")
    assert not (config.parent / "model" / READ[1]).exists()
    hub.damaged = set()
    assert fetch(config, hub)[0][0] == 0
    for path in (config.parent / "model" / READ[1], config.parent / "model" / "config.json"):
        status = path.stat()
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    hub.downloads.clear()
    states, results = fetch(config, hub)
    assert states == (0, ["fetched", "there", "there"])
    assert results["model.path"].endswith(": 2 of 3 files, 2 of them replaced")
    assert sorted(hub.downloads) == [("config.json", 0), (READ[1], 0)]
    assert contents(config.parent / "model") == {name: MODEL[name] for name in READ}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_part_that_is_longer_than_its_file_is_fetched_anew(config: Path, hub: FakeHub) -> None:
    digest = hashlib.sha256(SHARD).hexdigest()[:12]
    part = config.parent / "model" / f".{READ[1]}.{digest}.part"
    part.parent.mkdir()
    part.write_bytes(b"<html>log in</html>" + SHARD)
    assert fetch(config, hub)[0] == (0, ["fetched"] * 3)
    assert (READ[1], 0) in hub.downloads
    assert contents(config.parent / "model") == {name: MODEL[name] for name in READ}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_second_fetch_waits_for_the_first_and_continues_what_it_left(
    config: Path, hub: FakeHub, number: signal.Signals
) -> None:
    hub.stall_after = WRITTEN_BYTES + 1000
    first = start(config, hub, HF_HUB_DOWNLOAD_TIMEOUT="600")
    until(lambda: sizes_of_parts(config) == [WRITTEN_BYTES] * 2)
    second = start(config, hub)
    assert second.stderr is not None
    assert second.stderr.readline() == (
        f"{config.parent / 'model'}: another fetch downloads it; waiting for its end\n"
    )
    assert sizes_of_parts(config) == [WRITTEN_BYTES] * 2
    hub.stall_after = None
    first.send_signal(number)
    _, err = first.communicate(timeout=60)
    assert number == signal.SIGKILL or err == "bapo-megatron: interrupted\n"
    second.communicate(timeout=60)
    assert second.returncode == 0
    shards = [first for path, first in hub.downloads if path in READ[1:]]
    assert shards == [0, 0, WRITTEN_BYTES, WRITTEN_BYTES]
    assert contents(config.parent / "model") == {name: MODEL[name] for name in READ}


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def sizes_of_parts(config: Path) -> list[int]:
    return [path.stat().st_size for path in (config.parent / "model").glob(".*safetensors.*.part")]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_another_revision_replaces_what_differs_and_removes_what_it_lacks(
    config: Path, hub: FakeHub, tmp_path: Path
) -> None:
    fetch(config, hub)
    hub.models["acme/model"] = {"config.json": b"{}", "model.safetensors": SHARD}
    config = write(tmp_path, {"path": "model", "repo": "acme/model", "revision": "next"})
    hub.downloads.clear()
    (_, (state, *_)), results = fetch(config, hub)
    text = "acme/model next bbbbbbbbbbbb: 1 of 2 files, 0 of them replaced"
    assert (state, results["model.path"]) == ("fetched", text)
    assert hub.downloads == [("model.safetensors", 0)]
    assert contents(config.parent / "model") == {"config.json": b"{}", "model.safetensors": SHARD}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_cannot_be_fetched_is_a_line_each_and_the_rest_comes(
    hub: FakeHub, tmp_path: Path
) -> None:
    config = write(
        tmp_path,
        {"path": "model", "repo": "acme/model", "revision": "no-such"},
        {"path": "data/train.jsonl", "repo": "acme/sums", "file": "data/no-such.jsonl"},
        {"path": "data/aime.jsonl", "url": f"{hub.address}/aime.jsonl", "sha256": "0" * 64},
    )
    states, results = fetch(config, hub)
    address = f"{hub.address}/api/models/acme/model/revision/no-such?blobs=true"
    assert states == (1, ["failed"] * 3)
    for reason, start in zip(
        results.values(),
        (
            f"HTTP 404 for {address}; correct sources, set HF_TOKEN",
            "acme/sums data/no-such.jsonl main: no such file; correct sources",
            "aime.jsonl: wrong checksum; run it again, or correct sources",
        ),
        strict=True,
    ):
        assert reason.startswith(start)
    (tmp_path / "model").mkdir()
    config = write(tmp_path, {"path": "data/train.jsonl", "repo": "acme/none", "file": "x"})
    states, results = fetch(config, hub)
    assert states == (1, ["unchecked", "failed", "failed"])
    assert results["eval.sets: aime.jsonl"].startswith("missing, and not in sources; ")
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.slow
def test_without_a_connection_the_table_is_all_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nobody)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("COLUMNS", raising=False)
    config = write(
        tmp_path,
        {"path": "model", "repo": "acme/model"},
        {"path": "data/aime.jsonl", "url": f"{nobody}/aime.jsonl", "sha256": "0" * 64},
    )
    with pytest.raises(typer.Exit):
        command(config)
    out, err = capsys.readouterr()
    assert (out.count("no connection ("), err) == (2, "")


@pytest.mark.slow
def test_a_full_disk_is_one_line(config: Path, hub: FakeHub) -> None:
    place = config.parent / "model"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(config.parent / "model")],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small file system")
    try:
        states, results = fetch(config, hub)
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert states == (1, ["failed", "fetched", "fetched"])
    reason = results["model.path"]
    assert reason.startswith("needs 23,068,674 bytes, but ")
    assert reason.endswith(" are free; free some")
