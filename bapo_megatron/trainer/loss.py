"""The loss of a micro-batch on the last pipeline stage, and the decision that it depends on.

A step calls ``LossStage.collect``, which decides, then ``loss``, from which the backward pass
starts. Below are the tokens as an objective sees them (``SafeTokens``). With compiled kernels
nothing here waits for the device.

Shape legend: N = packed tokens, V = local vocabulary columns, H = hidden size, T = response tokens,
B = samples of the step's batch, U = its updates, K = entries of a statistic, D = entries of a
decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bapo_megatron.algorithm.centering import Head, head_coefficients
from bapo_megatron.algorithm.kl import estimate_kl
from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.algorithm.loss import (
    SAFE_LOGPROB,
    differentiate,
    is_finite,
    limit_weights,
    response_sums,
    sum_over_responses,
    token_weights,
)
from bapo_megatron.algorithm.objective import Objective, TokenBatch
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.data.micro_batch import on_device
from bapo_megatron.data.token_columns import (
    COLUMNS,
    DEMONSTRATION,
    REFERENCE,
    SAMPLER_TOP_IDS,
    SAMPLER_TOP_LOGPROBS,
    TEACHER_HIDDEN,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
    scored,
)
from bapo_megatron.ops.chunked import (
    Direction,
    OutputHead,
    Teacher,
    TeacherRows,
    TopTokens,
    chunked_loss,
)
from bapo_megatron.ops.logprob import (
    LossGradient,
    TokenLogprobs,
    apply_token_loss,
    importance_ratio,
)
from bapo_megatron.policy.model import PolicyOutput
from bapo_megatron.runtime.distributed import ProcessGroups, reduce_over
from bapo_megatron.trainer.records import Numbers, TokenReport, TokenView
from bapo_megatron.trainer.split import ZeroAdvantage
from bapo_megatron.types import MicroBatch


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """What an update knows about its place in the run."""

    num_updates: int
    """Optimizer updates made before this one: the age of a token is this minus its version."""
    rollout_version: int | None
    """Version of the engines' weights while the policy still has them: log-probs of tokens of this
    version are compared with the trainer's. None once the weights have moved."""
    num_samples: int
    """B."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the loss pass of an update runs with: data, decision, and whether that is predicted."""

    micro_batches: tuple[MicroBatch, ...]
    """This rank's, with what the objective collected."""
    decision: Tensor | None = None
    """[D] float64, equal on all ranks of the last stage; None if the objective needs none."""
    total: Tensor | None = None
    """[K] int64, the statistics of all ranks behind the decision; None for sums over responses."""
    faults: Tensor | None = None
    """[2] int64, of the forward-only pass on this rank: trained tokens with non-finite values, and
    tokens with a non-finite statistic."""
    prediction: Tensor | None = None
    """[D] float64; its decisive entries are compared with the decision after the loss pass."""
    is_predicted: bool = False
    """Whether the loss pass runs with the prediction, and repeats if that is wrong."""
    is_trial: bool = False
    """Whether the statistics of the loss pass are compared with ``total``."""
    num_passes: int = 0
    """Forward-only passes made for it."""


