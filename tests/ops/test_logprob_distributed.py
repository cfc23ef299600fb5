"""Vocabulary-sharded log-probs over gloo equal the unsharded ones.

Shape legend: N = rows of the logits, V = vocabulary columns, T = tokens.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed_launch import run_ranks
from tests.ops import logprob_ranks
from tests.ops.kernel_calls import assert_close
from tests.ops.logprob_ranks import COLUMNS, TEMPERATURE, VOCAB_SIZE, RankResult
from tests.oracles.logprob import logits_gradient, token_logprobs

pytestmark = pytest.mark.distributed

TOKEN_COUNTS = [33, 1, 0]


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda num_ranks: f"{num_ranks} ranks")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, RankResult]]:
    return run_ranks(logprob_ranks.compute, request.param, request.param, TOKEN_COUNTS)


@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
def test_values_and_gradients_equal_the_unsharded_in_float64(
    ranks: list[dict[str, RankResult]], num_tokens: int
) -> None:
    problem = logprob_ranks.make_problem(num_tokens)
    whole_TV = problem.logits_NV[problem.rows_T, :VOCAB_SIZE]
    wanted = token_logprobs(whole_TV, problem.target_T, TEMPERATURE)
    grad_NV = torch.zeros(len(problem.logits_NV), COLUMNS, dtype=torch.float64)
    grad_NV[problem.rows_T, :VOCAB_SIZE] = logits_gradient(
        whole_TV, problem.target_T, problem.grad_logprob_T, problem.grad_entropy_T, TEMPERATURE
    ).gradient_TV
    results = [rank[str(num_tokens)] for rank in ranks]
    for result in results:
        assert_close(result.logprob_T, wanted.logprob_T)
        assert_close(result.entropy_T, wanted.entropy_T)
    assert_close(torch.cat([result.grad_NV for result in results], dim=1), grad_NV)


def test_every_rank_has_the_same_bits(ranks: list[dict[str, RankResult]]) -> None:
    first, *others = (rank["33"] for rank in ranks)
    for other in others:
        assert torch.equal(other.logprob_T, first.logprob_T)
        assert torch.equal(other.entropy_T, first.entropy_T)


@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
def test_one_small_all_gather_forward_and_none_backward(
    ranks: list[dict[str, RankResult]], num_tokens: int
) -> None:
    """Also with zero tokens, where a rank that stayed away would hold up the others."""
    expected = [len(ranks) * num_tokens * 4] if len(ranks) > 1 else []
    for rank in ranks:
        result = rank[str(num_tokens)]
        assert result.forward_gathers == expected
        assert result.backward_gathers == []


def test_a_nan_in_one_rank_reaches_every_rank_and_that_token_only(
    ranks: list[dict[str, RankResult]],
) -> None:
    for rank in ranks:
        result = rank["poisoned"]
        assert torch.isnan(result.logprob_T).tolist() == [False, True, False]
        assert torch.isnan(result.entropy_T).tolist() == [False, True, False]
