"""Requests end as they should: aborted, cancelled, paused, asked up, refused, failed."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bapo_megatron.engine.base import CompletionSink, SamplingSettings
from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError
from bapo_megatron.types import VersionSpan
from tests.engine.helpers import Kept
from tests.engine.local.setting import (
    assert_reference,
    complete,
    finish,
    opened,
    ragged_requests,
    request,
    sampled,
    start,
)

PROMPT = [3, 20, 77, 4]
LONG = SamplingSettings(temperature=1.5, max_new_tokens=200, seed=41)


async def test_abort_waits_for_the_running_burst(model_dir: Path) -> None:
    async with opened(model_dir) as engine:
        [stream] = await start(engine, request(PROMPT, LONG))
        decoding = asyncio.create_task(engine.decode(30))
        await asyncio.sleep(0)
        await engine.abort(10)
        await stream.task
        assert await decoding == 30
        assert len(stream.tokens) == 30


async def test_a_cancelled_decode_hands_out_what_it_sampled(model_dir: Path) -> None:
    async with opened(model_dir) as engine:
        [stream] = await start(engine, request(PROMPT, LONG))
        decoding = asyncio.create_task(engine.decode(30))
        await asyncio.sleep(0)
        decoding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await decoding
        assert len(stream.tokens) == 30
        await finish(engine, [stream])
    assert_reference(model_dir, [stream.request], [stream.completion])


async def test_the_event_loop_lives_while_tokens_are_sampled(model_dir: Path) -> None:
    async with opened(model_dir) as engine:
        await start(engine, *(request(PROMPT, replace(LONG, seed=n)) for n in range(8)))
        decoding, turns = asyncio.create_task(engine.decode(100)), 0
        while not decoding.done():
            await asyncio.sleep(0.001)
            turns += 1
            assert await engine.version(1.0) == "0"
        assert turns > 5


async def test_the_engine_computes_with_as_many_threads_as_configured(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    try:
        for configured, expected in ((None, before), (before + 2, before + 2)):
            async with opened(model_dir, threads=configured) as engine:
                monkeypatch.setattr(engine._decoder, "score", lambda *_: torch.get_num_threads())
                assert await engine.score(PROMPT, 60.0) == expected
            assert torch.get_num_threads() == before  # of this thread
    finally:
        torch.set_num_threads(before)


async def test_a_closed_engine_refuses(model_dir: Path) -> None:
    async with opened(model_dir) as engine:
        [stream] = await start(engine, request(PROMPT, LONG))
        await engine.decode(3)
        await engine.close()
        with pytest.raises(ServerGoneError, match="closed"):
            await stream.task
        with pytest.raises(ServerGoneError, match="closed"):
            await engine.stream(request(PROMPT, LONG), CompletionSink())
        with pytest.raises(ServerGoneError, match="closed"):
            await engine.score(PROMPT, 60.0)


@pytest.mark.parametrize(
    ("input_ids", "max_new_tokens", "message"),
    [
        ([5] * 300, 1, r"300 input tokens and 1 new ones"),
        ([], 10, "input tokens must be below"),
        ([5, 2000], 10, "size of 267 .*sample 3"),
    ],
)
async def test_requests_that_the_model_cannot_answer_are_refused(
    model_dir: Path, input_ids: list[int], max_new_tokens: int, message: str
) -> None:
    asked = request(input_ids, SamplingSettings(1.0, max_new_tokens, seed=0))

    async with opened(model_dir) as engine:
        with pytest.raises(RolloutError, match=message):
            await engine.stream(asked, CompletionSink())
        assert engine.num_in_flight == 0


async def test_the_whole_context_can_be_used(model_dir: Path) -> None:
    asked = request([5] * 56, replace(LONG, max_new_tokens=200, seed=8))
    [completion] = await sampled(model_dir, [asked])
    assert len(completion.token_ids) == 200
    assert_reference(model_dir, [asked], [completion])


async def test_an_unknown_version_ends_its_request_only(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = [Kept(), Kept()]
    for sink, version in zip(sinks, (0, 3), strict=True):
        monkeypatch.setattr(sink, "is_known", {version}.__contains__)
    async with opened(model_dir) as engine:
        asked = request(PROMPT, SamplingSettings(1.0, 4, seed=1))
        tasks = [asyncio.create_task(engine.stream(asked, sink)) for sink in sinks]
        await asyncio.sleep(0)
        await engine.decode(4)
        await tasks[0]
        with pytest.raises(ServerError, match="weights version 0, which this run did not give"):
            await tasks[1]
    assert sinks[0].parts[0].versions == (VersionSpan(0, 4),)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (torch.OutOfMemoryError("out of memory"), r"lower rollout\.local\.max_rows"),
        (ValueError("a defect"), "ValueError: a defect"),
    ],
)
async def test_a_failure_of_the_model_ends_every_request_and_the_engine_lives(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, message: str
) -> None:
    async with opened(model_dir) as engine:
        streams = await start(engine, *ragged_requests(3))
        await engine.decode(2)

        def fail(*_: object) -> None:
            raise failure

        with monkeypatch.context() as patch:
            patch.setattr("bapo_megatron.engine.local.decoder.sample", fail)
            with pytest.raises(RolloutError, match=message):
                await engine.decode(2)
        for stream in streams:
            with pytest.raises(RolloutError, match=message):
                await stream.task
        await complete(engine, *ragged_requests(3))


async def test_broken_weights_are_found(model_dir: Path) -> None:
    async with opened(model_dir) as engine:
        engine._model.lm_head.weight.fill_(float("nan"))
        streams = await start(engine, request(PROMPT, LONG))
        with pytest.raises(RolloutError, match="a log-prob of 'sample 3' is not finite"):
            await engine.decode(4)
        with pytest.raises(RolloutError, match=r"is not finite.*request: sample 3"):
            await streams[0].task
