"""One update's loss stage on made-up tokens: log-probs, loss and gradient of several micro-batches.

Everything goes through the trainer's ``LossStage``, with bounds that BAPO searched.
Shape legend: T = tokens of the update, C = tokens of a micro-batch, V = columns.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithm.objective import TokenBatch
from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
from bapo_megatron.ops.chunked import OutputHead
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.policy.model import PolicyOutput
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.trainer.loss import LossInputs, LossStage
from bapo_megatron.types import MicroBatch
from tests.distributed_launch import joined
from tests.fakes.given_tokens import CONTEXT, make_micro_batch, make_tokens


class Stage:
    """Tokens [T], and bfloat16 logits [C, V] that stand for those of every micro-batch."""

    def __init__(
        self, num_tokens: int, num_columns: int, chunk_tokens: int, groups: ProcessGroups
    ) -> None:
        """Make an update of ``num_tokens`` in micro-batches of ``chunk_tokens``, which divides it.

        ``losses`` has BAPO over the whole update, ``decision`` is that of the update.
        """
        if num_tokens % chunk_tokens:
            raise ValueError(f"{chunk_tokens} tokens per micro-batch must divide {num_tokens}")
        device = groups.device
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        logprob_T = -normal(num_tokens).abs()
        self.groups, self.device, self.num_columns = groups, device, num_columns
        self.logits_CV = (3 * normal(chunk_tokens, num_columns)).to(device, torch.bfloat16)
        target_C = torch.randint(num_columns, (chunk_tokens,), generator=generator).to(device)
        self.behaviour_T = (logprob_T + 0.2 * normal(num_tokens)).to(device)
        self.logprob_T, self.advantage_T = logprob_T.to(device), normal(num_tokens).to(device)
        self.mask_T = torch.ones(num_tokens, device=device)
        self.losses = make_losses(groups, num_columns)
        self.micro_batches = [
            make_micro_batch(
                behaviour_logprob_T=behaviour_C,
                advantage_T=advantage_C,
                loss_weight_T=torch.full_like(advantage_C, 1.0 / num_tokens),
                target_T=target_C,
            )
            for behaviour_C, advantage_C in zip(
                self.behaviour_T.split(chunk_tokens),
                self.advantage_T.split(chunk_tokens),
                strict=True,
            )
        ]
        self.work_CV = self.logits_CV.clone()
        decision = self.collect().decision
        assert decision is not None
        self.decision = decision

    def restore(self) -> None:
        """Bring back the logits that a run has overwritten."""
        self.work_CV.copy_(self.logits_CV)

    def tokens(self) -> TokenBatch:
        """All tokens, with the log-probs that the search sees."""
        return make_tokens(self.logprob_T, self.behaviour_T, self.advantage_T, self.mask_T)

    def collect(self) -> LossInputs:
        """Search the bounds of the update, its log-probs being known."""
        return collect(self.losses, self.logprob_T, self.micro_batches)

    def run(self) -> None:
        """Log-probs, loss and in-place gradient of every micro-batch, the bounds being known."""
        for micro_batch in self.micro_batches:
            self.run_one(self.losses, micro_batch, self.decision)

    def run_one(
        self, losses: LossStage, micro_batch: MicroBatch, decision: Tensor | None
    ) -> Tensor:
        """Log-probs, loss and in-place gradient of one micro-batch; returns the gradient.

        They share one buffer of logits, so from the second one on it holds gradients; kernels take
        the same time for any finite values.
        """
        leaf = self.work_CV.detach().requires_grad_()
        loss, _ = losses.loss(leaf.view_as(leaf), micro_batch, decision=decision, context=CONTEXT)
        return torch.autograd.grad(loss, leaf)[0]


def make_losses(
    groups: ProcessGroups,
    num_columns: int,
    *,
    scope: str = "update",
    head: OutputHead | None = None,
    chunk_tokens: int = 0,
) -> LossStage:
    """The trainer's loss stage with BAPO as in the paper, searched over ``scope``."""
    ops = OpsConfig.model_validate({"logits_chunk_tokens": chunk_tokens})
    output = PolicyOutput(ops, vocab_size=num_columns, temperature=1.0, groups=groups, head=head)
    config = AlgorithmConfig.model_validate({"objective": "bapo", "bapo": {"scope": scope}})
    return LossStage(config, output, groups)


def collect(losses: LossStage, logprob_T: Tensor, micro_batches: list[MicroBatch]) -> LossInputs:
    """What the objective must know of an update, from the log-probs of its micro-batches."""
    parts = logprob_T.split([len(batch.target_T) for batch in micro_batches])
    policy = [TokenLogprobs(part, torch.zeros_like(part)) for part in parts]
    return losses.collect(policy, micro_batches, CONTEXT)


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
    with joined(tensor=2) as groups:
        generator = torch.Generator().manual_seed(0)
        vocab_size = COLUMNS * groups.tensor.size()
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


@contextlib.contextmanager
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


def _text(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
