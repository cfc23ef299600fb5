"""The token-chunked path over two gloo ranks equals the same problem on one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed_launch import run_ranks
from tests.ops import chunked_ranks
from tests.tolerances import assert_within

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(chunked_ranks.two_ranks, 2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("num_tokens", [61, 5, 0])
def test_a_divided_vocabulary_changes_nothing(
    ranks: list[dict[str, Any]], num_tokens: int, sequence_parallel: bool
) -> None:
    for rank in ranks:
        errors, bound = rank[f"{num_tokens} tokens, sequence parallel {sequence_parallel}"]
        assert len(errors) == 6
        for name, error in errors.items():
            assert_within(error, bound, name)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_divided_vocabulary_changes_nothing_beside_a_teacher(
    ranks: list[dict[str, Any]], direction: str
) -> None:
    for rank in ranks:
        errors, bound = rank[f"teacher, {direction}"]
        assert len(errors) == 6
        for name, error in errors.items():
            assert_within(error, bound, name)


def test_gradients_of_divided_tokens_add_up(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        errors, bound = rank["context"]
        assert len(errors) == 4
        for name, error in errors.items():
            assert_within(error, bound, name)


def test_a_chunk_costs_one_all_gather(ranks: list[dict[str, Any]]) -> None:
    """Beside one gather of the hidden states and one reduction of their gradient."""
    for rank in ranks:
        first, *chunks, last = rank["collectives"]["per chunk"]
        assert first == "all_gather_into_tensor"
        assert chunks == ["all_gather_into_tensor"] * 4  # 61 tokens, 16 at a time
        assert last == "reduce_scatter_tensor"
        assert len(rank["collectives"]["in one chunk"]) == 3
        assert rank["collectives"]["with a teacher"] == rank["collectives"]["per chunk"]
