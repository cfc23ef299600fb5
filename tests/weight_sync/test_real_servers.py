"""Trainer ranks sync weights with real servers, which had none and then compute as transformers."""

import asyncio
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.data.record import Completion
from bapo_megatron.engine.base import SamplingSettings
from bapo_megatron.engine.sglang.server import SglangServer
from tests.distributed_launch import run_ranks
from tests.engine.helpers import descendants, reference_logprobs
from tests.engine.sglang.servers import (
    KEYS,
    connected,
    make_server,
    restore_weights,
    running,
    sample,
)
from tests.weight_sync.ranks import Fault, Synced, sync_changed

pytestmark = [pytest.mark.sglang, pytest.mark.distributed]

PROMPT = [3, 20, 77, 4]
MODEL_BYTES = 130944
VERIFIED = {"verify": "every", "verify_tolerance": 1e-4, "timeout_s": 60}


@pytest.fixture(scope="module")
def pair(
    server: SglangServer, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[SglangServer]]:
    """Two real servers with the same keys. The first one read no weights when it started.

    The last test ends it; the other one gets back the weights that it had.
    """
    awaiting = make_server(model_dir, tmp_path_factory.mktemp("awaiting"), awaits_weights=True)
    with running(awaiting):
        yield [awaiting, server]
    asyncio.run(restore_weights(server, model_dir))


def _assert_computes(address: str, version: int, exported: Path) -> None:
    """The server samples with ``version``, by the log-probs of transformers with these weights."""

    async def generate() -> Completion:
        async with connected(address, KEYS) as client:
            return await sample(client, PROMPT, SamplingSettings(1.0, max_new_tokens=32, seed=0))

    completion = asyncio.run(generate())
    assert [span.version for span in completion.versions] == [version]
    expected = reference_logprobs(exported, PROMPT, completion.token_ids, 1.0)
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("broadcast", {"pipeline": 2}),
        ("tensor", {"tensor": 2}),
        ("disk", {"tensor": 2}),
    ],
)
def test_servers_compute_with_new_weights_as_transformers_does(
    pair: list[SglangServer], model_dir: Path, tmp_path: Path, method: str, layout: dict[str, int]
) -> None:
    sync = functools.partial(sync_changed, factors=(1.5, 0.7), layout=layout)
    rollout = {"weight_sync": {**VERIFIED, "method": method, "bucket_mb": 2}}
    addresses = tuple(server.address for server in pair)
    first, second = run_ranks(sync, 2, model_dir, addresses, rollout, tmp_path)[0]
    for synced in (first, second):
        assert (synced.error, synced.lost) == ("", {})
        assert synced.report is not None
        assert synced.report.difference < 1e-4
        assert synced.report.num_bytes >= MODEL_BYTES
    assert second.generation == ("pause", "resume", "pause", "resume")
    # The same prompt each time: keys and values of older weights must not survive in the cache.
    for address in addresses:
        _assert_computes(address, 101, tmp_path / "1")
    exported = [reference_logprobs(tmp_path / n, PROMPT, [5, 6, 7], 1.0) for n in ("0", "1")]
    assert np.abs(exported[0] - exported[1]).max() > 0.01
    if method != "disk":
        assert not (tmp_path / "run" / "weights").exists()
        assert second.calls.count("receive") > 4  # several buckets
        assert second.calls.count("join") == (1 if method == "broadcast" else 0)


@pytest.mark.exhaustive
def test_a_server_that_ends_in_the_middle_of_a_broadcast_is_left_out_and_the_rest_gets_all_weights(
    pair: list[SglangServer], model_dir: Path, tmp_path: Path
) -> None:
    stopped = _sync_with_fault(pair, model_dir, tmp_path / "stop", signal.SIGSTOP, timeout_s=8)
    assert "no answer within" in stopped.lost[pair[0].address]
    _assert_computes(pair[1].address, 100, tmp_path / "stop" / "0")
    # It goes on in a broadcast that everybody has left, and takes part in the next sync.
    os.killpg(_process_group(pair[0]), signal.SIGCONT)
    killed = _sync_with_fault(pair, model_dir, tmp_path / "kill", signal.SIGKILL, timeout_s=60)
    assert killed.calls.count("begin") == killed.calls.count("join") == 2
    assert set(killed.lost) == {pair[0].address}
    _assert_computes(pair[1].address, 100, tmp_path / "kill" / "0")


def _process_group(server: SglangServer) -> int:
    (group,) = {
        os.getpgid(process.pid) for process in descendants(mentioning=f"--port={server.port}")
    }
    return group


def _sync_with_fault(
    pair: list[SglangServer],
    model_dir: Path,
    directory: Path,
    number: signal.Signals,
    timeout_s: float,
) -> Synced:
    """Signal the first server after the third bucket was started; returns what rank 0 saw."""
    fault = Fault("receive", 2, _process_group(pair[0]), number)
    rollout = {
        "weight_sync": {**VERIFIED, "method": "broadcast", "bucket_mb": 2, "timeout_s": timeout_s},
        "health": {"timeout_s": 20},
    }
    sync = functools.partial(sync_changed, layout={"tensor": 2}, fault=fault)
    addresses = tuple(server.address for server in pair)
    rank_zero, rank_one = run_ranks(sync, 2, model_dir, addresses, rollout, directory)
    assert rank_zero[0].error == rank_one[0].error == ""
    return rank_zero[0]
