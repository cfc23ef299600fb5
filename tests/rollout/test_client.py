"""The collector process and its client, with a model and with misbehaving servers."""

import asyncio
import functools
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.dump import decode_batch
from bapo_megatron.engine.sglang import server as sglang_server
from bapo_megatron.errors import RolloutError, StoppedError
from bapo_megatron.evaluation.samples import load_sets
from bapo_megatron.rollout.client import CollectorClient
from bapo_megatron.rollout.collector import Collector, _send, _WarningsToClient
from bapo_megatron.rollout.messages import COLLECT, CONNECT, Open
from bapo_megatron.rollout.saved import read_saved
from bapo_megatron.runtime.calls import Failure, Request
from bapo_megatron.weight_sync.receive import LOAD, RESUME, Load
from tests.engine.helpers import MakeConfig, descendants
from tests.fakes.fake_sglang import FakeSglang
from tests.launch import REPOSITORY
from tests.reward.own_functions import EVEN_LENGTH
from tests.rollout.conftest import Open as OpenClient
from tests.rollout.conftest import changed

OpenOn = Callable[..., CollectorClient]

pytestmark = pytest.mark.slow


@pytest.fixture
def make_config(make_config: MakeConfig) -> MakeConfig:
    """Of a reward whose workers start sooner than those that grade mathematics."""
    return lambda **rollout: changed(make_config(**rollout), "reward", functions=[EVEN_LENGTH])


@pytest.fixture
def open_on(open_client: OpenClient, make_config: MakeConfig, tmp_path: Path) -> OpenOn:
    """Starts clients of a server that has weights version 1."""

    def open_(fake: FakeSglang, **rollout: Any) -> CollectorClient:
        client = open_client(make_config(servers=(fake.address,), **rollout))
        client.sync_weights(tmp_path, 1)
        return client

    return open_


def process_of(client: CollectorClient) -> psutil.Process:
    assert client._process is not None
    return psutil.Process(client._process.pid)


def test_a_fork_of_the_owner_ends_no_collector(open_on: OpenOn) -> None:
    with FakeSglang() as fake:
        client = open_on(fake)
        if (child := os.fork()) == 0:
            client.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert client._process is not None
        assert client._process.poll() is None
        client.close()


def test_what_is_saved_is_restored_and_a_run_that_is_to_stop_keeps_what_it_has(
    make_config: MakeConfig, open_client: OpenClient, tmp_path: Path
) -> None:
    saved, again = tmp_path / "saved.parquet", tmp_path / "again.parquet"
    with FakeSglang(stop_at=60) as fake:
        config = make_config(servers=(fake.address,), oversample_groups=2)
        client = open_client(config)
        client.sync_weights(tmp_path, 1)
        assert client.collect(1) is not None
        client.save(saved)()
        client.close()
        client = open_client(config)
        client.restore(saved)
        with pytest.raises(OSError, match="No such file or directory"):
            client.save(tmp_path / "none" / "again.parquet")()
        client.save(again)()
        assert again.read_bytes() == saved.read_bytes()
        client.sync_weights(tmp_path, 2)
        fake.pause_mode = "retract"  # whatever is asked for takes long, and ends at once
        client._stopped = lambda: StoppedError("enough")
        assert client.collect(2) is None
        assert client.evaluate(2, resume=True) is None
        client.save(again)()
    before, after = (read_saved(path).buffer for path in (saved, again))
    assert {group.group_id for group in before} < {group.group_id for group in after}


async def test_without_a_server_that_can_be_started_again_the_error_ends_with_its_log(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_server, "LAUNCHER", "tests.fakes.fake_launcher")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    fate = tmp_path / "fate"
    fate.write_text("serve")
    server = {"extra_args": [f"--fate={fate}"]}
    config = make_config(server=server, health={"interval_s": 0.1, "patience_s": 3})
    collector = Collector(lambda reply: None)
    try:
        await collector.open(Open(config=config, for_training=True, awaits_weights=True))
        connecting = asyncio.create_task(collector.answer(Request(1, CONNECT.name, None)))
        while not hasattr(collector, "_pool"):
            await asyncio.sleep(0.02)
        fate.write_text("exit")
        (launcher,) = descendants(mentioning=str(fate))
        launcher.kill()
        failure = await connecting
    finally:
        await collector.close()
    assert isinstance(failure, Failure)
    first, second, *log = failure.error.splitlines()
    assert first.startswith("no answer for 3 s (rollout.health.patience_s): http://127.0.0.1:")
    assert second.startswith("the SGLang server at http://127.0.0.1:")
    assert log[-1] == "    fate: exit; an api key: True"


def test_a_prompt_that_crashes_every_server_is_not_sent_for_ever(
    open_on: OpenOn, tmp_path: Path
) -> None:
    syncs = 0

    def sync_until_it_ends(client: CollectorClient) -> None:
        nonlocal syncs
        for call in (client.collect, client.evaluate) * 5:
            client.sync_weights(tmp_path, 1)
            syncs += 1
            assert call(0) is None

    health = {"interval_s": 0.1, "timeout_s": 5}
    with FakeSglang(connections_to_drop=1 << 30) as fake:
        client = open_on(fake, health=health)
        with pytest.raises(RolloutError, match="5 weight syncs in a row") as error:
            sync_until_it_ends(client)
    assert syncs == 6  # the first one was not asked for
    assert f"{fake.address} (stale): it needs weights again: {fake.address}" in str(error.value)
    assert "\n" not in str(error.value)


async def test_warnings_for_a_client_that_is_gone_go_to_the_log_only() -> None:
    mine, remote = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=mine)
    remote.close()
    handler = _WarningsToClient(functools.partial(_send, writer))
    logging.getLogger().addHandler(handler)
    try:
        for _ in range(20):
            logging.getLogger("test").warning("a server is lost")
            await asyncio.sleep(0)
    finally:
        logging.getLogger().removeHandler(handler)
        writer.close()


