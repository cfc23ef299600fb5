"""Version spans, ages and the staleness mask against loops over tokens.

Shape legend: R = response tokens of one sample.
"""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.config.rollout import StalenessConfig
from bapo_megatron.data.staleness import (
    join_spans,
    num_spanned,
    response_age,
    spans_of,
    token_versions,
    trainable_mask,
)

SPANS = spans_of([1, 1, 3, 4])
"""At version 5: ages 4, 4, 2 and 1, mean 2.75."""


def mask_by_loop(versions: list[int], version: int, limit: StalenessConfig) -> list[bool]:
    """The rule as the configuration words it, with exact means."""
    kept = []
    for token_version in versions:
        age = Fraction(version - token_version)
        if limit.measure == "mean":
            age = Fraction(sum(version - v for v in versions), len(versions))
        elif limit.measure == "oldest":
            age = Fraction(max(version - v for v in versions))
        kept.append(limit.max_age is None or age <= limit.max_age)
    return kept


def test_a_response_is_as_old_as_its_tokens_on_average_or_as_the_oldest() -> None:
    assert response_age(SPANS, 5, "mean") == 2.75
    assert response_age(SPANS, 5, "oldest") == 4.0


@pytest.mark.parametrize("measure", ["mean", "oldest"])
def test_a_response_without_tokens_has_no_age(measure: str) -> None:
    assert response_age((), 5, measure) == 0.0


@given(
    versions=st.lists(st.integers(0, 12), max_size=9).map(sorted),
    lead=st.integers(0, 3),
    max_age=st.none() | st.integers(0, 12),
    measure=st.sampled_from(["token", "mean", "oldest"]),
)
def test_the_mask_equals_a_loop_over_tokens(
    versions: list[int], lead: int, max_age: int | None, measure: str
) -> None:
    version = max(versions, default=0) + lead
    limit = StalenessConfig(max_age=max_age, measure=measure, action="mask")
    mask_R = trainable_mask(spans_of(versions), version, limit)
    assert mask_R.dtype == bool
    assert mask_R.tolist() == mask_by_loop(versions, version, limit)


@pytest.mark.parametrize("action", ["drop", "regenerate"])
def test_actions_on_whole_responses_mask_nothing(action: str) -> None:
    limit = StalenessConfig(max_age=0, measure="oldest", action=action)
    assert trainable_mask(SPANS, 5, limit).all()


def test_runs_of_equal_versions_become_spans() -> None:
    assert spans_of([4, 4, 4, 7, 9, 9]) == ((4, 3), (7, 1), (9, 2))
    assert spans_of([0]) == ((0, 1),)
    assert spans_of([]) == ()


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=4))
def test_spans_say_the_version_of_every_token(pieces: list[list[int]]) -> None:
    versions = [version for piece in pieces for version in piece]
    spans = join_spans(map(spans_of, pieces))
    assert spans == spans_of(versions)
    assert num_spanned(spans) == len(versions)
    assert token_versions(spans).dtype == np.int64
    assert token_versions(spans).tolist() == versions
