"""A teacher behind engines: what becomes of its requests, and of its answers."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.base import Capabilities, Scores
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.errors import RolloutError, ServerError
from bapo_megatron.rollout.scoring import TeacherPool
from bapo_megatron.types import Sample
from tests.data.samples import make_episode, make_sample
from tests.fakes.fake_sglang import LOGITS_V, FakeSglang, logprob_of
from tests.fakes.fake_teacher import FakeTeacher, make_teacher, teacher_logprob
from tests.rollout.batching_setup import settle
from tests.rollout.pool import LIMIT_S, clients_of, until

TEACHER = "algorithm.distillation.teacher"


@contextlib.asynccontextmanager
async def teacher_on(*servers: FakeSglang, **options: Any) -> AsyncIterator[TeacherPool]:
    """The teacher on these servers, which run meanwhile and have answered."""
    with contextlib.ExitStack() as running:
        for server in servers:
            running.enter_context(server)
        teacher = make_teacher(**options)
        clients = clients_of([server.address for server in servers], RolloutConfig())
        try:
            async with asyncio.timeout(LIMIT_S):
                await teacher.start(clients)
                yield teacher
        finally:
            await teacher.close()


def check(sample: Sample, columns: dict[str, np.ndarray]) -> None:
    expected = [logprob_of(token_id, 1.0) for token_id in sample.sampled_token_ids.tolist()]
    np.testing.assert_allclose(columns["teacher_logprob"], expected, rtol=1e-6)
    assert columns["teacher_logprob"].dtype == np.float32


async def test_the_likeliest_tokens_are_those_of_the_sampled_positions() -> None:
    engine, teacher = FakeTeacher(), make_teacher(top_k=3, vocab_size=15)
    await teacher.start([engine])
    sample = make_episode(3, (2, 3, 2))
    columns = await teacher.score(sample)
    await teacher.close()
    # Positions in prompt and response: 3 and 4, then what was written, then 8 and 9.
    assert columns["teacher_logprob"].tolist() == [
        teacher_logprob(1050, 3),
        teacher_logprob(1051, 4),
        teacher_logprob(1055, 8),
        teacher_logprob(1056, 9),
    ]
    assert columns["teacher_top_ids"].tolist() == [[3, 4, 5], [4, 5, 6], [8, 9, 10], [9, 10, 11]]
    assert columns["teacher_top_logprobs"][2].tolist() == [-1.0, -2.0, -3.0]
    dtypes = {name: values.dtype.name for name, values in columns.items()}
    assert dtypes == {
        "teacher_logprob": "float32",
        "teacher_top_ids": "int32",
        "teacher_top_logprobs": "float32",
    }
    sample.columns = columns
    assert teacher.has_scored(sample)
    assert not make_teacher(top_k=2).has_scored(sample)


async def test_rows_of_padding_are_none_of_the_likeliest_tokens() -> None:
    order = np.argsort(-LOGITS_V, kind="stable").tolist()  # 14 20 8 27 …
    async with teacher_on(FakeSglang(), top_k=4, vocab_size=20) as teacher:
        columns = await teacher.score(make_sample(3, 2))
    assert columns["teacher_top_ids"][0].tolist() == [t if t < 20 else -1 for t in order[:4]]
    expected = [logprob_of(t, 1.0) if t < 20 else np.nan for t in order[:4]]
    np.testing.assert_allclose(columns["teacher_top_logprobs"][1], expected, rtol=1e-6)
    assert -1 in columns["teacher_top_ids"]


async def test_an_episode_without_a_token_has_empty_columns() -> None:
    async with teacher_on(FakeSglang(), top_k=2) as teacher:
        columns = await teacher.score(sample := make_sample(3, 0))
    assert {name: values.shape for name, values in columns.items()} == {
        "teacher_logprob": (0,),
        "teacher_top_ids": (0, 2),
        "teacher_top_logprobs": (0, 2),
    }
    assert teacher.has_scored(sample)


async def test_requests_are_spread_over_the_servers_with_a_limit_for_each() -> None:
    engines, teacher = [FakeTeacher(), FakeTeacher()], make_teacher()
    await teacher.start(engines)
    release = engines[0].held = engines[1].held = asyncio.Event()
    samples = [make_sample(3, 1 + number % 5, index=number) for number in range(80)]
    scoring = [asyncio.create_task(teacher.score(sample)) for sample in samples]
    await settle()
    assert [len(engine.scored) for engine in engines] == [16, 16]
    release.set()
    for sample, task in zip(samples, scoring, strict=True):
        first = sample.response_token_ids[0]
        columns = await task
        assert list(columns) == ["teacher_logprob"]
        assert columns["teacher_logprob"][0] == teacher_logprob(int(first), 3)
    assert sum(len(engine.scored) for engine in engines) == 80
    assert teacher.num_lost_requests == 0
    await teacher.close()


@pytest.mark.parametrize("hangs", [False, True])
async def test_requests_of_a_server_that_fails_go_on_at_others(hangs: bool) -> None:
    failing, other = FakeSglang(stalls={4: 0}), FakeSglang()
    sample = make_sample(3, 1)
    async with teacher_on(failing, other) as teacher:
        scoring = asyncio.create_task(teacher.score(sample))
        await until(lambda: len(failing.requests) == 1)
        if hangs:
            failing.is_hanging = True
        else:
            failing.crash()
        check(sample, await scoring)
        assert teacher.num_lost_requests == 1
        for _ in range(3):
            check(sample, await teacher.score(sample))
        assert teacher.num_lost_requests == 1


async def test_without_a_server_requests_wait_until_one_comes_back() -> None:
    servers = [FakeSglang(), FakeSglang()]
    sample = make_sample(3, 2)
    async with teacher_on(*servers) as teacher:
        for server in servers:
            server.crash()
        scoring = [asyncio.create_task(teacher.score(sample)) for _ in range(20)]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in scoring)
        assert teacher.num_waiting == 20
        servers[1].start()
        for task in scoring:
            check(sample, await task)
        assert teacher.num_waiting == 0


async def test_without_a_server_for_too_long_the_run_ends_in_one_line() -> None:
    servers = [FakeSglang(), FakeSglang()]
    async with teacher_on(*servers, patience_s=1.0) as teacher:
        for server in servers:
            server.crash()
        began_s = time.monotonic()
        with pytest.raises(RolloutError) as caught:
            await teacher.score(make_sample(3, 2))
        assert time.monotonic() - began_s >= 0.9
    line = str(caught.value)
    assert line.startswith(
        f"no usable teacher for 1 s ({TEACHER}.patience_s): {servers[0].address}"
    )
    assert f"; {servers[1].address} (lost): " in line
    assert f"correct {TEACHER}.servers" in line
    assert line.endswith("start them again and continue with resume=true")
    assert "\n" not in line


async def test_a_run_begins_with_the_servers_that_answer() -> None:
    with FakeSglang() as dead, FakeSglang() as fake:
        dead.crash()
        teacher = make_teacher(patience_s=1.0)
        try:
            await teacher.start(clients_of([dead.address, fake.address], RolloutConfig()))
            check(sample := make_sample(3, 2), await teacher.score(sample))
            dead.start()
            await until(lambda: all(entry.is_usable for entry in teacher._states.engines))
        finally:
            await teacher.close()


class Refusing(FakeSglang):
    def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any] | Iterator[Any]:
        if path == "/generate":
            return 400, {"error": {"message": "longer than the context length (5 tokens)."}}
        return super().handle(path, body)


async def test_a_request_that_is_refused_ends_the_run_in_one_line() -> None:
    one, two = Refusing(), Refusing()
    async with teacher_on(one, two) as teacher:
        with pytest.raises(RolloutError) as caught:
            await teacher.score(make_sample(3, 4, group_id=2, index=1))
        assert teacher.num_lost_requests == 0
    line = str(caught.value)
    assert line.startswith(f"{TEACHER}: http")
    assert "context length (5 tokens)" in line
    assert line.endswith("(sample 1 of group 2, train.jsonl:2)")
    assert len(one.calls + two.calls) < 9


async def test_a_server_with_garbage_is_left_out_and_if_all_have_it_the_run_ends() -> None:
    broken, fine = FakeSglang(broken_at=4), FakeSglang()
    sample = make_sample(3, 4)
    async with teacher_on(broken, fine) as teacher:
        check(sample, await teacher.score(sample))
        assert teacher.num_lost_requests == 1
        fine.broken_at = 0
        with pytest.raises(RolloutError) as caught:
            await teacher.score(sample)
    line = str(caught.value)
    assert line.startswith(f"{TEACHER}: http")
    assert "a log-prob is not finite" in line
    assert "10 attempts to score sample 0 of group 0, train.jsonl:0 failed" in line


async def test_a_server_of_another_model_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with FakeSglang(architectures=("Qwen2ForCausalLM",)) as fake:
        client = SglangClient(fake.address, ApiKeys(), request_timeout_s=9.0, model=tmp_path)
        teacher = make_teacher()
        with pytest.raises(RolloutError, match=rf"another model than {TEACHER}\.path: .*Llama"):
            await teacher.start([client])
        await teacher.close()


async def test_a_server_without_weights_is_refused_at_the_start() -> None:
    with pytest.raises(RolloutError, match=r"has no weights; start it with serve --teacher"):
        async with teacher_on(FakeSglang(version="none")):
            pass


async def test_a_server_whose_weights_change_is_no_teacher() -> None:
    fake = FakeSglang()
    async with teacher_on(fake, patience_s=2.0) as teacher:
        fake.version = "1"
        await until(lambda: "must not change, got version 1 after 0" in teacher._states.describe())
        with pytest.raises(RolloutError, match=r"no usable teacher for 2 s .*must not change"):
            await teacher.score(make_sample(3, 1))


class BrokenTeacher(FakeTeacher):
    """Its first request fails once ``breaks`` is set, and it cannot be admitted again then."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks = asyncio.Event()
        self.held = asyncio.Event()

    async def score(
        self, token_ids: Sequence[int], timeout_s: float, *, start: int = 1, top_k: int = 0
    ) -> Scores:
        if not self.scored:
            self.scored.append(list(token_ids))
            await self.breaks.wait()
            raise ServerError("broken")
        return await super().score(token_ids, timeout_s, start=start, top_k=top_k)

    async def capabilities(self, timeout_s: float | None = None) -> Capabilities:
        if self.breaks.is_set():
            raise ServerError("broken")
        return await super().capabilities(timeout_s)


async def test_the_other_requests_of_a_server_that_answers_and_cannot_be_used_move_on() -> None:
    engine, teacher = BrokenTeacher(), make_teacher()
    await teacher.start([engine])
    tasks = [asyncio.create_task(teacher.score(make_sample(3, 2))) for _ in range(2)]
    await until(lambda: len(engine.scored) == 2)
    engine.breaks.set()
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: teacher.num_lost_requests == 2)
    engine.breaks.clear()
    engine.held.set()
    assert [len(columns) for columns in await asyncio.gather(*tasks)] == [1, 1]
    await teacher.close()


async def test_patience_counts_from_the_loss_whoever_waits_then() -> None:
    engine, teacher = BrokenTeacher(), make_teacher(patience_s=2.0)
    await teacher.start([engine])
    engine.breaks.set()
    task = asyncio.create_task(teacher.score(make_sample(3, 2)))
    await until(lambda: teacher.num_lost_requests == 1)
    task.cancel()
    await asyncio.sleep(2.1)
    with pytest.raises(RolloutError, match="no usable teacher for 2 s"):
        async with asyncio.timeout(1.5):
            await teacher.score(make_sample(3, 2))
    await teacher.close()
