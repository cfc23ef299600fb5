"""What is sampled depends on requests and their order only, and log-probs are transformers'."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bapo_megatron.engine.base import SamplingSettings, join
from bapo_megatron.engine.local import decoder
from bapo_megatron.types import FinishReason
from tests.engine.helpers import make_model_dir, reference_logprobs
from tests.engine.local.setting import (
    EOS,
    SETTINGS,
    assert_reference,
    complete,
    finish,
    ragged_requests,
    request,
    start,
    use_engine,
)

if TYPE_CHECKING:
    from pathlib import Path

    from bapo_megatron.engine.base import Completion
    from bapo_megatron.engine.local.engine import LocalEngine

PROMPT = [3, 20, 77, 4]


def _assert_equal(one: list[Completion], other: list[Completion]) -> None:
    for first, second in zip(one, other, strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert first.logprobs.tobytes() == second.logprobs.tobytes()
        assert first.finish_reason is second.finish_reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "max_rows"), [("qwen2", 8), ("qwen2", 256), ("qwen3", 16), ("llama", 8)]
)
def test_logprobs_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, family: str, max_rows: int
) -> None:
    """Ragged inputs; with few rows most are admitted while others are decoded."""
    directory = make_model_dir(tmp_path_factory.mktemp(family), family)
    requests = ragged_requests(30)
    completions = use_engine(
        directory, lambda engine: complete(engine, *requests), max_rows=max_rows
    )
    for given, completion in zip(requests, completions, strict=True):
        assert_reference(directory, given, completion)
    assert sum(len(completion.token_ids) for completion in completions) > 300


@pytest.mark.slow
def test_width_grows_and_rows_become_fewer_while_long_responses_go_on(model_dir: Path) -> None:
    requests = [
        *ragged_requests(40, max_new_tokens=12),
        *(request([5 + n], SamplingSettings(1.5, 200, seed=40 + n)) for n in range(30)),
    ]
    completions = use_engine(model_dir, lambda engine: complete(engine, *requests), max_rows=32)
    assert max(len(completion.token_ids) for completion in completions) > 150
    for given, completion in zip(requests, completions, strict=True):
        assert_reference(model_dir, given, completion)


def test_short_rows_beside_a_long_one(tmp_path: Path) -> None:
    """Their padding fills whole blocks of the attention kernel."""
    directory = make_model_dir(tmp_path, max_positions=2048)
    requests = [
        request([5 + n % 80 for n in range(1900)], SamplingSettings(1.0, 100, seed=21)),
        *(request([5 + n], SamplingSettings(1.0, 100, seed=n)) for n in range(3)),
    ]
    completions = use_engine(directory, lambda engine: complete(engine, *requests))
    for given, completion in zip(requests, completions, strict=True):
        assert_reference(directory, given, completion)


def test_bfloat16_weights_sample_and_score_alike(model_dir: Path) -> None:
    given = request(PROMPT, SamplingSettings(1.0, 60, seed=21))

    async def use(engine: LocalEngine) -> tuple[Completion, list[float]]:
        [completion] = await complete(engine, given)
        return completion, await engine.score([*PROMPT, *completion.token_ids.tolist()], 10)

    completion, scores = use_engine(model_dir, use, dtype="bfloat16")
    np.testing.assert_allclose(completion.logprobs, scores[len(PROMPT) - 1 :], rtol=0, atol=0.2)
    assert np.abs(completion.logprobs - scores[len(PROMPT) - 1 :]).mean() < 0.02


def test_a_large_prefill_is_divided(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_MAX_PREFILL_TOKENS", 64)
    requests = ragged_requests(20)
    completions = use_engine(model_dir, lambda engine: complete(engine, *requests))
    for given, completion in zip(requests, completions, strict=True):
        assert_reference(model_dir, given, completion)


@pytest.mark.parametrize("max_rows", [8, 64])
def test_two_runs_are_equal_bit_for_bit(model_dir: Path, max_rows: int) -> None:
    requests = ragged_requests(40)
    runs = [
        use_engine(model_dir, lambda engine: complete(engine, *requests), max_rows=max_rows)
        for _ in range(2)
    ]
    _assert_equal(*runs)


@pytest.mark.parametrize("burst", [1, 3, 1000])
def test_the_length_of_bursts_changes_no_bit(model_dir: Path, burst: int) -> None:
    requests = ragged_requests(40)
    in_eights, other = (
        use_engine(
            model_dir,
            lambda engine, burst=burst: complete(engine, *requests, burst=burst),
            max_rows=16,
        )
        for burst in (8, burst)
    )
    _assert_equal(in_eights, other)


@pytest.mark.slow
def test_other_company_changes_log_probs_by_rounding_only(model_dir: Path) -> None:
    requests = ragged_requests(24)
    together = use_engine(model_dir, lambda engine: complete(engine, *requests))

    async def one_by_one(engine: LocalEngine) -> list[Completion]:
        return [(await complete(engine, given))[0] for given in requests]

    for first, second in zip(together, use_engine(model_dir, one_by_one), strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
        np.testing.assert_allclose(first.logprobs, second.logprobs, rtol=0, atol=1e-4)


def test_a_continued_response_goes_on_with_the_numbers_it_would_have_had(model_dir: Path) -> None:
    settings = SamplingSettings(1.0, 150, seed=21)

    async def in_parts(engine: LocalEngine) -> list[Completion]:
        parts: list[Completion] = []
        tokens: list[int] = []
        for num_tokens in (30, 34, 1, 85):
            part = request(
                [*PROMPT, *tokens],
                replace(settings, max_new_tokens=num_tokens),
                sampled_tokens=len(tokens),
            )
            parts += await complete(engine, part)
            tokens += parts[-1].token_ids.tolist()
        return parts

    [whole] = use_engine(model_dir, lambda engine: complete(engine, request(PROMPT, settings)))
    parts = use_engine(model_dir, in_parts)
    assert len(whole.token_ids) == 150
    joined = join(parts, FinishReason.LENGTH)
    assert joined.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(joined.logprobs, whole.logprobs, rtol=0, atol=1e-4)


def test_without_seeds_the_order_of_requests_decides(model_dir: Path) -> None:
    requests = [request(PROMPT, replace(SETTINGS, seed=None)) for _ in range(4)]
    runs = [use_engine(model_dir, lambda engine: complete(engine, *requests)) for _ in range(2)]
    _assert_equal(*runs)
    assert len({tuple(completion.token_ids) for completion in runs[0]}) == 4


@pytest.mark.parametrize("max_rows", [8, 256])
def test_of_requests_that_come_between_two_bursts_their_order_decides(
    model_dir: Path, max_rows: int
) -> None:
    """It does not matter whose environment answered first."""
    long = [
        replace(given, order=(0, number))
        for number, given in enumerate(ragged_requests(5, max_new_tokens=60))
    ]
    others = [replace(given, order=(1, number)) for number, given in enumerate(ragged_requests(12))]

    def sampled(*arrivals: int) -> list[Completion]:
        async def use(engine: LocalEngine) -> list[Completion]:
            streams = await start(engine, *long)
            await engine.decode(8)
            later = {number: (await start(engine, others[number]))[0] for number in arrivals}
            await engine.decode(8)
            streams += [later[number] for number in range(len(others))]
            await finish(engine, streams)
            return [stream.completion for stream in streams]

        return use_engine(model_dir, use, max_rows=max_rows)

    in_order = sampled(*range(12))
    _assert_equal(in_order, sampled(*reversed(range(12))))
    _assert_equal(in_order, sampled(5, 0, 11, 1, 9, 7, 2, 10, 3, 8, 4, 6))


def test_the_end_of_sequence_is_the_last_token(model_dir: Path) -> None:
    completions = use_engine(
        model_dir,
        lambda engine: complete(
            engine, *(request(PROMPT, replace(SETTINGS, seed=n)) for n in range(60))
        ),
    )
    for completion in completions:
        *before, last = completion.token_ids.tolist()
        assert EOS not in before
        stopped = completion.finish_reason is FinishReason.STOP
        assert stopped == (last == EOS)
        assert stopped or len(completion.token_ids) == 40


def test_tokens_of_generation_config_and_tokenizer_end_a_response(tmp_path: Path) -> None:
    directory = make_model_dir(tmp_path / "qwen2")
    (directory / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    completions = use_engine(
        directory,
        lambda engine: complete(
            engine, *(request(PROMPT, SamplingSettings(1.5, 200, seed=n)) for n in range(60))
        ),
    )
    lasts = {
        completion.token_ids[-1]
        for completion in completions
        if completion.finish_reason is FinishReason.STOP
    }
    assert lasts == {EOS, 8, 9}


def test_greedy_requests_take_the_likeliest_token(model_dir: Path) -> None:
    given = request(PROMPT, SamplingSettings(0.0, 20))
    [completion] = use_engine(model_dir, lambda engine: complete(engine, given))
    expected = reference_logprobs(model_dir, PROMPT, completion.token_ids.tolist())
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)
    again = use_engine(model_dir, lambda engine: complete(engine, *ragged_requests(9), given))
    assert again[-1].token_ids.tolist() == completion.token_ids.tolist()


def test_first_come_is_first_served(model_dir: Path) -> None:
    async def begin(engine: LocalEngine) -> list[int]:
        streams = await start(
            engine, *(request(PROMPT, SamplingSettings(1.5, 9, seed=n)) for n in range(20))
        )
        assert await engine.decode(1) == 1
        lengths = [len(stream.tokens) for stream in streams]
        await finish(engine, streams)
        return lengths

    assert use_engine(model_dir, begin, max_rows=8) == [1] * 8 + [0] * 12


def test_steps_are_counted(model_dir: Path) -> None:
    async def count(engine: LocalEngine) -> list[int]:
        streams = await start(engine, request(PROMPT, SamplingSettings(1.0, 20, seed=21)))
        counts = [await engine.decode(8) for _ in range(4)]
        assert streams[0].task.done()
        return counts

    assert use_engine(model_dir, count) == [8, 8, 4, 0]


def test_score_is_the_log_prob_of_each_token(model_dir: Path) -> None:
    tokens = [*PROMPT, 9, 30, 31, 32, 5, 6, 7]
    scores = use_engine(model_dir, lambda engine: engine.score(tokens, 10))
    expected = reference_logprobs(model_dir, tokens[:1], tokens[1:])
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-4)


def test_memory_is_given_back(model_dir: Path) -> None:
    async def used(engine: LocalEngine) -> object:
        await complete(engine, *ragged_requests(20))
        return engine._decoder._rows

    assert use_engine(model_dir, used) is None