class LossStage:
    """The objective of a run on the ranks that hold the model's output.

    Raises:
        UserCodeError: The objective cannot be used.
    """

    def __init__(
        self, config: AlgorithmConfig, output: PolicyOutput, groups: ProcessGroups
    ) -> None:
        self._config, self._output = config, output
        self._device, self.data_group = groups.device, groups.data
        self.loaded = load_objective(config, groups.device, scored(config))
        self.objective = self.loaded.objective
        self.decides_locally = self.objective.needs == "micro_batch"
        """Whether every micro-batch has its own decision."""
        self.zero_advantage = _zero_advantage(self.objective, config)
        """How responses with A = 0 are treated."""
        features = {
            "correct": config.correction.kind != "none",
            "reference": config.kl.is_used,
            "teacher": config.distillation.is_used,
            "centering": config.centering.is_used,
            "demonstration": config.demonstrations.coefficient > 0,
        }
        used = {name for name, on in features.items() if on}
        self.numbers = Numbers(self.loaded.report_names, used)
        self.teacher_head: OutputHead | None = None
        """Head of a teacher in the trainer, for the hidden states in the micro-batches; with a loss
        over the vocabulary, set before the first update."""

    def collect(
        self,
        policy: Sequence[TokenLogprobs],
        micro_batches: Sequence[MicroBatch],
        context: UpdateContext,
    ) -> LossInputs:
        """Collect what the objective must know about the tokens of all ranks.

        A collective over the data-parallel group: one integer all-reduce, another one if the
        objective selects tokens. ``policy`` has ℓ and H of each micro-batch.
        """
        objective = self.objective
        safe_of = self._safe_tokens(micro_batches, context)
        tokens = {i: safe.batch(*policy[i]) for i, safe in safe_of.items()}
        by_response = objective.needs == "response"
        faults = torch.zeros(2, dtype=torch.int64, device=self._device)
        if by_response:
            parts = []
            for batch in tokens.values():
                value_T = torch.where(batch.mask > 0, objective.statistics(batch), 0.0)
                finite_T = is_finite(value_T)
                faults[1] += (~finite_T).sum()
                parts.append((torch.where(finite_T, value_T, 0.0), batch.response))
            total = sum_over_responses(parts, context.num_samples, self._device)
        else:
            total = self._statistics(tokens.values())
        reduce_over(self.data_group, total)
        decision = None if by_response else objective.decide(total)
        results = list(micro_batches)
        for index, safe in safe_of.items():
            batch = tokens[index]
            faults[0] += (safe.trains_T & ~safe.finite(*policy[index])).sum()
            results[index] = replace(results[index], entropy_T=batch.entropy)
            if by_response:
                sum_T = response_sums(total, batch.response)
                results[index] = replace(results[index], response_sum_T=sum_T)
                tokens[index] = replace(batch, response_sums=sum_T.to(batch.logprob.dtype))
            else:
                tokens[index] = replace(batch, decision=decision)
        if objective.selects_tokens:
            self._select(results, tokens, context.num_samples)
        return LossInputs(tuple(results), decision, None if by_response else total, faults)

    def loss(
        self,
        output: Tensor,
        micro_batch: MicroBatch,
        *,
        decision: Tensor | None,
        context: UpdateContext,
        with_statistics: bool = False,
    ) -> tuple[Tensor, TokenReport]:
        """Return the loss of one micro-batch over the global denominators, and its report.

        ``output`` has logits [N, V], which their gradient overwrites, or hidden states [N, H];
        micro-batch and ``decision`` are those of ``collect``, if there was one. ``with_statistics``
        adds the tokens' statistics to the report.
        """
        reader, head = self._output, self._output.head
        policy = reader.differentiable(output, micro_batch) if head is None else None
        if self.decides_locally:
            # Over the micro-batches that all data-parallel ranks hold at this position. With
            # chunked logits this takes one more pass over them.
            current = reader.read(output, micro_batch) if policy is None else _detached(policy)
            decision = self.collect([current], [micro_batch], context).decision
        safe = SafeTokens(self._config, micro_batch, decision, context, self._device)
        token_loss = MicroBatchLoss(self.objective, safe)
        if policy is not None:
            loss = apply_token_loss(*policy, token_loss)
            policy = _detached(policy)
        else:
            head_TK = None
            if self._config.centering.is_used:
                head_TK = safe.micro_batch.columns[SAMPLER_TOP_IDS].long()
            chunks = reader.chunks(micro_batch, self._teacher(safe.micro_batch), head_TK)
            token_loss.is_whole_head = head_TK is not None and head_TK.shape[1] >= chunks.vocab_size
            loss, policy = chunked_loss(output, chunks, token_loss)
        sums, maxima = self.numbers.zeros(self._device)
        batches: list[TokenBatch] = []
        if len(policy.logprob_T):
            batches.append(token_loss.tokens or safe.batch(*policy))
            view = TokenView(token_loss, batches[0], policy)
            sums, maxima = self.numbers.measure(view, self.objective.report(batches[0]))
        if decision is None:
            decision = sums.new_zeros(0)
        statistics = self._statistics(batches) if with_statistics else None
        log_weights = ((t.logprob - t.behaviour_logprob, t.response) for t in batches)
        log_weight_B = sum_over_responses(log_weights, context.num_samples, self._device)
        return loss, TokenReport(sums, maxima, decision, policy, log_weight_B, statistics)

    def known_statistics(
        self, updates: Sequence[Sequence[MicroBatch]], context: UpdateContext
    ) -> Tensor:
        """Return the statistics of the tokens of each update at ℓ = μ, [U, K] int64.

        ``context`` is that of the first. A collective over the data-parallel group: one integer
        all-reduce.
        """
        totals = []
        for number, micro_batches in enumerate(updates):
            later = replace(context, num_updates=context.num_updates + number)
            safe_of = self._safe_tokens(micro_batches, later)
            totals.append(self._statistics(safe.as_sampled() for safe in safe_of.values()))
        known_UK = torch.stack(totals)
        reduce_over(self.data_group, known_UK)
        return known_UK

    def _teacher(self, micro_batch: MicroBatch) -> Teacher | None:
        """Return the teacher of the response tokens, if the loss compares distributions."""
        distillation = self._config.distillation
        if not distillation.is_over_vocabulary:
            return None
        columns = micro_batch.columns
        if distillation.loss == "top_k":
            return TopTokens(columns[TEACHER_TOP_IDS].long(), columns[TEACHER_TOP_LOGPROBS])
        assert self.teacher_head is not None, "scorers come first"
        direction: Direction = "forward" if distillation.loss == "forward_kl" else "reverse"
        return TeacherRows(columns[TEACHER_HIDDEN], self.teacher_head, direction)

    def _safe_tokens(
        self, micro_batches: Sequence[MicroBatch], context: UpdateContext
    ) -> dict[int, SafeTokens]:
        """Return the tokens of the micro-batches that have any, by index."""
        return {
            index: SafeTokens(self._config, micro_batch, None, context, self._device)
            for index, micro_batch in enumerate(micro_batches)
            if len(micro_batch.target_T)
        }

    def _statistics(self, tokens: Iterable[TokenBatch]) -> Tensor:
        """Return the statistics of this rank's tokens, [K] int64; 0 without tokens."""
        total_K = torch.zeros(self.loaded.statistic_size, dtype=torch.int64, device=self._device)
        for batch in tokens:
            total_K += self.objective.statistics(batch)
        return total_K

    def _select(
        self, results: list[MicroBatch], tokens: dict[int, TokenBatch], num_samples: int
    ) -> None:
        """Apply the objective's selection of tokens, and recompute the weights of those kept."""
        count_B = torch.zeros(num_samples, dtype=torch.int64, device=self._device)
        for index, batch in tokens.items():
            selected_T = self.objective.select(batch) & (batch.mask > 0)
            results[index] = replace(results[index], selected_T=selected_T)
            count_B.index_add_(0, batch.response, selected_T.to(torch.int64))
        reduce_over(self.data_group, count_B)
        kind, constant = self._config.loss_aggregation, self._config.token_sum_norm_constant
        for index, batch in tokens.items():
            kept_T = results[index].selected_T
            assert kept_T is not None
            tokens_T = count_B[batch.response]
            weight_T = token_weights(kept_T, tokens_T, kind, count_B, constant)
            results[index] = replace(results[index], loss_weight_T=weight_T)


