from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.data.staleness import join_spans, num_spanned, spans_of, token_versions


def test_runs_of_equal_versions_become_spans() -> None:
    assert spans_of([4, 4, 4, 7, 9, 9]) == ((4, 3), (7, 1), (9, 2))
    assert spans_of([0]) == ((0, 1),)
    assert spans_of([]) == ()


def test_pieces_of_one_version_become_one_span() -> None:
    assert join_spans(map(spans_of, ([4, 4, 4], [], [4, 4, 7], [7]))) == ((4, 5), (7, 2))
    assert join_spans([]) == ()


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=4))
def test_spans_say_the_version_of_every_token(pieces: list[list[int]]) -> None:
    versions = [version for piece in pieces for version in piece]
    spans = join_spans(map(spans_of, pieces))
    assert spans == spans_of(versions)
    assert num_spanned(spans) == len(versions)
    assert token_versions(spans).dtype == np.int64
    assert token_versions(spans).tolist() == versions
