"""What the last pipeline stage does with the model's output for a micro-batch.

The output is logits [N, V] or hidden states [N, H] (``output``). With compiled kernels nothing here
waits for the device.

Shape legend: N = packed tokens, V = local vocabulary columns, H = hidden size, T = response tokens,
C = response tokens of a chunk, B = samples of the step's batch, U = its updates, K = entries of a
statistic, D = entries of a decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.algorithm.loss import token_weights
from bapo_megatron.algorithm.objective import (
    Objective,
    TokenBatch,
    add_over_responses,
    differentiate,
    is_finite,
    response_sums,
)
from bapo_megatron.algorithm.prediction import Predictor
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.ops.backend import Kernels
from bapo_megatron.ops.chunked import chunked_loss
from bapo_megatron.ops.logprob import LossGradient, TokenLogprobs, apply_token_loss
from bapo_megatron.runtime.distributed import ProcessGroups, reduce_over
from bapo_megatron.trainer.output import PolicyOutput
from bapo_megatron.trainer.records import Numbers, TokenReport, TokenView
from bapo_megatron.trainer.safe_tokens import SafeTokens, UpdateContext
from bapo_megatron.trainer.split import ZeroAdvantage
from bapo_megatron.types import MicroBatch

NUM_COUNTED = 4
"""Faults that ``LossStage.add_up`` counts."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What an objective knows of a whole update before its first gradient."""

    micro_batches: tuple[MicroBatch, ...]
    """This rank's, with what the objective asked for."""
    decision: Tensor | None = None
    """[D] float64, equal on all ranks."""
    total: Tensor | None = None
    """[K] int64, the statistics of all ranks; equal on them. Not those of responses."""
    faults: Tensor | None = None
    """[2] int64: tokens of this rank that train and whose collected values are not finite; and
    those to which the objective gave a statistic that is not."""


