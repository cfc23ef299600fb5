"""Servers join and leave in the middle of a rollout, as the lines of a file come and go."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from bapo_megatron.config.rollout import ReplayConfig
from bapo_megatron.engine.load import load_kind
from bapo_megatron.errors import RolloutError
from bapo_megatron.rollout.batching import BatchCollector
from bapo_megatron.rollout.membership import Membership
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.rollout.selection import BatchPlan
from bapo_megatron.weight_sync.receive import Load, WeightReceiver
from tests.data.prompt_sets import make_stream
from tests.fakes.fake_pool import deliver
from tests.fakes.fake_sglang import FakeSglang, token_at
from tests.rollout.batching_setup import PROMPTS, Rewards, single_turn
from tests.rollout.pool import LIMIT_S, states_of, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.types import RolloutBatch
    from tests.engine.helpers import MakeConfig


class Run:
    """A rollout as the collector puts it together."""

    def __init__(self, config: RunConfig, path: Path) -> None:
        self.backend = load_kind("sglang").open(config, "cpu", awaits_weights=False)
        self.config, self.path = config.rollout, path
        plan = BatchPlan(seed=0, total_steps=2, updates_per_batch=1)
        prompts = make_stream(PROMPTS)
        self.batches = BatchCollector(
            *(single_turn(), Rewards(equal=()), prompts, self.config, ReplayConfig(), plan),
            lambda line: None,
        )

    async def begin(self) -> None:
        engines = [await self.backend.connect(each) for each in self.backend.addresses()]
        self.pool = EnginePool(engines, self.config, version=None)
        self.weights = WeightReceiver(self.pool.states, self.config, self.batches)
        self.batches.attach(self.pool)
        interval_s = self.config.health.interval_s
        membership = Membership(self.backend, self.pool, self.weights, interval_s)
        self.pool.states.run(membership.follow())
        await self.pool.states.wait_for_engines()

    async def push(self, version: int) -> None:
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
        """How many samples in the buffer have so many tokens."""
        return sum(
            len(pending.sample.response_token_ids) == num_tokens
            for group in self.batches._buffer
            for pending in group.samples
            if pending.settle() is None
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


def test_servers_join_and_leave_in_the_middle_of_a_rollout_and_every_group_is_accounted_for(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> list[str]:
        with FakeSglang() as staying, FakeSglang(stalls={2: 9}) as leaving, FakeSglang() as new:
            async with run_of(make_config, tmp_path / "servers", staying, leaving) as run:
                await run.push(0)
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
                await run.push(1)
                assert states_of(run.pool) == ["usable", "usable"]
                groups += check(await run.batches.collect(2, deliver))
                assert new.requests != []
                assert len(leaving.calls) == num_calls
                buffer = run.batches._buffer
                assert len(set(groups)) == len(groups) == buffer.num_trained == 6
                assert (buffer.next_group_id, len(buffer), dict(buffer.dropped)) == (7, 1, {})
                assert [staying.version, new.version] == ["1", "1"]
        return [new.address, leaving.address]

    added, left = asyncio.run(scene())
    assert [record.getMessage() for record in caplog.records] == [
        f"{added} is added to the servers",
        f"{left} has left the servers; it may be stopped",
        f"{added} joins the run (stale)",
    ]


def test_a_file_that_cannot_be_used_changes_nothing_and_another_model_is_left_out(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "servers"

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    async def scene() -> tuple[str, str]:
        other = FakeSglang(architectures=("LlamaForCausalLM",))
        with FakeSglang(architectures=("Qwen2ForCausalLM",)) as fake, other:
            async with run_of(make_config, path, fake) as run:
                path.write_text(f"{fake.address}\nhttp://127.0")
                await until(lambda: len(said()) == 1)
                path.unlink()
                await until(lambda: len(said()) == 2)
                run.name(fake)
                await asyncio.sleep(0.3)
                assert run.addresses == [fake.address]
                run.name(fake, other)
                await until(lambda: states_of(run.pool) == ["stale", "lost"])
                await run.push(0)
                check(await run.batches.collect(1, deliver))
                assert (other.requests, other.version) == ([], "0")
                run.name(fake)
                await until(lambda: run.addresses == [fake.address])
            path.write_text(f"{other.address}\n")
            with pytest.raises(RolloutError, match=r"serves another model than model\.path: archi"):
                async with run_of(make_config, path, fake, other):
                    pass
        return fake.address, other.address

    fake, other = asyncio.run(scene())
    rule = f"rollout.servers_file: '{path}' must hold an address on each line"
    assert said()[:3] == [
        f"{rule}, and end with a newline, got '{fake}\\nhttp://127.0' at its end; it may be cut "
        "off; the servers stay as they were",
        f"{rule}, got No such file or directory; correct it; the servers stay as they were",
        f"{other} is added to the servers",
    ]
    assert said()[3].startswith(
        f"{other} is taken out: {other}: serves another model than model.path: architectures "
        "must be ['Qwen2ForCausalLM'], got ['LlamaForCausalLM'] (''); start it with "
    )
    assert said()[4:] == [f"{other} has left the servers; it may be stopped"]
