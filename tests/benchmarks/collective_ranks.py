"""Counts the collectives of one micro-batch on tensor-parallel ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from bapo_megatron.ops.chunked import OutputHead, chunked_policy_loss
from bapo_megatron.ops.contributions import constant_bounds
from bapo_megatron.ops.logprob import vocab_parallel_logprobs
from bapo_megatron.ops.policy_loss import clipped_policy_loss
from tests.distributed_launch import joined

TOKENS, COLUMNS, HIDDEN = 8, 16, 4

COLLECTIVES = ("all_gather_into_tensor", "all_gather", "all_reduce", "reduce_scatter_tensor")


def count_collectives() -> tuple[str, str]:
    """Forward and backward of a micro-batch: from logits, and from hidden states in 4 chunks."""
    with joined(tensor=num_ranks()) as groups:
        generator = torch.Generator().manual_seed(0)
        target_T = torch.arange(TOKENS)
        tokens = {
            "behaviour_logprob_T": torch.zeros(TOKENS),
            "advantage_T": torch.ones(TOKENS),
            "mask_T": torch.ones(TOKENS),
            "loss_weight_T": torch.ones(TOKENS),
            "bounds": constant_bounds(0.0, 2.0, torch.device("cpu")),
            "dual_clip": None,
        }
        vocab_size = COLUMNS * groups.tensor_size

        with counted() as plain:
            logits_TV = torch.randn(TOKENS, COLUMNS, generator=generator, requires_grad=True)
            logprob_T, _ = vocab_parallel_logprobs(
                logits_TV * 1, target_T, vocab_size=vocab_size, group=groups.tensor
            )
            loss, _ = clipped_policy_loss(logprob_T, **tokens)
            loss.backward()

        with counted() as chunked:
            hidden_TH = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
            weight_VH = torch.randn(COLUMNS, HIDDEN, generator=generator, requires_grad=True)
            loss, _, _ = chunked_policy_loss(
                hidden_TH,
                OutputHead(weight_VH, groups.tensor),
                target_T,
                rows_T=torch.arange(TOKENS),
                vocab_size=vocab_size,
                temperature=1.0,
                entropy_coefficient=0.0,
                chunk_tokens=TOKENS // 4,
                **tokens,
            )
            loss.backward()
        return _text(plain), _text(chunked)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count calls of torch.distributed within the block."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            counts[name] += 1
            return original(*args, **options)

        return call

    for name, original in originals.items():
        setattr(dist, name, counting(name, original))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def num_ranks() -> int:
    """Ranks that the launcher started."""
    return int(os.environ["WORLD_SIZE"])


def _text(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