class LossStage:
    """The objective of a run on the ranks that hold the model's output."""

    def __init__(
        self, config: AlgorithmConfig, output: PolicyOutput, groups: ProcessGroups
    ) -> None:
        """Load the objective and try it.

        Raises:
            UserCodeError: The objective cannot be used.
        """
        self._config = config
        self._output = output
        self._device = groups.device
        self._data_group = groups.data
        loaded = load_objective(config, groups.device, output.kernels)
        self.objective = loaded.objective
        self.zero_advantage = _zero_advantage(loaded.objective, config)
        """What becomes of responses with A = 0."""
        self.collects = loaded.collects
        """Whether the objective must see the whole update before the first gradient."""
        self.decision_size = loaded.decision_size
        """D."""
        self.numbers = Numbers(loaded.report_names, corrects=config.correction.kind != "none")
        self._statistic_size = loaded.statistic_size
        self.predictor: Predictor | None = None
        """Predicts decisions; None where they are not predicted."""
        if self.collects and loaded.objective.decisive is not None:
            self.predictor = Predictor(loaded.objective)

    def known_statistics(
        self, updates: Sequence[Sequence[MicroBatch]], context: UpdateContext
    ) -> Tensor:
        """Return the statistics that the tokens of each update have with ℓ = μ, [U, K] int64.

        ``context`` is that of the first. A collective over the data-parallel group: one integer
        all-reduce.
        """
        totals = []
        for number, micro_batches in enumerate(updates):
            own = replace(context, num_updates=context.num_updates + number)
            held = self._held(micro_batches, own)
            totals.append(self._total(safe.as_sampled() for _, safe in held))
        known_UK = torch.stack(totals)
        reduce_over(self._data_group, known_UK)
        return known_UK

    def add_up(
        self, reports: Sequence[TokenReport], collection_faults: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return statistics [K] and faults [4] of a loss pass, summed over all ranks, int64.

        Faults are tokens, then losses, of the loss pass that are not finite, and those of the
        collection pass (``Collected.faults``), if there was one. Without ``adds_up`` K is 0. A
        collective over the data-parallel group: one integer all-reduce.
        """
        found = torch.stack([report.sums[self.numbers.faults] for report in reports]).sum(dim=0)
        parts = [found.to(torch.int64), torch.zeros_like(found, dtype=torch.int64)]
        if collection_faults is not None:
            parts[1] = collection_faults
        statistics = [r.statistics for r in reports if r.statistics is not None]
        assert len(statistics) in (0, len(reports)), "the loss pass was asked for them, or not"
        parts += [torch.stack(statistics).sum(dim=0)] if statistics else []
        added = torch.cat(parts)
        reduce_over(self._data_group, added)
        return added[NUM_COUNTED:], added[:NUM_COUNTED]

    def collect(
        self,
        policy: Sequence[TokenLogprobs],
        micro_batches: Sequence[MicroBatch],
        context: UpdateContext,
        *,
        num_samples: int,
    ) -> Collected:
        """Form what the objective must know of these tokens of this rank and of all others.

        A collective over the data-parallel group: one integer all-reduce, another one where the
        objective selects tokens. ``policy`` has ℓ and H of each micro-batch; ``num_samples`` is B.
        """
        objective, kernels = self.objective, self._output.kernels
        held = self._held(micro_batches, context)
        tokens = {index: safe.batch(*policy[index], kernels=kernels) for index, safe in held}
        by_response = objective.needs == "response"
        faults = torch.zeros(2, dtype=torch.int64, device=self._device)
        if by_response:
            total = torch.zeros(num_samples, dtype=torch.int64, device=self._device)
            for batch in tokens.values():
                value_T = torch.where(batch.mask > 0, objective.statistics(batch), 0.0)
                finite_T = is_finite(value_T)
                faults[1] += (~finite_T).sum()
                add_over_responses(total, torch.where(finite_T, value_T, 0.0), batch.response)
        else:
            total = self._total(tokens.values())
        reduce_over(self._data_group, total)
        decision = None if by_response else objective.decide(total)
        known = list(micro_batches)
        for index, safe in held:
            batch = tokens[index]
            faults[0] += (safe.trains_T & ~safe.finite(*policy[index])).sum()
            known[index] = replace(known[index], entropy_T=batch.entropy)
            if by_response:
                sum_T = response_sums(total, batch.response)
                known[index] = replace(known[index], response_sum_T=sum_T)
                tokens[index] = replace(batch, response_sums=sum_T.to(batch.logprob.dtype))
            else:
                tokens[index] = replace(batch, decision=decision)
        if objective.selects_tokens:
            self._select(known, tokens, num_samples)
        return Collected(tuple(known), decision, None if by_response else total, faults)

    def loss(
        self,
        output: Tensor,
        micro_batch: MicroBatch,
        *,
        decision: Tensor | None,
        context: UpdateContext,
        adds_up: bool = False,
    ) -> tuple[Tensor, TokenReport]:
        """Return the loss of one micro-batch over the global denominators, and its report.

        ``output`` has logits [N, V], which their gradient overwrites, or hidden states; micro-batch
        and ``decision`` are those that ``collect`` made, if it did. With ``adds_up`` the report has
        the statistics for ``add_up``.
        """
        made, head = self._output, self._output.head
        policy = made.differentiable(output, micro_batch) if head is None else None
        if self.objective.needs == "micro_batch":
            # Over the micro-batches that all data-parallel ranks hold at this position. With
            # chunks it takes one more pass over them.
            current = made.read(output, micro_batch) if policy is None else _detached(policy)
            decision = self.collect([current], [micro_batch], context, num_samples=0).decision
        safe = SafeTokens(self._config, micro_batch, decision, context, self._device)
        token_loss = _MicroBatchLoss(self.objective, safe, made.kernels)
        if policy is not None:
            loss = apply_token_loss(*policy, token_loss)
            policy = _detached(policy)
        else:
            assert head is not None
            loss, policy = chunked_loss(
                output,
                head,
                micro_batch.target_T,
                rows_T=micro_batch.rows_T,
                vocab_size=made.vocab_size,
                temperature=made.temperature,
                token_loss=token_loss,
                chunk_tokens=made.ops.logits_chunk_tokens,
                kernels=made.kernels,
            )
        tokens = None
        if len(policy.logprob_T):
            tokens = token_loss.tokens or safe.batch(*policy, kernels=made.kernels)
        sums, maxima = self._measure(token_loss, tokens, policy)
        if decision is None:
            decision = torch.zeros(0, dtype=torch.float64, device=self._device)
        statistics = self._total([] if tokens is None else [tokens]) if adds_up else None
        return loss, TokenReport(sums, maxima, decision, policy, statistics)

    def _held(
        self, micro_batches: Sequence[MicroBatch], context: UpdateContext
    ) -> list[tuple[int, SafeTokens]]:
        """Return the micro-batches with tokens, and their indices; there may be none."""
        return [
            (index, SafeTokens(self._config, micro_batch, None, context, self._device))
            for index, micro_batch in enumerate(micro_batches)
            if micro_batch.num_response_tokens
        ]

    def _total(self, tokens: Iterable[TokenBatch]) -> Tensor:
        """Return the statistics of this rank's tokens, [K] int64; a rank without any has zeros."""
        total_K = torch.zeros(self._statistic_size, dtype=torch.int64, device=self._device)
        for batch in tokens:
            total_K += self.objective.statistics(batch)
        return total_K

    def _select(
        self, known: list[MicroBatch], tokens: dict[int, TokenBatch], num_samples: int
    ) -> None:
        """Let the objective leave tokens out, and count the denominators of those that stay."""
        count_B = torch.zeros(num_samples, dtype=torch.int64, device=self._device)
        for index, batch in tokens.items():
            selected_T = self.objective.select(batch) & (batch.mask > 0)
            known[index] = replace(known[index], selected_T=selected_T)
            count_B.index_add_(0, batch.response, selected_T.to(torch.int64))
        reduce_over(self._data_group, count_B)
        kind, constant = self._config.loss_aggregation, self._config.token_sum_norm_constant
        for index, batch in tokens.items():
            kept_T = known[index].selected_T
            assert kept_T is not None
            tokens_T = count_B[batch.response]
            weight_T = token_weights(kept_T, tokens_T, kind, count_B, constant)
            known[index] = replace(known[index], loss_weight_T=weight_T)

    def _measure(
        self, token_loss: _MicroBatchLoss, tokens: TokenBatch | None, policy: TokenLogprobs
    ) -> tuple[Tensor, Tensor]:
        """Sums and maxima over the tokens with mask 1, None where there is no token."""
        safe = token_loss.safe
        if tokens is None:
            return self.numbers.zeros(self._device)
        own, context, correction = safe.micro_batch, safe.context, self._config.correction
        mismatch_T = (policy.logprob_T - own.rollout_logprob_T).abs_()
        if context.rollout_version is None:
            same_weights_T = torch.zeros_like(safe.trains_T)
        else:
            same_weights_T = (own.version_T == context.rollout_version) & safe.trains_T
        positive_T, negative_T = tokens.advantage > 0, tokens.advantage < 0
        held_T = tokens.ratio
        if (limits := self.objective.bounds(tokens)) is not None:
            low, high = limits
            held_T = torch.where(negative_T, held_T.clamp(min=low), held_T.clamp(max=high))
        kept_T = tokens.mask > 0
        is_selection = own.selected_T is not None
        counts_T = kept_T & (token_loss.weight_T != 0)
        view = TokenView(
            tokens=tokens,
            trains_T=safe.trains_T,
            finite_T=safe.finite(*policy) if is_selection else kept_T,
            counts_T=counts_T,
            loss_T=token_loss.loss_T,
            weight_T=token_loss.weight_T,
            derivative_T=token_loss.derivative_T,
            finite_loss_T=token_loss.finite_T,
            contribution_T=tokens.advantage.abs() * held_T,
            age_T=(context.num_updates - own.version_T).float(),
            mismatch_T=torch.where(same_weights_T, mismatch_T, 0.0),
            same_weights_T=same_weights_T,
            positive_T=positive_T & counts_T,
            negative_T=negative_T & counts_T,
            correction_T=safe.correction_T,
            importance_T=own.importance_T,
            cap=correction.cap if correction.kind in ("token", "sequence") else math.inf,
        )
        return self.numbers.measure(view, self.objective.report(tokens))


class _MicroBatchLoss:
    """A ``TokenLoss``: objective, weights and entropy bonus; keeps what is reported."""

    def __init__(self, objective: Objective, safe: SafeTokens, kernels: Kernels) -> None:
        self.safe = safe
        self.weight_T = safe.micro_batch.loss_weight_T
        if safe.correction_T is not None:
            self.weight_T = self.weight_T * safe.correction_T
        self.loss_T = torch.empty_like(self.weight_T)
        self.derivative_T = torch.empty_like(self.weight_T)
        self.finite_T = torch.empty_like(safe.trains_T)
        self.tokens: TokenBatch | None = None
        """All of them, where they came in one part."""
        self._objective = objective
        self._kernels = kernels

    def __call__(self, logprob_T: Tensor, entropy_T: Tensor, part: slice) -> LossGradient:
        tokens = self.safe.batch(logprob_T, entropy_T, part, kernels=None)
        counts_T = tokens.mask > 0
        weight_T = torch.where(counts_T, self.weight_T[part], 0.0)
        ratio_T, loss_T, by_logprob_T, by_entropy_T = differentiate(
            self._objective, tokens, weight_T, self._kernels
        )
        finite_T = is_finite(loss_T) & is_finite(by_logprob_T)
        if by_entropy_T is not None:
            finite_T &= is_finite(by_entropy_T)
        if len(tokens) == len(self.weight_T):
            self.tokens = replace(tokens, ratio=ratio_T)
            self.loss_T, self.derivative_T, self.finite_T = loss_T, by_logprob_T, finite_T
        else:
            self.loss_T[part], self.derivative_T[part] = loss_T, by_logprob_T
            self.finite_T[part] = finite_T
        loss = (weight_T * loss_T).sum(dtype=torch.float64)
        coefficient = self.safe.entropy_coefficient
        if coefficient != 0:
            bonus_T = torch.where(counts_T, self.safe.micro_batch.loss_weight_T[part], 0.0)
            bonus_T = bonus_T * -coefficient
            loss = loss + (bonus_T * tokens.entropy).sum(dtype=torch.float64)
            by_entropy_T = bonus_T if by_entropy_T is None else by_entropy_T + bonus_T
        return LossGradient(loss, by_logprob_T, by_entropy_T)


def _zero_advantage(objective: Objective, config: AlgorithmConfig) -> ZeroAdvantage:
    """Return what becomes of responses with A = 0."""
    if config.entropy_coefficient > 0 or objective.trains_zero_advantage:
        return "trained"
    # The denominators of a selection count its tokens wherever they are, and decisions of
    # micro-batches depend on which samples share one.
    needs_all = objective.selects_tokens or objective.needs == "micro_batch"
    return "computed" if needs_all or objective.trains_zero_advantage is None else "left_out"


def _detached(policy: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(policy.logprob_T.detach(), policy.entropy_T.detach())
