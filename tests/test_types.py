"""What a sample knows of its turns."""

import numpy as np

from tests.data.samples import make_episode, make_sample


def test_an_episode_tells_what_was_sampled_from_what_was_written():
    sample = make_episode(2, (2, 3, 1, 1, 2))

    assert sample.response_token_ids.tolist() == list(range(1050, 1059))
    mask = [True, True, False, False, False, True, False, True, True]
    assert sample.loss_mask.tolist() == mask
    assert sample.loss_mask.dtype == bool
    assert sample.sampled_token_ids.tolist() == [1050, 1051, 1055, 1057, 1058]
    assert sample.sampled_token_ids.dtype == np.int32
    assert (sample.num_sampled, sample.num_written, sample.num_turns) == (5, 4, 3)
    assert [part.tolist() for part in sample.segments()] == [
        [1050, 1051],
        [1052, 1053, 1054],
        [1055],
        [1056],
        [1057, 1058],
    ]


def test_a_response_without_tokens_is_one_empty_turn():
    sample = make_sample(2, 0)

    assert sample.loss_mask.shape == (0,)
    assert (sample.num_sampled, sample.num_written, sample.num_turns) == (0, 0, 1)
    assert [part.tolist() for part in sample.segments()] == [[]]
