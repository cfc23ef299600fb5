"""The simulation keeps its own laws, and agrees with what can be computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bapo_megatron.config.rollout import RolloutConfig
from tests.benchmarks import sim_admission
from tests.benchmarks.sim_cluster import Engine, Hardware, Lengths, Sequence
from tests.benchmarks.sim_rollout import LENGTHS, TIMES, draw, modes, page_table, summarise
from tests.benchmarks.sim_schedule import Mode, Simulation

SMALL = Hardware(engines=4, max_running=6, memory_bytes=30e9)
SHORT = Lengths(median=300.0, sigma=1.0, longest=2048, prompt_tokens=16)


def make_mode(*, drains: bool = False, **settings: Any) -> Mode:
    """Batches of 5 groups of 3."""
    sizes = {"groups_per_step": 5, "samples_per_group": 3, "max_response_tokens": 2048}
    return Mode("test", RolloutConfig.model_validate(sizes | settings), drains=drains)


MODES = [
    make_mode(),
    make_mode(oversample_groups=3, partial=False),
    make_mode(oversample_groups=3),
    make_mode(async_steps=1),
    make_mode(async_steps=3, oversample_groups=2),
    make_mode(async_steps=2, weight_sync={"in_flight": "in_place"}),
    make_mode(async_steps=2, drains=True),
    make_mode(async_steps=3, staleness={"max_age": 2}),
    make_mode(async_steps=3, staleness={"max_age": 2, "measure": "mean"}),
    make_mode(async_steps=3, staleness={"max_age": 2, "measure": "token", "action": "mask"}),
]


def step_s(hardware: Hardware, sequences: int, context: float) -> float:
    """Time of a decoding step, by the formula in the module's docstring."""
    return hardware.step_s + hardware.sequence_s * sequences + hardware.token_s * context


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("memory_bytes", [30e9, 15.5e9])
def test_every_prompt_and_token_is_trained_or_given_up_or_in_the_buffer(
    mode: Mode, memory_bytes: float
) -> None:
    hardware = Hardware(engines=4, max_running=6, memory_bytes=memory_bytes)
    simulation = Simulation(mode, hardware, SHORT, seed=1)
    record = simulation.run(25)
    assert record.trained == 25 * 5
    given_up = sum(record.dropped.values())
    assert record.drawn == record.trained + given_up + len(simulation.buffer)
    kept = sum(group.tokens for group in simulation.buffer.values())
    trained = sum(length for batch in record.batches for length in batch.lengths)
    last = record.snapshots[-1]
    assert last.tokens == pytest.approx(trained + record.wasted_tokens + kept, rel=1e-9)
    by_age = sum(sum(batch.tokens_by_age.values()) for batch in record.batches)
    assert by_age == pytest.approx(trained, rel=1e-9)
    assert last.decode_s + last.prefill_s <= hardware.engines * last.now_s * (1 + 1e-9)
    assert record.peak_context <= hardware.kv_tokens * (1 + 1e-9)
    assert max(count for _, count in record.running) <= hardware.engines * hardware.max_running
    times_s = [time_s for time_s, _ in record.running]
    assert times_s == sorted(times_s)


def test_synchronous_steps_of_equal_lengths_take_the_time_of_the_closed_form() -> None:
    hardware = Hardware(engines=1, max_running=15)
    lengths = Lengths(sigma=0.0, median=1000.0, prompt_tokens=100)
    record = Simulation(make_mode(), hardware, lengths, seed=0).run(3)
    # 15 sequences begin with 100 tokens each and sample 1000, all at once.
    prefill_s = 15 * hardware.prefill_s(100)
    decode_s = 1000 * step_s(hardware, 15, 15 * 100) + hardware.token_s * 15 * 1000**2 / 2
    training_s = hardware.training_s([1000.0] * 15)
    whole_s = 3 * (prefill_s + decode_s + training_s + hardware.sync_s)
    assert record.snapshots[-1].now_s == pytest.approx(whole_s, rel=1e-9)
    assert [batch.waited_s for batch in record.batches] == pytest.approx(
        [prefill_s + decode_s] * 3, rel=1e-9
    )


