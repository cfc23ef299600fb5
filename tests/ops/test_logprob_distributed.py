"""Vocabulary-sharded log-probs over gloo equal the unsharded ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bapo_megatron.ops.logprob import vocab_parallel_logprobs
from bapo_megatron.ops.reference import logprobs_and_entropy

VOCAB_SIZE, COLUMNS = 41, 64
"""The second of two ranks holds 9 true columns and 23 of padding; the last of four holds padding
only."""


def check_rank(rank: int, num_ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    try:
        for num_tokens in (33, 1, 0):
            check_tokens(rank, num_ranks, num_tokens)
        check_poison(rank, num_ranks)
    finally:
        dist.destroy_process_group()


def check_tokens(rank: int, num_ranks: int, num_tokens: int) -> None:
    """Values and gradients of this rank's columns against the float64 reference."""
    generator = torch.Generator().manual_seed(num_tokens)
    whole_NV = 4 * torch.randn(num_tokens + 5, COLUMNS, generator=generator) + 30
    rows_T = torch.randperm(num_tokens + 5, generator=generator)[:num_tokens]
    target_T = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator)
    weight_T = torch.randn(num_tokens, generator=generator)

    mine = slice(rank * COLUMNS // num_ranks, (rank + 1) * COLUMNS // num_ranks)
    local_NV = whole_NV[:, mine].clone().requires_grad_()
    actual = vocab_parallel_logprobs(
        local_NV,
        target_T,
        vocab_size=VOCAB_SIZE,
        rows_T=rows_T,
        temperature=0.9,
        group=dist.group.WORLD,
    )
    (weight_T * (actual.logprob_T + 0.5 * actual.entropy_T)).sum().backward()

    exact_NV = whole_NV.double().requires_grad_()
    logprob_T, entropy_T = logprobs_and_entropy(
        exact_NV[rows_T], target_T, vocab_size=VOCAB_SIZE, temperature=0.9
    )
    (weight_T * (logprob_T + 0.5 * entropy_T)).sum().backward()
    assert exact_NV.grad is not None
    for ours, wanted in (
        (actual.logprob_T, logprob_T),
        (actual.entropy_T, entropy_T),
        (local_NV.grad, exact_NV.grad[:, mine]),
    ):
        assert ours is not None
        limit = 2e-6 * wanted.abs().clamp(min=1.0)
        assert bool(((ours.double() - wanted).abs() <= limit).all())

    gathered = [torch.empty_like(actual.logprob_T) for _ in range(num_ranks)]
    dist.all_gather(gathered, actual.logprob_T.detach())
    assert all(torch.equal(other, gathered[0]) for other in gathered)


def check_poison(rank: int, num_ranks: int) -> None:
    """A NaN in one rank's columns reaches every rank, and that token only."""
    local_NV = torch.zeros(2, COLUMNS // num_ranks)
    if rank == 0:
        local_NV[1, 3] = torch.nan
    actual = vocab_parallel_logprobs(
        local_NV, torch.tensor([0, 0]), vocab_size=VOCAB_SIZE, group=dist.group.WORLD
    )
    assert torch.isnan(actual.logprob_T).tolist() == [False, True]
    assert torch.isnan(actual.entropy_T).tolist() == [False, True]


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sharded_logprobs_and_gradients_equal_the_unsharded(num_ranks: int, tmp_path: Path) -> None:
    mp.spawn(check_rank, args=(num_ranks, str(tmp_path / "store")), nprocs=num_ranks)
