"""What the ranks of test_logprob_distributed.py do.

Shape legend: N = rows of the logits, V = vocabulary columns, T = tokens.
"""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.ops.logprob import vocab_parallel_logprobs
from tests.distributed_launch import joined

VOCAB_SIZE, COLUMNS, TEMPERATURE = 41, 64, 0.9
"""The second of two ranks holds 9 true columns and 23 of padding; the last of four holds padding
only."""


class Problem(NamedTuple):
    """The same on every rank, before the columns are divided."""

    logits_NV: Tensor
    rows_T: Tensor
    target_T: Tensor
    grad_logprob_T: Tensor
    grad_entropy_T: Tensor


class RankResult(NamedTuple):
    """What one rank has computed."""

    logprob_T: Tensor
    entropy_T: Tensor
    grad_NV: Tensor
    """[N, V / ranks] of its own columns."""
    forward_gathers: list[int]
    """How many numbers every all-gather brought."""
    backward_gathers: list[int]


def make_problem(num_tokens: int) -> Problem:
    generator = torch.Generator().manual_seed(num_tokens)
    num_rows = num_tokens + 5
    return Problem(
        logits_NV=4 * torch.randn(num_rows, COLUMNS, generator=generator) + 30,
        rows_T=torch.randperm(num_rows, generator=generator)[:num_tokens],
        target_T=torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator),
        grad_logprob_T=torch.randn(num_tokens, generator=generator),
        grad_entropy_T=torch.randn(num_tokens, generator=generator),
    )


def compute(num_ranks: int, token_counts: list[int]) -> dict[str, RankResult]:
    """Results by number of tokens; ``poisoned`` has a NaN in the first rank."""
    results = {}
    with joined(tensor=num_ranks) as groups:
        for num_tokens in token_counts:
            results[str(num_tokens)] = _one(make_problem(num_tokens), groups.tensor)
        poisoned = make_problem(3)
        poisoned.logits_NV[poisoned.rows_T[1], 3] = torch.nan
        results["poisoned"] = _one(poisoned, groups.tensor)
    return results


def _one(problem: Problem, group: dist.ProcessGroup) -> RankResult:
    columns = COLUMNS // dist.get_world_size(group)
    begin = dist.get_rank(group) * columns
    local_NV = problem.logits_NV[:, begin : begin + columns].clone().requires_grad_()
    gathers: list[int] = []
    all_gather = dist.all_gather_into_tensor

    def counted(output: Tensor, *args: object, **options: object) -> object:
        gathers.append(output.numel())
        return all_gather(output, *args, **options)

    with mock.patch.object(dist, "all_gather_into_tensor", counted):
        result = vocab_parallel_logprobs(
            local_NV,
            problem.target_T,
            vocab_size=VOCAB_SIZE,
            rows_T=problem.rows_T,
            temperature=TEMPERATURE,
            group=group,
        )
        forward_gathers = gathers.copy()
        logprob_part_T = problem.grad_logprob_T * result.logprob_T
        (logprob_part_T + problem.grad_entropy_T * result.entropy_T).sum().backward()
    assert local_NV.grad is not None
    return RankResult(
        result.logprob_T.detach(),
        result.entropy_T.detach(),
        local_NV.grad,
        forward_gathers,
        gathers[len(forward_gathers) :],
    )