def test_an_engine_agrees_with_stepping_token_by_token() -> None:
    lengths = (5.0, 300.0, 301.0, 900.0)
    engine = Engine(SMALL, prompt_tokens=10)
    for index, length in enumerate(lengths):
        engine.add(Sequence(0, index, length))
    ends_s = []
    while len(engine):
        ends_s.append(engine.next_event_s())
        engine.advance(ends_s[-1])
        ends_s += [ends_s[-1]] * (len(engine.pop_finished(0)) - 1)
    stepped_s, expected_s = 4 * SMALL.prefill_s(10), []
    for token in range(900):
        running = sum(length > token for length in lengths)
        # Half a token more: the mean context while it is sampled.
        stepped_s += step_s(SMALL, running, running * (10 + token + 0.5))
        expected_s += [stepped_s] * lengths.count(token + 1.0)
    assert ends_s == pytest.approx(expected_s, rel=1e-9)
    assert engine.tokens == pytest.approx(sum(lengths))


def test_without_overlap_nothing_is_stale_and_discarding_wastes() -> None:
    synchronous, discarding = (Simulation(mode, SMALL, SHORT, seed=2).run(20) for mode in MODES[:2])
    for record in (synchronous, discarding):
        assert {age for batch in record.batches for age in batch.tokens_by_age} == {0}
    assert synchronous.wasted_tokens == 0
    assert not synchronous.dropped
    assert discarding.dropped == {"surplus": 20 * 3}
    assert discarding.wasted_tokens > 0


@pytest.mark.parametrize("measure", ["oldest", "mean"])
def test_a_limit_of_ages_holds_for_every_trained_response(measure: str) -> None:
    staleness = {"max_age": 2, "measure": measure}
    mode = make_mode(async_steps=3, oversample_groups=4, staleness=staleness)
    free = Simulation(make_mode(async_steps=3, oversample_groups=4), SMALL, SHORT, seed=3).run(30)
    held = Simulation(mode, SMALL, SHORT, seed=3).run(30)
    oldest = [max(max(batch.oldest_ages) for batch in record.batches) for record in (free, held)]
    assert oldest[0] > 1  # two updates per step: one step
    assert held.dropped["stale"] > 0
    if measure == "oldest":
        assert oldest[1] == 1


def test_masked_tokens_are_those_beyond_the_limit() -> None:
    staleness = {"max_age": 2, "measure": "token", "action": "mask"}
    mode = make_mode(async_steps=3, oversample_groups=4, staleness=staleness)
    record = Simulation(mode, SMALL, SHORT, seed=3).run(30)
    too_old = sum(
        tokens for b in record.batches for age, tokens in b.tokens_by_age.items() if age > 1
    )
    assert too_old > 0
    assert sum(batch.masked_tokens for batch in record.batches) == pytest.approx(too_old)
    assert not record.dropped


def test_admission_by_tokens_keeps_up_with_the_best_number_of_requests() -> None:
    lengths = sim_admission.LENGTHS["nearly equal, mean 20,400"]
    by_tokens, *by_number = (
        sim_admission.simulate("async 1", lengths, limit, seed=0, steps=2, engines=2)
        for limit in (None, 8, 24, 48, 96, 192)
    )
    times_s = [result.wall_s for result in by_number]
    assert by_tokens.wall_s <= 1.05 * min(times_s)
    assert max(times_s) > 2 * min(times_s)  # what a wrong number costs
    assert by_tokens.retractions < by_number[-1].retractions


@pytest.mark.slow
def test_the_table_names_every_mode_and_the_figure_is_drawn(tmp_path: Any) -> None:
    names = [mode.name for mode in modes()]
    assert set(TIMES) | set(LENGTHS) <= set(names)
    record = Simulation(MODES[0], SMALL, SHORT, seed=0).run(40)
    outcome = summarise(record, SMALL, 500.0)
    text = page_table(dict.fromkeys(names, outcome))
    assert all(f"| {name} | {outcome['steps_per_h']:.1f} | 1.00 | " in text for name in names)
    draw(dict.fromkeys(names, (outcome, record)), SMALL, 500.0, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
