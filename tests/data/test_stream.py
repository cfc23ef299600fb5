"""The order of training prompts: epochs, mixtures, and positions that are resumed exactly."""

from collections import Counter
from fractions import Fraction
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.data.stream import PromptMixture, PromptStream
from bapo_megatron.types import Prompt
from tests.data.prompt_sets import make_prompt_set

weights = st.one_of(
    st.integers(1, 20).map(float),
    st.sampled_from([0.1, 0.2, 0.7, 0.05, 1 / 3, 1e-3, 2.5]),
)
mixtures = st.lists(st.tuples(st.integers(1, 9), weights), min_size=1, max_size=6)
"""Size and weight of each set."""


def make_prompts(count: int, name: str = "a") -> list[Prompt]:
    return [Prompt(f"{name}:{i}", (i,), str(i), f"question {i}") for i in range(count)]


def make_stream(count: int, *, seed: int, shuffle: bool) -> PromptStream:
    return PromptStream(make_prompt_set("a", make_prompts(count)), seed, shuffle)


def make_mixture(sets: list[tuple[int, float]], seed: int = 0, shuffle: bool = True):
    named = [
        make_prompt_set(f"s{number}", make_prompts(size, f"s{number}"), weight)
        for number, (size, weight) in enumerate(sets)
    ]
    return PromptMixture(named, seed, shuffle)


def take(stream: Any, count: int) -> list[str]:
    return [next(stream).prompt_id for _ in range(count)]


def source(prompt_id: str) -> str:
    return prompt_id.partition(":")[0]


def test_without_shuffling_the_file_repeats_in_order():
    stream = make_stream(3, seed=0, shuffle=False)

    assert take(stream, 7) == ["a:0", "a:1", "a:2", "a:0", "a:1", "a:2", "a:0"]
    assert stream.num_drawn == 7


def test_the_order_of_one_set_is_that_of_earlier_versions():
    # Drawn before there were mixtures: np.random.default_rng([5, epoch]).permutation(6).
    earlier = ["s0:1", "s0:4", "s0:2", "s0:3", "s0:5", "s0:0", "s0:2", "s0:0"]

    assert take(make_mixture([(6, 1.0)], seed=5), 8) == earlier


@given(mixtures, st.integers(0, 5), st.booleans(), st.lists(st.integers(0, 30), max_size=4))
@settings(max_examples=150, deadline=None)
def test_a_mixture_resumed_after_any_draws_equals_the_uninterrupted_one(
    sets, seed, shuffle, stretches
):
    num_draws = sum(stretches) + 25
    uninterrupted = take(make_mixture(sets, seed, shuffle), num_draws)

    state, drawn = make_mixture(sets, seed, shuffle).state(), []
    for stretch in [*stretches, 25]:
        mixture = make_mixture(sets, seed, shuffle)
        mixture.restore(state)
        drawn += take(mixture, stretch)
        state = mixture.state()

    assert drawn == uninterrupted


@pytest.mark.slow
@given(mixtures)
@settings(max_examples=60, deadline=None)
def test_after_every_draw_each_set_is_less_than_one_prompt_from_its_share(sets):
    total = sum(Fraction(repr(weight)) for _, weight in sets)
    drawn = Counter[str]()
    for count, prompt_id in enumerate(take(make_mixture(sets), 300), start=1):
        drawn[source(prompt_id)] += 1
        for number, (_, weight) in enumerate(sets):
            share = Fraction(repr(weight)) / total
            assert abs(drawn[f"s{number}"] - count * share) < 1


def test_the_seed_changes_the_order_within_sets_and_not_the_sets_of_the_draws():
    one, other = (take(make_mixture([(30, 2.0), (30, 1.0)], seed), 90) for seed in (1, 2))

    assert [source(x) for x in one] == [source(x) for x in other]
    # Windows by hand: s0 in draws [0, 2), [1, 3), [3, 5) …, s1 in [0, 3), [3, 6) ….
    assert [source(x) for x in one[:6]] == ["s0", "s0", "s1"] * 2
    orders = [
        [x for x in ids if source(x) == name] for ids in (one, other) for name in ("s0", "s1")
    ]
    epochs = [order[:30] for order in orders] + [orders[0][30:], orders[2][30:]]
    rows = [tuple(x.partition(":")[2] for x in epoch) for epoch in epochs]
    assert len(set(rows)) == 6  # each set and each epoch has an order of its own
    assert {tuple(sorted(row)) for row in rows} == {tuple(sorted(map(str, range(30))))}


def test_of_the_open_windows_the_one_that_closes_first_is_taken():
    # By hand, of 8 draws: s0 [0, 8); s1 [0, 4), [4, 8); s2 [0, 2), [1, 4), [3, 5), [4, 7), [6, 8).
    ids = take(make_mixture([(9, 1.0), (9, 2.0), (9, 5.0)]), 16)

    assert [source(x) for x in ids] == ["s2", "s1", "s2", "s2", "s2", "s0", "s1", "s2"] * 2


def test_weights_are_taken_as_they_are_written():
    # In binary 0.1 + 0.2 is not 0.3; by tenths the first set has exactly a third.
    sources = [source(x) for x in take(make_mixture([(1, 0.1), (1, 0.2)]), 3000)]
    ahead = accumulate(2 if name == "s0" else -1 for name in sources)

    assert [value for value in list(ahead)[2::3] if value] == []


def test_a_position_in_other_prompts_is_refused():
    state = make_stream(7, seed=3, shuffle=True).state()

    with pytest.raises(ValueError, match="training prompts"):
        make_stream(8, seed=3, shuffle=True).restore(state)
    with pytest.raises(ValueError, match=r"seed was 3 .* is 4"):
        make_stream(7, seed=4, shuffle=True).restore(state)
    with pytest.raises(ValueError, match=r"data\.shuffle was True"):
        make_stream(7, seed=3, shuffle=False).restore(state)


@pytest.mark.parametrize(
    ("sets", "now"),
    [
        ([(3, 1.0), (4, 2.0)], "s0:1, s1:2"),
        ([(3, 1.0), (4, 1.0), (4, 1.0)], "s0:1, s1:1, s2:1"),
        ([(3, 1.0)], "one set"),
    ],
)
def test_a_position_in_other_sets_or_weights_is_refused(sets, now):
    state = make_mixture([(3, 1.0), (4, 1.0)]).state()

    with pytest.raises(ValueError, match=rf"was s0:1, s1:1 .* is {now} now"):
        make_mixture(sets).restore(state)


def test_a_lone_set_may_get_another_name_or_weight():
    mixture = make_mixture([(7, 2.0)], seed=3)
    take(mixture, 4)
    renamed = PromptMixture([make_prompt_set("other", make_prompts(7, "s0"))], 3, True)

    renamed.restore(mixture.state())

    assert take(renamed, 9) == take(mixture, 9)


def test_a_position_with_other_columns_is_refused():
    def stream(tests: int) -> PromptStream:
        prompts = [Prompt("a:0", (1,), "2", "1", row={"t": tests})]
        return PromptStream(make_prompt_set("a", prompts), 0, shuffle=True)

    state = stream(1).state()
    stream(1).restore(state)
    with pytest.raises(ValueError, match="columns"):
        stream(2).restore(state)
