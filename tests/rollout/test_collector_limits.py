"""What one collector can do: connections, and the lag of its event loop."""

from __future__ import annotations

import asyncio
import errno
import time
from pathlib import Path

import pytest

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout import limits
from bapo_megatron.rollout.limits import LoopLag, check_files
from bapo_megatron.runtime.processes import open_log


def test_too_few_open_files_for_the_requests_in_flight_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (1000, 4096))
    sizes = {"groups_per_step": 40, "oversample_groups": 8, "samples_per_group": 16}
    with pytest.raises(RolloutError) as caught:
        check_files(RolloutConfig.model_validate(sizes))
    # 48 groups of 16 samples, and 256 files for other purposes
    assert str(caught.value) == (
        "rollout.max_connections: a connection per request needs 1024 open files, got a limit of "
        "1000 (ulimit -Hn); raise it, or set rollout.max_connections to at most 744"
    )
    check_files(RolloutConfig.model_validate(sizes | {"max_connections": 744}))
    ahead = RolloutConfig.model_validate(sizes | {"async_steps": 1})
    with pytest.raises(RolloutError, match="needs 1664 open files"):
        check_files(ahead)
    # Three rounds: as many times 40 groups may be on their way.
    rounds = {"oversample_groups": 0, "max_response_tokens": 100, "partial_tokens": 40}
    with pytest.raises(RolloutError, match="needs 2176 open files"):
        check_files(RolloutConfig.model_validate(sizes | rounds))


def test_the_lag_of_a_loop_is_the_largest_since_it_was_asked_for() -> None:
    async def run() -> None:
        lag = LoopLag()
        lag.start()
        lag.start()
        await asyncio.sleep(0)
        time.sleep(0.4)  # the loop stands still
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert lag.take_max() >= 0.25  # what was due after 0.1 s
        assert lag.take_max() == 0.0
        lag.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("max_response_tokens", "expected"), [(100, 64), (8192, 128), (32_768, 512), (65_536, 512)]
)
def test_long_responses_are_sent_in_longer_pieces(max_response_tokens: int, expected: int) -> None:
    config = RolloutConfig(max_response_tokens=max_response_tokens)
    assert config.piece_tokens == expected
    assert config.model_copy(update={"stream_tokens": 8}).piece_tokens == 8


def test_a_log_that_grows_is_cut_and_what_was_before_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_MAX_LOG_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "_LOG_INTERVAL_S", 0.01)
    log, kept = tmp_path / "collector.log", tmp_path / "collector.log.1"
    line = "x" * 1023 + "\n"

    async def grow() -> None:
        limiting = asyncio.create_task(limits.limit_logs(tmp_path))
        with open_log(log) as stream:
            for _ in range(3):
                stream.write(line.encode() * 1100)
                stream.flush()
                async with asyncio.timeout(30):
                    while not log.read_bytes().endswith(b" is in collector.log.1\n"):
                        await asyncio.sleep(0.01)
            stream.write(b"the end\n")
        limiting.cancel()

    asyncio.run(grow())
    assert log.read_text() == (
        "--- longer than 1 MB; what was before is in collector.log.1\nthe end\n"
    )
    assert kept.stat().st_size > 1 << 20
    assert kept.read_text().endswith(line)
    assert sorted(tmp_path.iterdir()) == [log, kept]


def test_a_log_is_cut_on_a_full_disk_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(limits.os, "sendfile", refuse)
    log = tmp_path / "server_0.log"
    log.write_text("x" * 2048)
    limits._cut_log(log, 2048)
    assert log.read_text() == (
        "--- longer than 64 MB; what was before could not be kept (No space left on device)\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["server_0.log"]
