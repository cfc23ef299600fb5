"""Conversion within bounds of memory, interrupted, without room, and from the command line."""

from __future__ import annotations

import io
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed_launch import run_ranks
from tests.launch import run, start
from tests.policy import convert_ranks
from tests.policy.convert_models import (
    assert_same,
    run_convert,
    weights,
)
from tests.policy.tiny_models import make_model


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large") / "model"
    make_model(
        "qwen2",
        directory,
        num_hidden_layers=24,
        hidden_size=512,
        intermediate_size=1536,
        num_attention_heads=8,
    )
    return directory


LARGE_BYTES = 4 * (24 * (3 * 512 * 1536 + 2 * 512 * 512 + 2 * 512 * 128) + 2 * 97 * 512)


@pytest.mark.distributed
def test_memory_holds_one_layer_and_one_file_whatever_the_model_weighs(
    models: dict[str, Path], large: Path, tmp_path: Path
) -> None:
    file_bytes = 40_000_000
    layer_bytes = LARGE_BYTES // 24
    ((to_megatron, to_hf),) = run_ranks(
        convert_ranks.peak_growth_bytes, 1, models["qwen2"], large, tmp_path, file_bytes
    )
    slack_bytes = 20_000_000  # what the allocator keeps, buffers of torch.load
    # torch's writer keeps the last tensor of each key until its file ends: those of a layer.
    assert to_megatron < 2 * layer_bytes + slack_bytes
    assert to_hf < layer_bytes + file_bytes + slack_bytes
    assert 4 * (layer_bytes + file_bytes + slack_bytes) < LARGE_BYTES
    assert_same(weights(tmp_path / "large back"), weights(large))


@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_conversion_leaves_nothing_under_the_targets_name(
    models: dict[str, Path], large: Path, tmp_path: Path, number: signal.Signals
) -> None:
    target = tmp_path / "megatron"
    process = start(["convert", str(large), str(target), "--max-file-gb", "0.03"])
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".megatron.tmp/__1_0.distcp")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)

    assert process.returncode == {2: 130, 15: 143, 9: -9}[number]
    assert err == ("bapo-megatron: interrupted\n" if number == signal.SIGINT else "")
    assert not target.exists()
    if number == signal.SIGKILL:
        assert list(tmp_path.iterdir()) == [tmp_path / ".megatron.tmp"]
        run_convert(models["qwen2"], target)
        assert list(tmp_path.iterdir()) == [target]
    else:
        assert not list(tmp_path.iterdir())


class InterruptedWriter(io.BufferedWriter):
    """Ctrl-C comes during the call of this number."""

    calls_left = 0

    def write(self, content: Any) -> int:
        InterruptedWriter.calls_left -= 1
        if InterruptedWriter.calls_left == 0:
            raise KeyboardInterrupt
        return super().write(content)


class InterruptedReader(io.BufferedReader):
    calls_left = 0

    def read(self, size: int | None = -1) -> bytes:
        InterruptedReader.calls_left -= 1
        if InterruptedReader.calls_left == 0:
            raise KeyboardInterrupt
        return super().read(size)

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


@pytest.mark.parametrize("calls", [*range(1, 12), *range(26, 32)])
def test_ctrl_c_stays_ctrl_c_wherever_torch_reads_or_writes(
    models: dict[str, Path],
    converted: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: int,
) -> None:
    open_normally = Path.open

    def open_interrupted(path: Path, mode: str = "r", **options: Any) -> Any:
        stream = open_normally(path, mode, **options)
        if path.suffix != ".distcp" or not isinstance(stream, io.BufferedIOBase):
            return stream  # what is read for the checksums is not buffered
        kind = InterruptedWriter if "w" in mode else InterruptedReader
        return kind(stream.detach())

    monkeypatch.setattr(Path, "open", open_interrupted)
    InterruptedWriter.calls_left = InterruptedReader.calls_left = calls
    for source in (models["qwen2"], converted["qwen2"]):
        with pytest.raises(KeyboardInterrupt):
            run_convert(source, tmp_path / "target")
        assert not list(tmp_path.iterdir())


@pytest.mark.distributed
def test_a_full_disk_is_reported_and_leaves_nothing(
    models: dict[str, Path], converted: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    (errors,) = run_ranks(convert_ranks.full_disk, 1, [models["qwen2"], converted["qwen2"]], target)
    assert len(errors) == 2
    for error in errors:
        assert "File too large" in error
        assert "\n" not in error


@pytest.mark.slow
def test_the_command_says_what_it_wrote_or_why_not(models: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "megatron"
    result = run(["convert", str(models["qwen3"]), str(target), "--dtype", "bfloat16"])
    assert result.returncode == 0, result.stderr
    assert f"wrote {target} (Megatron): 46 tensors, " in result.stdout
    assert " bfloat16, 1 file, " in result.stdout
    assert result.stderr == ""
    result = run(["convert", str(models["qwen3"]), str(target)])
    assert result.returncode == 1
    assert result.stderr == (
        f"bapo-megatron: {target}: exists and is not empty; choose another target, or replace it "
        "with --force\n"
    )
