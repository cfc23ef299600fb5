"""What is sampled depends on requests and their order only, and log-probs are transformers'."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.data.record import Completion, join
from bapo_megatron.engine.base import SamplingSettings
from bapo_megatron.engine.local import decoder
from bapo_megatron.engine.local.engine import load_model
from bapo_megatron.types import FinishReason
from tests.engine.helpers import make_model_dir
from tests.engine.local.setting import (
    EOS,
    assert_reference,
    complete,
    finish,
    opened,
    ragged_requests,
    request,
    sampled,
    start,
)
from tests.policy.families import FAMILIES, marks
from tests.policy.tiny_models import set_config_field

PROMPT = [3, 20, 77, 4]


def _assert_equal(one: list[Completion], other: list[Completion]) -> None:
    for first, second in zip(one, other, strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert first.logprobs.tobytes() == second.logprobs.tobytes()
        assert first.finish_reason is second.finish_reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "max_rows"),
    [
        *(pytest.param(family, 8, marks=marks(family)) for family in FAMILIES),
        *(("qwen2", 256), ("qwen3", 16), ("qwen3_5_text", 256)),
        pytest.param("nemotron_h", 256, marks=pytest.mark.exhaustive),
    ],
)
async def test_logprobs_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, family: str, max_rows: int
) -> None:
    """Ragged inputs; with few rows most are admitted while others are decoded."""
    directory = make_model_dir(tmp_path_factory.mktemp(family), family)
    requests = ragged_requests(30)
    completions = await sampled(directory, requests, max_rows=max_rows)
    assert_reference(directory, requests, completions)
    assert sum(len(completion.token_ids) for completion in completions) > 300


def test_norms_of_latents_have_the_epsilon_of_the_config_like_those_of_servers(
    tmp_path: Path,
) -> None:
    directory = make_model_dir(tmp_path / "deepseek_v3", "deepseek_v3")
    set_config_field(directory, rms_norm_eps=1e-3)
    model, _ = load_model(directory, "float32", "cpu")
    norms = {n: m for n, m in model.named_modules() if hasattr(m, "variance_epsilon")}
    assert len(norms) == 9
    assert {norm.variance_epsilon for norm in norms.values()} == {1e-3}


@pytest.mark.slow
async def test_width_grows_and_rows_become_fewer_while_long_responses_go_on(
    model_dir: Path,
) -> None:
    requests = [
        *ragged_requests(40, max_new_tokens=12),
        *(request([5 + n], SamplingSettings(1.5, 200, seed=40 + n)) for n in range(30)),
    ]
    completions = await sampled(model_dir, requests, max_rows=32)
    assert max(len(completion.token_ids) for completion in completions) > 150
    assert_reference(model_dir, requests, completions)


async def test_short_rows_beside_a_long_one(tmp_path: Path) -> None:
    """Their padding fills whole blocks of the attention kernel."""
    directory = make_model_dir(tmp_path, max_positions=2048)
    requests = [
        request([5 + n % 80 for n in range(1900)], SamplingSettings(1.0, 100, seed=21)),
        *(request([5 + n], SamplingSettings(1.0, 100, seed=n)) for n in range(3)),
    ]
    assert_reference(directory, requests, await sampled(directory, requests))


async def test_a_large_prefill_is_divided(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_MAX_PREFILL_TOKENS", 64)
    requests = ragged_requests(20)
    assert_reference(model_dir, requests, await sampled(model_dir, requests))


async def test_bfloat16_weights_sample_and_score_alike(model_dir: Path) -> None:
    asked = request(PROMPT, SamplingSettings(1.0, 60, seed=21))

    async with opened(model_dir, dtype="bfloat16") as engine:
        [completion] = await complete(engine, asked)
        tokens = [*PROMPT, *completion.token_ids.tolist()]
        scores = (await engine.score(tokens, 10)).logprobs
    np.testing.assert_allclose(completion.logprobs, scores[len(PROMPT) - 1 :], rtol=0, atol=0.2)
    assert np.abs(completion.logprobs - scores[len(PROMPT) - 1 :]).mean() < 0.02


@pytest.mark.parametrize(
    ("burst", "max_rows"), [(8, 8), (8, 64), (8, 16), (1, 16), (3, 16), (1000, 16)]
)
async def test_two_runs_are_equal_bit_for_bit_however_long_bursts_are(
    model_dir: Path, burst: int, max_rows: int
) -> None:
    requests = ragged_requests(40)
    one, other = [await sampled(model_dir, requests, n, max_rows) for n in (8, burst)]
    _assert_equal(one, other)


@pytest.mark.parametrize("burst", [1, 8])
async def test_asking_for_likeliest_tokens_changes_nothing_else_and_fewer_are_the_first(
    model_dir: Path, burst: int
) -> None:
    requests = ragged_requests(20)
    asking = [replace(asked, top_logprobs=n % 4) for n, asked in enumerate(requests)]
    every = [replace(asked, top_logprobs=9) for asked in requests]
    plain, some, all_nine = [
        await sampled(model_dir, r, burst, 16) for r in (requests, asking, every)
    ]
    _assert_equal(plain, some)
    _assert_equal(plain, all_nine)
    for asked, part, whole in zip(asking, some, all_nine, strict=True):
        k, (ids_RK, logprobs_RK) = asked.top_logprobs, whole.columns.values()
        assert [v.tobytes() for v in part.columns.values()] == [
            np.ascontiguousarray(v[:, :k]).tobytes() for v in (ids_RK, logprobs_RK) if k
        ]
        is_token_RK = ids_RK == whole.token_ids[:, None]
        expected_R = whole.logprobs[is_token_RK.any(axis=1)]
        np.testing.assert_array_equal(logprobs_RK[is_token_RK], expected_R)
        assert (np.diff(logprobs_RK) <= 0).all()


async def test_a_continued_response_goes_on_with_the_numbers_it_would_have_had(
    model_dir: Path,
) -> None:
    settings = SamplingSettings(1.0, 150, seed=21)

    parts: list[Completion] = []
    tokens: list[int] = []
    async with opened(model_dir) as engine:
        for num_tokens in (30, 34, 1, 85):
            part = request(
                [*PROMPT, *tokens],
                replace(settings, max_new_tokens=num_tokens),
                sampled_tokens=len(tokens),
            )
            parts += await complete(engine, part)
            tokens += parts[-1].token_ids.tolist()
    [whole] = await sampled(model_dir, [request(PROMPT, settings)])
    assert len(whole.token_ids) == 150
    joined = join(parts, FinishReason.LENGTH)
    assert joined.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(joined.logprobs, whole.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("max_rows", [8, 256])
async def test_of_requests_that_come_between_two_bursts_their_order_decides(
    model_dir: Path, max_rows: int
) -> None:
    """It does not matter whose environment answered first."""
    long = [
        replace(asked, order=(0, number))
        for number, asked in enumerate(ragged_requests(5, max_new_tokens=60))
    ]
    others = [replace(asked, order=(1, number)) for number, asked in enumerate(ragged_requests(12))]

    async def in_order_of(*arrivals: int) -> list[Completion]:
        async with opened(model_dir, max_rows=max_rows) as engine:
            streams = await start(engine, *long)
            await engine.decode(8)
            later = {number: (await start(engine, others[number]))[0] for number in arrivals}
            await engine.decode(8)
            streams += [later[number] for number in range(len(others))]
            await finish(engine, streams)
            return [stream.completion for stream in streams]

    in_order = await in_order_of(*range(12))
    _assert_equal(in_order, await in_order_of(*reversed(range(12))))
    _assert_equal(in_order, await in_order_of(5, 0, 11, 1, 9, 7, 2, 10, 3, 8, 4, 6))


async def test_tokens_of_config_generation_config_and_tokenizer_end_a_response(
    tmp_path: Path,
) -> None:
    directory = make_model_dir(tmp_path / "qwen2")
    (directory / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    stops, lasts = {EOS, 8, 9}, set()
    for completion in await sampled(
        directory, [request(PROMPT, SamplingSettings(1.5, 200, seed=n)) for n in range(60)]
    ):
        *before, last = completion.token_ids.tolist()
        assert not stops & set(before)
        assert (completion.finish_reason is FinishReason.STOP) == (last in stops)
        assert last in stops or len(before) == 199
        lasts.add(last)
    assert stops <= lasts


async def test_first_come_is_first_served(model_dir: Path) -> None:
    async with opened(model_dir, max_rows=8) as engine:
        streams = await start(
            engine, *(request(PROMPT, SamplingSettings(1.5, 9, seed=n)) for n in range(20))
        )
        assert await engine.decode(1) == 1
        lengths = [len(stream.tokens) for stream in streams]
        await finish(engine, streams)
        assert lengths == [1] * 8 + [0] * 12


async def test_steps_are_counted_and_memory_is_given_back(model_dir: Path) -> None:
    async with opened(model_dir) as engine:
        streams = await start(engine, request(PROMPT, SamplingSettings(1.0, 20, seed=21)))
        counts = [await engine.decode(8) for _ in range(4)]
        assert streams[0].task.done()
        assert counts == [8, 8, 4, 0]
        assert engine._decoder._rows is None
