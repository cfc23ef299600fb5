"""What every engine must do, whatever it is; docs/extending.md says it in words.

Real SGLang servers are held to it in ``tests.engine.sglang.test_real_server``, which imports these
tests: a server takes long to start, and there the tests of its own use it, too.
"""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.data.record import Completion, EnoughTokensError
from bapo_megatron.data.staleness import token_versions
from bapo_megatron.engine.base import START_VERSION, Engine, PauseMode
from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError
from bapo_megatron.types import FinishReason
from tests.engine.contract import (
    LONG,
    PROMPT,
    Case,
    Response,
    abort_all,
    fake_case,
    local_case,
    opened,
)
from tests.engine.helpers import (
    MAX_POSITIONS,
    change_weights,
    reference_distribution,
    reference_logprobs,
)

CASES = [pytest.param(fake_case, id="fake"), pytest.param(local_case, id="local")]
EACH_PAUSE = pytest.mark.parametrize("mode", ["retract", "in_place"])


@pytest.fixture(scope="module", name="case", params=CASES)
def _case(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Case]:
    """An engine. Modules that import the tests from here have a case of their own instead."""
    with request.param(model_dir) as case:
        yield case


@pytest.fixture
def real_case(case: Case) -> Case:
    if not case.has_model:
        pytest.skip("its tokens and log-probs are made up")
    return case


@pytest.fixture
def changed_dir(model_dir: Path, tmp_path: Path) -> Path:
    return change_weights(model_dir, tmp_path / "changed")


def require(case: Case, mode: str) -> None:
    if mode not in case.pause_modes:
        pytest.skip(f"it cannot pause by {mode}")


async def load(engine: Engine, model_dir: Path, version: int) -> None:
    await engine.weights.load(model_dir, version=version, timeout_s=60)


async def test_what_it_can_do_is_known_and_does_not_change(case: Case) -> None:
    async with opened(case) as engine:
        capabilities = await engine.capabilities()
        assert await engine.capabilities(10.0) == capabilities
        assert capabilities.num_ranks >= 1
        assert "disk" in capabilities.methods <= {"broadcast", "disk", "tensor"}
        await engine.check()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_tokens_logprobs_and_versions_come_in_pieces_and_belong_together(
    case: Case, temperature: float
) -> None:
    async with opened(case) as engine:
        short, long = (
            [Response(engine, length, temperature=temperature, seed=n) for n in range(12)]
            for length in (2, LONG)
        )
        assert engine.num_in_flight in (0, 24)  # before or after they have begun
        await asyncio.gather(*(response.task for response in short + long))
        assert engine.num_in_flight == 0
        reasons = set()
        for response in short + long:
            completion = await response.end()
            response.check(case)
            assert [span.version for span in completion.versions] == [START_VERSION]
            reasons.add(completion.finish_reason)
            ends = np.flatnonzero(completion.token_ids == case.eos_token_id).tolist()
            if completion.finish_reason is FinishReason.STOP:
                assert ends == [len(completion.token_ids) - 1]
            else:
                assert completion.finish_reason is FinishReason.LENGTH
                assert ends == []
                assert len(completion.token_ids) == (2 if response in short else LONG)
        assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
        longest = max(long, key=lambda response: response.sink.num_tokens)
        assert len(longest.sink.parts) > 3