class MicroBatchLoss:
    """A ``TokenLoss``: objective, weights and the terms beside it; keeps what is reported."""

    def __init__(self, objective: Objective, safe: SafeTokens) -> None:
        self.safe = safe
        self.weight_T = safe.micro_batch.loss_weight_T
        if safe.correction_T is not None:
            self.weight_T = self.weight_T * safe.correction_T
        self.kl_T: Tensor | None = None
        """[T] KL between teacher and policy, with a loss over the vocabulary."""
        self.head_T: Head | None = None
        """Of all tokens, with centering; its coefficients are [T, 1], their absolute sums."""
        self.is_whole_head = False
        """Whether the head is the whole vocabulary."""
        self.loss_T = torch.empty_like(self.weight_T)
        self.derivative_T = torch.empty_like(self.weight_T)
        self.finite_T = torch.empty_like(safe.trains_T)
        self.imitated = self.weight_T.new_zeros((), dtype=torch.float64)
        """Loss of demonstrations."""
        self.tokens: TokenBatch | None = None
        """All of them, if they came in one part."""
        self.objective = objective

    def __call__(
        self,
        logprob_T: Tensor,
        entropy_T: Tensor,
        part: slice,
        kl_T: Tensor | None = None,
        head_TK: Tensor | None = None,
    ) -> LossGradient:
        """See ``TokenLoss``."""
        tokens = self.safe.batch(logprob_T, entropy_T, part, has_ratio=False)
        counts_T = tokens.mask > 0
        weight_T = torch.where(counts_T, self.weight_T[part], 0.0)
        ratio_T, loss_T, by_logprob_T, by_entropy_T = differentiate(
            self.objective, tokens, weight_T
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
        config = self.safe.config
        # Terms added to the policy's loss have the weights of the aggregation only.
        plain_T = torch.where(counts_T, self.safe.micro_batch.loss_weight_T[part], 0.0)
        if config.entropy_coefficient != 0:
            bonus_T = plain_T * -config.entropy_coefficient
            loss = loss + (bonus_T * tokens.entropy).sum(dtype=torch.float64)
            by_entropy_T = bonus_T if by_entropy_T is None else by_entropy_T + bonus_T
        if config.kl.coefficient > 0 and config.kl.where == "loss":
            cost_T = plain_T * config.kl.coefficient
            kl = estimate_kl(config.kl.kind, tokens.logprob, tokens.columns[REFERENCE])
            loss = loss + (cost_T * kl.value_T).sum(dtype=torch.float64)
            by_logprob_T = by_logprob_T + cost_T * kl.by_logprob_T
        if (imitation_T := self.safe.micro_batch.columns.get(DEMONSTRATION)) is not None:
            imitated = -(imitation_T[part] * logprob_T).sum(dtype=torch.float64)
            self.imitated, loss = self.imitated + imitated, loss + imitated
            by_logprob_T = by_logprob_T - imitation_T[part]
        by_kl_T = None
        if kl_T is not None:
            by_kl_T = plain_T * config.distillation.coefficient
            kl_T = torch.where(counts_T, kl_T, 0.0)
            loss = loss + (by_kl_T * kl_T).sum(dtype=torch.float64)
            if self.kl_T is None:
                self.kl_T = torch.zeros_like(self.weight_T)
            self.kl_T[part] = kl_T
        by_head_TK = None
        if head_TK is not None:
            by_head_TK = self._center(tokens, weight_T, head_TK, part)
            terms_TK = torch.where(by_head_TK == 0, 0.0, by_head_TK * head_TK)
            loss = loss + terms_TK.sum(dtype=torch.float64)
        return LossGradient(loss, by_logprob_T, by_entropy_T, by_kl_T, by_head_TK)

    def _center(self, tokens: TokenBatch, weight_T: Tensor, head_TK: Tensor, part: slice) -> Tensor:
        """Return the derivatives of the centering term by the head's log-probs, [T, K]."""
        sampler_TK = tokens.columns[SAMPLER_TOP_LOGPROBS]
        head = head_coefficients(
            self.objective, tokens, head_TK, sampler_TK, is_whole=self.is_whole_head
        )
        summed = head._replace(coefficient_TK=head.coefficient_TK.abs().sum(dim=1, keepdim=True))
        if self.head_T is None:
            num_tokens = len(self.weight_T)
            self.head_T = Head(*(t.new_zeros(num_tokens, *t.shape[1:]) for t in summed))
        for kept, value in zip(self.head_T, summed, strict=True):
            kept[part] = value
        scale_T = (weight_T * tokens.advantage).double()
        by_head_TK = scale_T[:, None] * head.coefficient_TK
        return torch.where((scale_T != 0)[:, None], by_head_TK, 0.0).float()


class SafeTokens:
    """The tokens of a micro-batch for an objective: all values are finite, harmless where masked.

    What does not depend on ℓ and H is prepared once, on the device.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        micro_batch: MicroBatch,
        decision: Tensor | None,
        context: UpdateContext,
        device: torch.device,
    ) -> None:
        self.micro_batch = batch = on_device(micro_batch, device)
        self.config = config
        self.trains_T = batch.mask_T > 0
        self.correction_T: Tensor | None = None
        if config.correction.kind != "none":
            self.correction_T = limit_weights(batch.importance_T, config.correction)
        self.context = context
        columns = {n: batch.columns[n] for n in COLUMNS if n in batch.columns}
        self._finite_T = self.trains_T & is_finite(batch.behaviour_logprob_T + batch.advantage_T)
        if config.kl.coefficient > 0:
            self._finite_T &= is_finite(columns[REFERENCE])
            columns[REFERENCE] = torch.where(self._finite_T, columns[REFERENCE], SAFE_LOGPROB)
        behaviour_T = torch.where(self._finite_T, batch.behaviour_logprob_T, SAFE_LOGPROB)
        has_rollout_T = self._finite_T & is_finite(batch.rollout_logprob_T)
        self._fixed = TokenBatch(
            logprob=behaviour_T,
            behaviour_logprob=behaviour_T,
            rollout_logprob=torch.where(has_rollout_T, batch.rollout_logprob_T, behaviour_T),
            ratio=behaviour_T,
            advantage=batch.advantage_T,
            reward=batch.reward_T,
            mask=(self.trains_T if batch.selected_T is None else batch.selected_T).float(),
            entropy=behaviour_T,
            collected_entropy=behaviour_T if batch.entropy_T is None else batch.entropy_T,
            response=batch.sample_T,
            response_tokens=batch.response_tokens_T,
            response_sums=None if batch.response_sum_T is None else batch.response_sum_T.float(),
            decision=decision,
            update=context.num_updates,
            columns=columns,
        )

    def finite(self, logprob_T: Tensor, entropy_T: Tensor, part: slice = slice(None)) -> Tensor:
        """Return which tokens of ``part`` train and have only finite values, [T] bool."""
        return self._finite_T[part] & is_finite(logprob_T + entropy_T)

    def as_sampled(self) -> TokenBatch:
        """Return the tokens, [T], with ℓ = μ, r = 1 and H = 0."""
        behaviour_T = self._fixed.behaviour_logprob
        return self.batch(behaviour_T, torch.zeros_like(behaviour_T))

    def batch(
        self,
        logprob_T: Tensor,
        entropy_T: Tensor,
        part: slice = slice(None),
        *,
        has_ratio: bool = True,
    ) -> TokenBatch:
        """Return tokens with these ℓ and H, [T] each.

        Without ``has_ratio`` the caller computes the ratio.
        """
        is_whole = part.indices(len(logprob_T))[:2] == (0, len(self._fixed))
        fixed = self._fixed if is_whole else self._fixed.select(part)
        finite_T = self.finite(logprob_T, entropy_T, part)
        logprob_T = torch.where(finite_T, logprob_T, fixed.behaviour_logprob)
        entropy_T = torch.where(finite_T, entropy_T, 0.0)
        ratio_T = fixed.ratio
        if has_ratio:
            ratio_T = importance_ratio(logprob_T, fixed.behaviour_logprob)
        collected_T = entropy_T if self.micro_batch.entropy_T is None else fixed.collected_entropy
        return replace(
            fixed,
            logprob=logprob_T,
            ratio=ratio_T,
            advantage=torch.where(finite_T, fixed.advantage, 0.0),
            mask=fixed.mask * finite_T,
            entropy=entropy_T,
            collected_entropy=collected_T,
        )


def _zero_advantage(objective: Objective, config: AlgorithmConfig) -> ZeroAdvantage:
    # These give A = 0 a loss, or another advantage.
    has_terms = config.kl.coefficient > 0 or config.distillation.is_used
    if config.entropy_coefficient > 0 or has_terms or objective.trains_zero_advantage:
        return "trained"
    # A selection counts all its tokens in the denominators, and decisions of micro-batches depend
    # on which samples share one.
    needs_all = objective.selects_tokens or objective.needs == "micro_batch"
    return "computed" if needs_all or objective.trains_zero_advantage is None else "left_out"


def _detached(policy: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(policy.logprob_T.detach(), policy.entropy_T.detach())
