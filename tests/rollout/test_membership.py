"""Servers join and leave in the middle of a rollout, as the lines of a file come and go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.load import load_kind
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.rollout.servers import Membership
from bapo_megatron.types import RolloutBatch
from bapo_megatron.weight_sync.receive import Load, WeightReceiver
from tests.engine.helpers import MakeConfig
from tests.fakes.fake_pool import deliver
from tests.fakes.fake_sglang import FakeSglang, token_at
from tests.rollout.batching_setup import Rewards, make_batches
from tests.rollout.pool import LIMIT_S, states_of, until


class Run:
    """A rollout as the collector puts it together."""

    def __init__(self, config: RunConfig, path: Path) -> None:
        self.backend = load_kind("sglang").open(config, "cpu", awaits_weights=False)
        self.config, self.path = config.rollout, path
        self.batches = make_batches(Rewards(equal=()), self.config)

    async def begin(self) -> None:
        engines = [await self.backend.connect(name) for name in self.backend.addresses()]
        self.pool = EnginePool(engines, self.config, version=None)
        self.weights = WeightReceiver(self.pool.states, self.config, self.batches)
        self.batches.attach(self.pool)
        interval_s = self.config.health.interval_s
        membership = Membership(self.backend, self.pool, self.weights, interval_s)
        self.pool.states.news.run(membership.follow())
        await self.pool.states.wait_for_engines()

    async def sync(self, version: int) -> None:
        await self.weights.load(Load(model_dir=self.path, version=version))
        await self.weights.resume(())

    def name(self, *servers: FakeSglang) -> None:
        """Write the file with these servers, in one go."""
        draft = self.path.with_suffix(".tmp")
        draft.write_text("".join(f"{server.address}\n" for server in servers))
        draft.replace(self.path)

    @property
    def addresses(self) -> list[str]:
        return [pooled.address for pooled in self.pool.states.engines]

    def num_samples(self, num_tokens: int) -> int:
        return sum(
            episode.num_tokens == num_tokens
            for group in self.batches.scheduler.buffer
            for episode in group.episodes
        )


@contextlib.asynccontextmanager
async def run_of(make_config: MakeConfig, path: Path, *servers: FakeSglang) -> AsyncIterator[Run]:
    config = make_config(
        servers_file=path,
        oversample_groups=1,
        stream_tokens=4,
        health={"interval_s": 0.05, "timeout_s": 5, "patience_s": 30},
        weight_sync={"method": "disk"},
    )
    path.write_text("".join(f"{server.address}\n" for server in servers))
    run = Run(config, path)
    try:
        async with asyncio.timeout(LIMIT_S):
            await run.begin()
            yield run
    finally:
        await run.batches.close()
        await run.pool.states.close()


def check(batch: RolloutBatch | None) -> list[int]:
    """Every token came once and in order, whichever servers sampled it; returns the groups."""
    assert batch is not None
    for sample in batch.samples:
        assert sample.response_token_ids.tolist() == [token_at(2 + i) for i in range(40)]
        assert sum(span.num_tokens for span in sample.versions) == 40
    assert batch.stats.lost_requests == 0
    return [group.group_id for group in batch.groups]


async def test_servers_join_and_leave_in_the_middle_of_a_rollout(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeSglang() as staying, FakeSglang(stalls={2: 9}) as leaving, FakeSglang() as new:
        async with run_of(make_config, tmp_path / "servers", staying, leaving) as run:
            await run.sync(0)
            collecting = asyncio.create_task(run.batches.collect(1, deliver))
            await until(lambda: len(leaving.requests) == 4 and run.num_samples(9) == 4)
            run.name(staying, new)
            await until(lambda: run.addresses == [staying.address, new.address])
            assert "/abort_request" in leaving.calls
            assert set(run.pool._admission._uses) <= set(run.pool.states.engines)
            groups = check(await collecting)
            # Two groups of two were on the one that left; the other went on with their prefix.
            continued = [r for r in staying.requests if len(r["input_ids"]) == 2 + 9]
            assert len(continued) == 4
            assert all(r["sampling_params"]["max_new_tokens"] == 31 for r in continued)
            await until(lambda: states_of(run.pool) == ["usable", "stale"])
            assert new.requests == []
            num_calls = len(leaving.calls)
            await run.sync(1)
            assert states_of(run.pool) == ["usable", "usable"]
            groups += check(await run.batches.collect(2, deliver))
            assert new.requests != []
            assert len(leaving.calls) == num_calls
            buffer = run.batches.scheduler.buffer
            assert len(set(groups)) == len(groups) == buffer.num_trained == 6
            assert (buffer.next_group_id, len(buffer), dict(buffer.dropped)) == (7, 1, {})
            assert [staying.version, new.version] == ["1", "1"]
    assert caplog.messages == [
        f"{new.address} was added to the servers",
        f"{leaving.address} was removed from the servers; it can be stopped",
        f"{new.address} joins the run (stale)",
    ]


async def test_a_file_that_cannot_be_used_changes_nothing_and_another_model_is_left_out(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "servers"
    other = FakeSglang(architectures=("LlamaForCausalLM",))
    with FakeSglang(architectures=("Qwen2ForCausalLM",)) as fake, other:
        async with run_of(make_config, path, fake) as run:
            path.write_text(f"{fake.address}\nhttp://127.0")
            await until(lambda: len(caplog.messages) == 1)
            path.unlink()
            await until(lambda: len(caplog.messages) == 2)
            run.name(fake)
            await asyncio.sleep(0.3)
            assert run.addresses == [fake.address]
            run.name(fake, other)
            await until(lambda: states_of(run.pool) == ["stale", "lost"])
            await run.sync(0)
            check(await run.batches.collect(1, deliver))
            assert (other.requests, other.version) == ([], "0")
            run.name(fake)
            await until(lambda: "was removed" in caplog.messages[-1])
            assert run.addresses == [fake.address]
    torn, missing, added, lost, left = caplog.messages
    for message, reason in ((torn, "newline"), (missing, "No such file")):
        assert message.startswith(f"rollout.servers_file: '{path}' must ")
        assert reason in message
        assert message.endswith("; the servers stay unchanged")
    assert added == f"{other.address} was added to the servers"
    assert lost.startswith(f"{other.address} is lost: ")
    assert "['Qwen2ForCausalLM'], got ['LlamaForCausalLM']" in lost
    assert left == f"{other.address} was removed from the servers; it can be stopped"