async def test_a_receiver_that_has_enough_tokens_ends_its_request_alone(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(case) as engine:
        first, other = (Response(engine, seed=n) for n in range(2))

        def take(part: Completion) -> None:
            raise EnoughTokensError

        monkeypatch.setattr(first.sink, "take", take)
        with pytest.raises(EnoughTokensError):
            await first.task
        await other.end()
        assert engine.num_in_flight == 0


async def test_logprobs_that_were_not_asked_for_do_not_come(case: Case) -> None:
    async with opened(case) as engine:
        completion = await Response(engine, 20, return_logprobs=False).end()
    assert len(completion.token_ids) > 0
    assert len(completion.logprobs) == 0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_the_likeliest_tokens_at_every_place_come_if_they_are_asked_for(
    case: Case, temperature: float
) -> None:
    async with opened(case) as engine:
        responses = [
            Response(engine, 30, temperature=temperature, seed=k, top_logprobs=k)
            for k in (5, 0, 32, 1)
        ]
        for response in responses:
            await response.end()
            response.check(case)


async def test_an_aborted_response_is_continued_with_tokens_and_logprobs_aligned(
    case: Case,
) -> None:
    async with opened(case) as engine:
        responses: list[Response] = []
        aborted: list[Completion] = []
        while not aborted:  # all may have ended before
            first_seed = len(responses)
            responses = [
                Response(engine, seed=first_seed + n, top_logprobs=n % 3) for n in range(8)
            ]
            await responses[0].is_on_its_way()
            await abort_all(engine)
            ended = [await response.end() for response in responses]
            aborted = [c for c in ended if c.finish_reason is FinishReason.ABORT and c.versions]
        for response in responses:
            response.check(case)
        (first, *_) = aborted
        prefix = [*PROMPT, *first.token_ids.tolist()]
        second = Response(
            engine, 10, prompt=prefix, sampled_tokens=len(first.token_ids), top_logprobs=2
        )
        assert (await second.end()).finish_reason is not FinishReason.ABORT
        second.check(case)


@pytest.mark.slow
@EACH_PAUSE
async def test_an_engine_that_is_paused_samples_nothing_and_answers(
    case: Case, mode: PauseMode
) -> None:
    require(case, mode)
    async with opened(case) as engine:
        was_running, seeds = False, itertools.count()
        while not was_running:  # it may end before the pause
            response = Response(engine, stream_tokens=1, seed=next(seeds))
            await response.is_on_its_way()
            await engine.pause(mode)
            await asyncio.sleep(0.5)  # what was sampled before has arrived
            was_running, num_before = not response.task.done(), response.sink.num_tokens
            held = Response(engine, 4)
            await asyncio.sleep(0.5)
            assert (response.sink.num_tokens, held.sink.num_tokens) == (num_before, 0)
            assert engine.silence_s == 0.0
            assert await engine.version(10.0) == str(START_VERSION)
            await engine.resume()
            await response.end()
            await held.end()
            response.check(case)
            assert held.check(case).finish_reason is not FinishReason.ABORT


async def test_a_request_that_is_aborted_while_it_is_retracted_has_its_tokens_once(
    case: Case,
) -> None:
    async with opened(case) as engine:
        reason, seeds = FinishReason.STOP, itertools.count()
        while reason is not FinishReason.ABORT:  # it may end before
            response = Response(engine, seed=next(seeds), top_logprobs=3)
            await response.is_on_its_way()
            await engine.pause("retract")
            await abort_all(engine)
            await engine.resume()
            reason = (await response.end()).finish_reason
            response.check(case)


async def test_a_stream_that_is_cancelled_leaves_nothing_behind(case: Case) -> None:
    async with opened(case) as engine:
        assert engine.silence_s == 0.0
        response = Response(engine)
        await response.is_on_its_way()
        response.task.cancel()
        await asyncio.gather(response.task, return_exceptions=True)
        num_tokens = response.sink.num_tokens
        assert (engine.num_in_flight, engine.silence_s) == (0, 0.0)
        other = Response(engine, 20)
        await other.end()
        other.check(case)
        assert response.sink.num_tokens == num_tokens


async def test_requests_that_are_given_up_end_with_the_reason(case: Case) -> None:
    async with opened(case) as engine:
        responses = [Response(engine, seed=seed) for seed in range(8)]
        for response in responses:
            await response.is_on_its_way()
        engine.give_up("the test ends")
        ended = await asyncio.gather(*(r.task for r in responses), return_exceptions=True)
        errors = [error for error in ended if error is not None]
        assert errors  # a response that had its last token by then has ended by itself
        for error in errors:
            assert isinstance(error, ServerGoneError)
            assert "the test ends" in str(error)
            assert "contract" in str(error)
        assert engine.num_in_flight == 0
        assert await engine.version() == str(START_VERSION)


@pytest.mark.slow
async def test_new_weights_are_used_and_tokens_have_their_version(
    case: Case, model_dir: Path, changed_dir: Path
) -> None:
    async with opened(case) as engine:
        # Fills the prefix cache with the old weights' keys and values, which must not survive.
        await Response(engine, 32).end()
        await load(engine, changed_dir, 7)
        try:
            assert await engine.version() == "7"
            completion = await Response(engine, 32, version=7).end()
        finally:
            await load(engine, model_dir, START_VERSION)
    assert [span.version for span in completion.versions] == [7]
    if case.has_model:
        new = reference_logprobs(changed_dir, PROMPT, completion.token_ids, 1.0)
        old = reference_logprobs(model_dir, PROMPT, completion.token_ids, 1.0)
        assert np.abs(new - old).max() > 0.01
        np.testing.assert_allclose(completion.logprobs, new, rtol=0, atol=1e-4)


@EACH_PAUSE
async def test_a_response_goes_on_with_new_weights_where_it_was_paused(
    case: Case, model_dir: Path, changed_dir: Path, mode: PauseMode
) -> None:
    require(case, mode)
    async with opened(case, **({"keeps_cache": True} if mode == "in_place" else {})) as engine:
        versions, seeds = [0], itertools.count()
        while versions != [START_VERSION, 7]:  # it may end before
            response = Response(engine, stream_tokens=2, seed=next(seeds))
            await response.is_on_its_way()
            await engine.pause(mode)
            await load(engine, changed_dir, 7)
            await engine.resume()
            completion = await response.end()
            await load(engine, model_dir, START_VERSION)
            await engine.weights.flush_idle(60)
            versions = [span.version for span in completion.versions]
    if case.has_model:
        old = reference_logprobs(model_dir, PROMPT, completion.token_ids, 1.0)
        new = reference_logprobs(changed_dir, PROMPT, completion.token_ids, 1.0)
        is_old = token_versions(completion.versions) == START_VERSION
        np.testing.assert_allclose(completion.logprobs[is_old], old[is_old], rtol=0, atol=1e-4)
        if mode == "retract":  # else the keys and values of the old weights are still in use
            np.testing.assert_allclose(
                completion.logprobs[~is_old], new[~is_old], rtol=0, atol=1e-4
            )


async def test_an_unusable_directory_is_an_error_and_the_engine_lives(
    real_case: Case, tmp_path: Path
) -> None:
    async with opened(real_case) as engine:
        with pytest.raises(RolloutError) as caught:
            await load(engine, tmp_path / "nothing", 3)
        assert not isinstance(caught.value, ServerError)
        assert await engine.version() == str(START_VERSION)
        response = Response(engine, 20)
        await response.end()
        response.check(real_case)


@pytest.mark.parametrize(("start", "top_k"), [(1, 0), (4, 3), (15, 8), (23, 1), (24, 2)])
async def test_tokens_from_a_position_on_are_scored_with_the_likeliest_ones(
    case: Case, model_dir: Path, start: int, top_k: int
) -> None:
    tokens = [*PROMPT, *range(40, 60)]
    num_scored = len(tokens) - start
    async with opened(case) as engine:
        await Response(engine, 4, prompt=tokens[:16]).end()
        scores = await engine.score(tokens, 60, start=start, top_k=top_k)
        again = await engine.score(tokens, 60, start=start, top_k=top_k)
    np.testing.assert_allclose(again.logprobs, scores.logprobs, rtol=0, atol=1e-5)
    assert (scores.logprobs.dtype, scores.logprobs.shape) == (np.float32, (num_scored,))
    assert (scores.top_ids.dtype, scores.top_ids.shape) == (np.int32, (num_scored, top_k))
    assert (scores.top_logprobs.dtype, scores.top_logprobs.shape) == (
        np.float32,
        (num_scored, top_k),
    )
    if num_scored:
        expected = case.expected(tokens[:start], tokens[start:], 1.0)
        np.testing.assert_allclose(scores.logprobs, expected, rtol=0, atol=1e-5)
    if case.has_model and num_scored:
        logprob_RV = reference_distribution(model_dir, tokens)[start - 1 : -1]
        order_RV = np.argsort(-logprob_RV, axis=1)[:, :top_k]
        assert scores.top_ids.tolist() == order_RV.tolist()
        top_RK = np.take_along_axis(logprob_RV, order_RV, axis=1)
        np.testing.assert_allclose(scores.top_logprobs, top_RK, rtol=0, atol=1e-5)


async def test_what_exceeds_the_models_positions_is_refused_by_their_number(
    real_case: Case,
) -> None:
    async with opened(real_case) as engine:
        with pytest.raises(RolloutError, match=f"{MAX_POSITIONS}") as caught:
            await engine.score([5] * (MAX_POSITIONS + 1), 60, start=9)
        assert not isinstance(caught.value, ServerError)
        longest = await engine.score([5] * (MAX_POSITIONS - 7), 60, start=9)
        assert len(longest.logprobs) == MAX_POSITIONS - 16
        with pytest.raises(RolloutError, match=f"{MAX_POSITIONS}.*contract") as caught:
            await Response(engine, 200, prompt=[5] * 200).task
        assert not isinstance(caught.value, ServerError)
        assert engine.num_in_flight == 0
