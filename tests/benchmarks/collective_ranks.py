"""Counts the collectives of a search and of one micro-batch, each on two ranks."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from bapo_megatron.ops.chunked import OutputHead
from tests.benchmarks.stage import collect, make_losses
from tests.distributed_launch import joined
from tests.fakes.given_tokens import CONTEXT, make_micro_batch

TOKENS, COLUMNS, HIDDEN = 8, 16, 4

COLLECTIVES = ("all_gather_into_tensor", "all_gather", "all_reduce", "reduce_scatter_tensor")


def count_collectives() -> tuple[str, str, str]:
    """The search, then forward and backward from logits, and from hidden states in 4 chunks."""
    micro_batch = make_micro_batch(
        behaviour_logprob_T=torch.zeros(TOKENS), target_T=torch.arange(TOKENS)
    )
    with joined() as groups, counted() as search:
        losses = make_losses(groups, COLUMNS)
        decision = collect(losses, torch.zeros(TOKENS), [micro_batch]).decision
    with joined(tensor=num_ranks()) as groups:
        generator = torch.Generator().manual_seed(0)
        vocab_size = COLUMNS * groups.tensor_size
        plain_losses = make_losses(groups, vocab_size)

        with counted() as plain:
            logits_TV = torch.randn(TOKENS, COLUMNS, generator=generator, requires_grad=True)
            loss, _ = plain_losses.loss(
                logits_TV * 1, micro_batch, decision=decision, context=CONTEXT
            )
            loss.backward()

        hidden_TH = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
        weight_VH = torch.randn(COLUMNS, HIDDEN, generator=generator, requires_grad=True)
        head = OutputHead(weight_VH, groups.tensor)
        losses = make_losses(groups, vocab_size, head=head, chunk_tokens=TOKENS // 4)
        with counted() as chunked:
            loss, _ = losses.loss(hidden_TH, micro_batch, decision=decision, context=CONTEXT)
            loss.backward()
        return _text(search), _text(plain), _text(chunked)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count calls of torch.distributed within the block."""
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        spies = {
            name: stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
            for name in COLLECTIVES
        }
        yield counts
        counts.update({name: spy.call_count for name, spy in spies.items() if spy.called})


def num_ranks() -> int:
    """Ranks that the launcher started."""
    return int(os.environ["WORLD_SIZE"])


def _text(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
