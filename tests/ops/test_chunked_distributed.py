"""The token-chunked path over two gloo ranks equals the same problem on one."""

from typing import Any

import pytest

from tests.distributed_launch import run_ranks
from tests.ops import chunked_ranks
from tests.tolerances import assert_within

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(chunked_ranks.two_ranks, 2)


@pytest.mark.parametrize(
    ("division", "num_errors"),
    [
        *((f"{n} tokens, sequence parallel {s}", 7) for n in (61, 5, 0) for s in (False, True)),
        *((f"teacher, {direction}", 7) for direction in ("reverse", "forward")),
        *((f"centering, {kind}", 2) for kind in ("reinforce", "dual", "bapo")),
        *((f"{num_tokens} tokens, whole logits", 6) for num_tokens in (61, 5, 0)),
    ],
)
def test_a_divided_vocabulary_changes_nothing(
    ranks: list[dict[str, Any]], division: str, num_errors: int
) -> None:
    for rank in ranks:
        errors, bound = rank[division]
        assert len(errors) == num_errors
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
        assert rank["collectives"]["of whole logits"] == ["all_gather_into_tensor"]  # no backward