def test_a_full_disk_and_a_signal_that_ends_it_are_named_and_nothing_half_written_is_left(
    open_on: OpenOn, tmp_path: Path
) -> None:
    rollouts = tmp_path / "run" / "rollouts"
    with FakeSglang(stop_at=60) as fake:
        client = open_on(fake)
        # No file of the collector may grow beyond 256 bytes, not even its log.
        process_of(client).rlimit(psutil.RLIMIT_FSIZE, (256, 256))
        message = f"^{rollouts}/.*step_000001.parquet: file too large; "
        with pytest.raises(RolloutError, match=message):
            client.collect(1)
        assert not any(entry.is_file() for entry in rollouts.rglob("*"))
        process_of(client).kill()
        with pytest.raises(RolloutError, match=r"process died \(SIGKILL\).*collector\.log"):
            client.collect(1)


def test_an_evaluation_beside_rollouts_has_one_version_though_its_server_loses_the_weights(
    make_config: MakeConfig, open_client: OpenClient, tmp_path: Path
) -> None:
    with FakeSglang(stop_at=60) as fake:
        config = make_config(servers=(fake.address,), health={"interval_s": 0.1})
        questions = tmp_path / "questions.jsonl"
        rows = [{"prompt": f"{100 + row}+100=?", "answer": str(200 + row)} for row in range(5)]
        questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
        eval_sets = [{"path": str(questions), "name": "sums"}]
        config = changed(config, "eval", sets=eval_sets, overlap=True)
        renderer = ChatRenderer(load_tokenizer(config.model.path), config.data)
        (eval_set,) = load_sets(config, renderer, warns=False)
        length = len(eval_set.prompts[0].token_ids)
        client = open_client(config)

        def begin_and_restart(step: int, version: int) -> None:
            fake.stalls[length] = 3  # evaluations stand still until they are let go
            fake.requests.clear()
            client.sync_weights(tmp_path, version)
            client.begin_evaluation(step)
            while sum(len(request["input_ids"]) == length for request in fake.requests) < 10:
                time.sleep(0.01)
            fake.crash()
            fake.version = "0"
            fake.start()

        # The rollout asks for the weights, and both go on.
        begin_and_restart(1, 12)
        assert client.collect(2) is None
        client.sync_weights(tmp_path, 12)
        assert client.collect(2) is not None
        fake.stalls.clear()
        (result,) = client.evaluate(1)
        assert (result.version, result.truncated_share) == (12, 1.0)
        assert result.generated_tokens == 5 * 2 * 12
        # Nobody pushes them any more.
        begin_and_restart(2, 13)
        assert client.evaluate(2) is None


def test_an_engine_that_is_driven_refuses_evaluations_beside_rollouts(
    make_config: MakeConfig, open_client: OpenClient
) -> None:
    client = open_client(changed(make_config(engine="local"), "eval", overlap=True))
    with pytest.raises(RolloutError, match=r"^eval\.overlap: must be false"):
        client.wait_ready()


def test_an_evaluation_leaves_no_prompt_out(make_config: MakeConfig) -> None:
    config = make_config()
    assert config.data.train is not None
    with config.data.train.path.open("a") as rows:
        rows.write(json.dumps({"prompt": "1" * 100, "answer": "1"}))
    renderer = ChatRenderer(load_tokenizer(config.model.path), config.data)
    with pytest.raises(ValueError, match=r"1 of 17 .* an evaluation leaves none out"):
        load_sets(config, renderer)


def test_servers_hold_the_trainers_weights_once_a_push_has_succeeded_and_batches_leave_no_file(
    make_config: MakeConfig,
    open_client: OpenClient,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "servers"
    config = make_config(servers_file=file, min_servers=1, dump=False)
    assert config.data.train is not None
    train = config.data.train.path
    sums = train.rename(train.with_name("sums.jsonl"))
    long = json.dumps({"prompt": "1" * 100, "answer": "1"})
    train.write_text(f"{long}\n{sums.read_text()}")
    config = changed(config, "eval", sets=[{"path": str(sums), "name": "sums"}])
    with FakeSglang(stop_at=60) as fake:
        file.write_text(f"{fake.address}\nhttp://127.0.0.1:1\n")
        client = open_client(config)
        with caplog.at_level(logging.WARNING):
            client.wait_ready()
        assert "1 of 17 prompts are longer than 32 tokens" in caplog.text
        overlap = "5 of 5 prompts of evaluation set 'sums' are in training set 'train' too"
        assert overlap in caplog.text
        load = client.weights.start(LOAD, Load(model_dir=tmp_path, version=7))
        assert client._lacks_weights
        load()
        assert client._lacks_weights
        assert client.weights.start(RESUME, ())().pause_s == 0.0
        assert not client._lacks_weights
        client.ensure_weights()
        assert fake.version == "7"
        assert len(decode_batch(client.collect(1)).groups) == 3
        assert not (tmp_path / "run" / "rollouts").exists()

        # Its client is gone in the middle of a batch.
        fake.token_interval_s = 0.2
        num_requests = len(fake.requests)
        client.start(COLLECT, 2)
        while len(fake.requests) == num_requests:
            time.sleep(0.02)
        collector = process_of(client)
        assert client._socket is not None
        client._socket.close()  # as the end of the process does
        collector.wait(timeout=10)
    assert "Traceback" not in client._log_path.read_text()


def test_a_checkpoint_of_a_replay_cannot_be_continued_live(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    client = CollectorClient(make_config(), on_progress=print)
    with pytest.raises(RolloutError, match="written by a replay"):
        client.restore(tmp_path / "rollout.parquet")
