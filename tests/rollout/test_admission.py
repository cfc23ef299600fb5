"""Which engine takes a request, and when: tests of ``bapo_megatron.rollout.admission``."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from bapo_megatron.config.rollout import HealthConfig, RolloutConfig
from bapo_megatron.engine.base import Capabilities
from bapo_megatron.engine.pooled import PooledEngine
from bapo_megatron.rollout.admission import Admission, CacheUse, Claim, ResponseLengths
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.types import FinishReason
from tests.fakes.fake_engine import FakeEngine, NoStepper
from tests.fakes.fake_sglang import FakeSglang
from tests.rollout.pool import Response, pool_on, until


def engine_with(cache_tokens: int | None, num_ranks: int = 1) -> PooledEngine:
    properties = Capabilities(num_ranks, frozenset(), cache_tokens)
    return PooledEngine(FakeEngine(), properties=properties)


def claim_of(affinity: int, prompt_tokens: int = 100, position: int = 0, limit: int = 16) -> Claim:
    return Claim(affinity, prompt_tokens, position, limit)


def survival(lengths: ResponseLengths, position: float) -> float:
    return float(np.exp(lengths.log_survival(np.array([position])))[0])


def test_lengths_are_those_of_ended_and_of_unfinished_responses() -> None:
    lengths = ResponseLengths()
    # Two bins up to the limit, 0 to 15 and 16. One imagined response is in either with 1/2.
    lengths.begin(0, limit=16)
    assert survival(lengths, 16) == pytest.approx(1 - 0.5 / 2)
    for _ in range(9):
        lengths.begin(0, limit=16)
    lengths.leave(5, has_ended=True)  # one of ten
    assert survival(lengths, 16) == pytest.approx(1 - 1.5 / 11, rel=1e-3)
    assert survival(lengths, 0) == 1.0
    for _ in range(4):  # aborted: nobody knows how long they would have got
        lengths.leave(3, has_ended=False)
    assert survival(lengths, 16) == pytest.approx(1 - 1.5 / 7, rel=1e-3)


def test_a_response_that_is_aborted_and_continued_counts_once_wherever_it_has_been() -> None:
    lengths, other = ResponseLengths(), ResponseLengths()
    lengths.begin(0, limit=64)
    lengths.advance(0, 20)
    lengths.leave(20, has_ended=False)
    lengths.begin(20, limit=64)
    other.begin(0, limit=64)
    lengths.advance(20, 40)
    other.advance(0, 40)
    for observed in (lengths, other):
        observed.leave(40, has_ended=True)
    positions = np.array([16.0, 20.0, 30.0, 45.3, 64.0])
    np.testing.assert_array_equal(lengths.log_survival(positions), other.log_survival(positions))


def test_lengths_of_long_ago_are_forgotten() -> None:
    lengths = ResponseLengths()
    for position in [5] * 1000 + [40] * 40_000:
        lengths.begin(0, limit=64)
        lengths.advance(0, position)
        lengths.leave(position, has_ended=True)
    assert survival(lengths, 16) == pytest.approx(1, abs=1e-3)  # of all, 2.4% had ended there


def test_the_growth_of_responses_that_go_on_counts_in_every_length_they_reach() -> None:
    lengths = ResponseLengths()
    for _ in range(10):
        lengths.begin(0, limit=16)
        lengths.advance(0, 16)
    # The imagined response ends in either bin: with 1/2 of it in the first, with all in the second.
    assert survival(lengths, 16 * 2**0.25) == pytest.approx((1 - 0.5 / 11) * (1 - 1 / 11))


def test_no_request_is_expected_to_grow_beyond_its_own_limit() -> None:
    use = CacheUse(ResponseLengths())
    # 25 bins: of the two responses at risk in the first one, 1/25 of the imagined one ends there.
    use.lengths.begin(0, limit=1000)
    assert use.forecast(claim_of(1, limit=16)).expected == pytest.approx(116 * (1 - 0.04 / 2))


def test_a_prompt_that_requests_share_is_held_once() -> None:
    use = CacheUse(ResponseLengths())
    use.add(claim_of(1))
    assert use.forecast(claim_of(1)).expected == 100
    assert use.forecast(claim_of(2)).expected == 200


def test_a_request_waits_for_room_and_an_empty_engine_takes_any() -> None:
    admission, engine = Admission(None), engine_with(260)

    def choose(claim: Claim, *, is_due: bool = False) -> PooledEngine | None:
        return admission.choose([engine], claim, is_due=is_due)

    first = claim_of(1)
    assert choose(first) is engine
    assert choose(claim_of(2)) is engine
    assert choose(claim_of(3)) is None
    assert choose(claim_of(3), is_due=True) is engine  # it lost its engine
    engine.properties = Capabilities(1, frozenset(), 520)  # another server is at its address
    assert choose(claim_of(4)) is engine
    assert choose(claim_of(5)) is None
    admission.release(engine, first, has_ended=True)
    assert choose(claim_of(5)) is engine
    tiny = engine_with(50)
    assert Admission(None).choose([tiny], claim_of(6), is_due=False) is tiny


def test_what_an_engine_has_to_do_grows_with_its_responses() -> None:
    admission, engine = Admission(None), engine_with(1000)
    claim = claim_of(1, limit=1000)
    admission.choose([engine], claim, is_due=False)
    admission.advance(engine, claim, 500)
    assert admission.load(engine) == 0.6
    admission.advance(engine, claim, 100)
    assert admission.load(engine) == 0.7


def test_the_number_of_requests_is_limited_where_it_is_set_and_where_nothing_is_reported() -> None:
    for max_requests, cache_tokens, limit in ((3, None, 3), (3, 1 << 30, 3), (None, None, 512)):
        admission = Admission(max_requests)
        engines = [engine_with(cache_tokens), engine_with(cache_tokens)]
        taken = [admission.choose(engines, claim_of(n), is_due=False) for n in range(limit)]
        assert set(taken) == set(engines)
        assert admission.choose(engines, claim_of(limit), is_due=False) is None


def test_requests_are_limited_and_spread_by_the_number_that_each_engine_runs_at_a_time() -> None:
    admission, engines = Admission(None), [engine_with(1 << 30), engine_with(1 << 30)]
    for engine, limit in zip(engines, (6, 2), strict=True):  # a recurrent state for each
        engine.properties = replace(engine.properties, max_requests=limit)
    claims = [claim_of(n) for n in range(8)]
    taken = [admission.choose(engines, claim, is_due=False) for claim in claims]
    assert [taken.count(engine) for engine in engines] == [6, 2]
    assert admission.choose(engines, claim_of(8), is_due=False) is None
    last = engines.index(taken[-1])
    admission.release(engines[last], claims[-1], has_ended=True)
    assert admission.choose(engines, claim_of(8), is_due=False) is engines[last]
    assert admission.choose(engines, claim_of(9), is_due=True) in engines  # it lost its engine


def test_a_large_group_is_spread_once_its_engine_has_much_more_to_do() -> None:
    admission, engines = Admission(None), [engine_with(None), engine_with(None)]
    taken = [admission.choose(engines, claim_of(1), is_due=False) for _ in range(16)]
    # 0 to 4 others are no reason to move; then the other one takes up to 1.25 × 5 + 4.
    assert [taken.count(engine) for engine in engines] == [5, 11]


def test_engines_of_more_ranks_get_more_requests() -> None:
    admission, engines = Admission(None), [engine_with(None), engine_with(None, num_ranks=3)]
    taken = [admission.choose(engines, claim_of(n), is_due=False) for n in range(8)]
    assert [taken.count(engine) for engine in engines] == [2, 6]


async def test_requests_of_one_affinity_share_a_server_and_others_go_where_least_is_to_do() -> None:
    one, two = FakeSglang(stalls={3: 5, 4: 5}), FakeSglang(stalls={3: 5, 4: 5})
    async with pool_on(one, two) as pool:
        first = [Response(pool, affinity=1) for _ in range(4)]
        second = [Response(pool, prompt=[1, 2, 3, 4], affinity=2) for _ in range(4)]
        await until(lambda: all(r.token_ids for r in first + second))
        lengths = [{len(r["input_ids"]) for r in fake.requests} for fake in (one, two)]
        assert lengths == [{3}, {4}]
        await pool.drain()
        assert pool._admission._engine_by_affinity == {}


async def test_requests_beyond_what_a_server_reports_wait_here() -> None:
    # One request holds 3 tokens at once, and its response of 20 must fit, too.
    fake = FakeSglang(stalls={3: 5}, cache_tokens=30)
    async with pool_on(fake) as pool:
        responses = [Response(pool) for _ in range(5)]
        await until(lambda: bool(responses[0].token_ids))
        assert pool.num_in_flight == 1
        fake.stalls.clear()
        for response in responses:
            await response.check(20, FinishReason.LENGTH)
        assert fake.max_concurrent == 1


@pytest.mark.parametrize(("stepper", "num_sent"), [(None, 2), (NoStepper(), 5)])
async def test_requests_wait_for_a_connection_only_where_an_engine_samples_by_itself(
    stepper: NoStepper | None, num_sent: int
) -> None:
    config = RolloutConfig(max_connections=2, health=HealthConfig(interval_s=0.1))
    pool = EnginePool([FakeEngine(stepper)], config, version=0)
    assert pool.stepper is stepper
    await pool.states.wait_for_engines()
    responses = [Response(pool) for _ in range(5)]
    await until(lambda: pool.num_in_flight >= num_sent)
    await asyncio.sleep(0.1)
    assert pool.num_in_flight == num_sent
    for response in responses:
        response.task.cancel()
    await asyncio.gather(*(r.task for r in responses), return_exceptions=True)
    await pool.states.close()
