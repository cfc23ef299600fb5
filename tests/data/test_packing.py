import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.data.micro_batch import build_micro_batch
from bapo_megatron.data.packing import PackingRules, SequenceFlops, pack_update, split_updates
from tests.data.samples import make_batch, make_episode, make_sample

LINEAR = SequenceFlops(per_token=1, per_pair=0)
"""Cost by tokens alone, so that expected divisions can be seen."""


def rules(data_size=1, max_tokens=8, **options):
    return PackingRules(data_size, max_tokens, **{"flops": LINEAR, **options})


def sizes(packing, samples):
    """Tokens of each micro-batch, rank by rank."""
    return [
        [
            sum(len(samples[i].prompt.token_ids) + len(samples[i].response_token_ids) for i in k)
            for k in rank
        ]
        for rank in packing.ranks
    ]


def test_updates_are_whole_groups_in_order():
    batch = make_batch(num_groups=4, group_size=2)

    assert split_updates(batch, updates_per_batch=2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert split_updates(batch, updates_per_batch=4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(
        ValueError,
        match=r"algorithm\.updates_per_batch is 2 but the batch of step 5 has 3 groups",
    ):
        split_updates(make_batch(num_groups=3), updates_per_batch=2)


def test_the_longest_samples_go_to_the_emptiest_micro_batches():
    # 9 + 1, 8 + 2, 7 + 3 and 6 + 4 fill four micro-batches of ten exactly.
    samples = [make_sample(1, length - 1) for length in (1, 2, 3, 4, 6, 7, 8, 9)]

    packing = pack_update(samples, range(8), rules(data_size=2, max_tokens=10))

    assert sizes(packing, samples) == [[10, 10], [10, 10]]
    assert (packing.real_tokens, packing.slots, packing.rank_flops) == (40, 40, (20, 20))


def test_what_an_environment_wrote_is_computed_and_counts():
    # 2 + (1 + 4 + 1) = 8 tokens, of which 2 train, cost as much as 2 + 6.
    samples = [make_episode(2, (1, 4, 1)), make_sample(2, 6, group_id=1)]

    packing = pack_update(samples, [0, 1], rules(data_size=2))

    assert (packing.real_tokens, packing.slots, packing.rank_flops) == (16, 16, (8, 8))
    with pytest.raises(ValueError, match=r"sample 0 of group 0 \(train.jsonl:0\) has 8 tokens"):
        pack_update(samples[:1], [0], rules(max_tokens=7))


def test_fewer_samples_than_ranks_give_an_empty_micro_batch():
    samples = [make_sample(2, 3)]

    packing = pack_update(samples, [0], rules(data_size=2, total_multiple=4))

    assert packing.ranks == (((0,),), ((),))
    assert (packing.real_tokens, packing.slots, packing.rank_flops) == (5, 12, (5, 0))


def test_a_sample_beyond_the_budget_is_named_with_the_keys_to_change():
    samples = [make_sample(2, 3), make_sample(4, 6, group_id=8, index=1)]

    with pytest.raises(ValueError, match=r"sample 1 of group 8 \(train.jsonl:8\) has 10 tokens"):
        pack_update(samples, [0, 1], rules(max_tokens=9))
    with pytest.raises(
        ValueError, match=r"train.max_tokens_per_micro_batch × parallel.context holds 8"
    ):
        pack_update(samples, [0, 1], rules(max_tokens=11, total_multiple=4))
    padded = [make_sample(4, 5)]
    pack_update(padded, [0], rules(max_tokens=12, sequence_multiple=4, total_multiple=4))
    with pytest.raises(ValueError, match=r"has 9 tokens but .* holds 8"):
        pack_update(padded, [0], rules(max_tokens=11, sequence_multiple=4, total_multiple=4))


def test_long_samples_count_for_more_than_their_tokens_where_attention_does():
    # Lengths 8 and 4, 4, 4: by tokens 8 + 4 and 4 + 4 (12 and 8 is the best), by the square of the
    # length 64 and 48.
    samples = [make_sample(1, length - 1) for length in (8, 4, 4, 4)]

    packing = pack_update(
        samples, range(4), rules(data_size=2, max_tokens=12, flops=SequenceFlops(0, 1))
    )

    assert sizes(packing, samples) == [[8], [12]]
    assert packing.rank_flops == (64, 48)


@pytest.mark.parametrize(("lengths", "totals"), [((6, 4, 4, 3), [8, 9]), ((6, 4, 4, 3, 1), [9, 9])])
def test_a_full_micro_batch_is_passed_over_until_a_sample_fits(lengths, totals):
    # 6 · 6 costs most and stands alone; the two 4s cost less, but have no room for a 3.
    samples = [make_sample(1, length - 1) for length in lengths]

    packing = pack_update(
        samples,
        range(len(samples)),
        rules(data_size=2, max_tokens=9, flops=SequenceFlops(0, 1)),
    )

    assert sorted(map(sum, sizes(packing, samples))) == totals


def test_interleaved_stages_get_whole_rounds_of_micro_batches():
    samples = [make_sample(1, 3, group_id=i) for i in range(3)]

    packing = pack_update(
        samples, range(3), rules(max_tokens=4, count_multiple=2, total_multiple=2)
    )

    assert sorted(map(len, packing.ranks[0])) == [0, 1, 1, 1]
    assert packing.slots == 4 + 4 + 4 + 2


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=40),
    data_size=st.integers(1, 5),
    budget=st.integers(64, 200),
    multiples=st.sampled_from([(1, 1), (1, 2), (4, 8), (4, 4), (8, 16)]),
    count_multiple=st.sampled_from([1, 2, 3]),
    order=st.randoms(use_true_random=False),
)
def test_a_packing_holds_every_sample_once_within_the_budget(
    lengths, data_size, budget, multiples, count_multiple, order
):
    samples = [make_sample(p, r, group_id=i) for i, (p, r) in enumerate(lengths)]
    chosen = list(range(0, len(samples), 2))
    asked = PackingRules(data_size, budget, SequenceFlops(40, 3), *multiples, count_multiple)

    packing = pack_update(samples, chosen, asked)

    assert sorted(i for rank in packing.ranks for k in rank for i in k) == chosen
    assert len(packing.ranks) == data_size
    (count,) = {len(rank) for rank in packing.ranks}
    assert count % count_multiple == 0
    built = [
        build_micro_batch(samples, k, np.zeros(len(samples)), np.zeros(len(samples)), asked)
        for rank in packing.ranks
        for k in rank
    ]
    assert all(0 < b.num_tokens <= budget and b.num_tokens % multiples[1] == 0 for b in built)
    assert all((b.cu_seqlens % multiples[0] == 0).all() for b in built)
    assert packing.slots == sum(b.num_tokens for b in built)
    assert packing.real_tokens == sum(sum(lengths[i]) for i in chosen)
    cost = [40 * (p + r) + 3 * (p + r) ** 2 for p, r in lengths]
    assert packing.rank_flops == tuple(
        sum(cost[i] for k in rank for i in k) for rank in packing.ranks
    )
    order.shuffle(chosen)
    assert pack_update(samples, chosen, asked) == packing
