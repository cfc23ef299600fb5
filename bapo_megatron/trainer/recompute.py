"""Log-probs recomputed by the trainer: for μ, weights, checks of servers, held-out losses.

Shape legend: T = response tokens of a micro-batch, B = samples of the batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithm.loss import log_weights, response_sums, sum_over_responses
from bapo_megatron.config.schema import CorrectionConfig, OpsConfig
from bapo_megatron.data.micro_batch import on_device
from bapo_megatron.data.routes import BatchRoutes
from bapo_megatron.ops.logprob import LOG_RATIO_LIMIT
from bapo_megatron.policy.model import Model, PolicyOutput
from bapo_megatron.runtime.distributed import (
    broadcast_from_last_stage,
    fail_together,
    gather_objects,
    reduce_over,
)
from bapo_megatron.trainer.split import SplitShape
from bapo_megatron.types import (
    FinishReason,
    MicroBatch,
    PromptTokens,
    RolloutBatch,
    Sample,
    VersionSpan,
)


def with_recomputed_behaviour(
    micro_batches: Sequence[MicroBatch],
    logprobs: Sequence[Tensor],
    correction: CorrectionConfig,
    *,
    num_samples: int,
    data_group: dist.ProcessGroup,
) -> tuple[MicroBatch, ...]:
    """Replace μ by the trainer's log-probs and, with a correction, set importance weights.

    ``logprobs`` [T] are those of each micro-batch at the start of the step. With ``kind: sequence``
    and ``geometric`` it is a collective over data- and context-parallel ranks, which hold parts of
    the same responses.

    With a correction, a non-finite engine log-prob stays μ: the token has no weight, and is
    reported like any other with a non-finite μ.
    """
    if correction.kind == "none":
        return tuple(
            replace(micro_batch, behaviour_logprob_T=logprob_T)
            for micro_batch, logprob_T in zip(micro_batches, logprobs, strict=True)
        )
    recomputed, weights = [], []
    for micro_batch, logprob_T in zip(micro_batches, logprobs, strict=True):
        rollout_T = micro_batch.rollout_logprob_T.to(logprob_T.device)
        behaviour_T = torch.where(rollout_T.isfinite(), logprob_T, rollout_T)
        recomputed.append(replace(micro_batch, behaviour_logprob_T=behaviour_T))
        weights.append(log_weights(logprob_T, rollout_T, micro_batch.mask_T.to(logprob_T.device)))
    if correction.kind in ("sequence", "geometric"):
        device = weights[0].device
        samples = [micro_batch.sample_T.to(device) for micro_batch in micro_batches]
        sum_B = sum_over_responses(zip(weights, samples, strict=True), num_samples, device)
        reduce_over(data_group, sum_B)
        weights = [response_sums(sum_B, sample_T) for sample_T in samples]
        if correction.kind == "geometric":
            sizes = (batch.response_tokens_T.to(device).clamp(min=1) for batch in micro_batches)
            weights = [sum_T / size_T for sum_T, size_T in zip(weights, sizes, strict=True)]
        weights = [w_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).float() for w_T in weights]
    return tuple(
        replace(micro_batch, importance_T=log_weight_T.exp())
        for micro_batch, log_weight_T in zip(recomputed, weights, strict=True)
    )


def measure_mismatch(
    model: Model,
    output: PolicyOutput,
    shape: SplitShape,
    batch: RolloutBatch,
    routes: BatchRoutes | None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Compare log-probs with the engine's in a step without an update; return sums and maxima.

    A collective of all ranks: one forward-only pass over about a micro-batch per data-parallel
    rank, of responses with tokens of the model's weights. Without such responses nothing runs.
    """
    sequences, chosen, room = batch.sequences, [], shape.rules.budget * shape.rules.data_size
    for index, sequence in enumerate(sequences):
        if any(span.version == batch.version for span in sequence.versions):
            room -= shape.rules.slots(sequence.sequence_tokens)
            if room < 0:
                break
            chosen.append(index)
    if not chosen:
        return {}, {}
    nothing_B = np.zeros(len(batch.samples), dtype=np.float32)
    groups = model.groups
    with fail_together(groups, ValueError):
        _, micro_batches = shape.pack(sequences, chosen, nothing_B, nothing_B, routes=routes)
    values = torch.zeros(3, dtype=torch.float64, device=groups.device)
    scored = model.forward_only(micro_batches, output.read)
    # No log-probs on any stage but the last.
    for host_batch, (logprob_T, _) in zip(micro_batches, scored, strict=False):
        micro_batch = on_device(host_batch, groups.device)
        mismatch_T = (logprob_T - micro_batch.rollout_logprob_T).abs()
        counts_T = (micro_batch.version_T == batch.version) & mismatch_T.isfinite()
        mismatch_T = torch.where(counts_T, mismatch_T, 0.0)
        values[0] += counts_T.sum()
        values[1] += mismatch_T.sum(dtype=torch.float64)
        if len(mismatch_T):
            values[2] = torch.maximum(values[2], mismatch_T.max().double())
    if groups.is_last_stage:
        reduce_over(groups.data, values[:2])
        reduce_over(groups.data, values[2:], dist.ReduceOp.MAX)
    broadcast_from_last_stage(values, groups)
    count, total, largest = values.tolist()
    sums = {"mismatch_tokens": count, "mismatch_abs": total}
    return sums, {"mismatch/logprob_abs_max": largest}


def heldout_metrics(
    names: Sequence[str],
    batches: Iterable[RolloutBatch],
    model: Model,
    output: PolicyOutput,
    shape: SplitShape,
) -> dict[str, float]:
    """Return loss, Σ −ℓ / Σ 1 over the trained tokens, and perplexity of each set of ``names``.

    A collective of all ranks.
    """
    totals = torch.zeros(len(names), 2, dtype=torch.float64, device=model.groups.device)
    for batch in batches:
        set_B = torch.tensor([names.index(sample.prompt.source) for sample in batch.samples])
        nothing_B = np.zeros(len(set_B), dtype=np.float32)
        with fail_together(model.groups, ValueError):
            _, micro_batches = shape.pack(batch.samples, range(len(set_B)), nothing_B, nothing_B)
        scored = model.forward_only(micro_batches, output.read)
        # No log-probs on any stage but the last.
        for micro_batch, (logprob_T, _) in zip(micro_batches, scored, strict=False):
            set_T = set_B[micro_batch.sample_T].to(logprob_T.device)
            loss_T = -logprob_T.double()
            totals.index_add_(0, set_T, torch.stack([loss_T, torch.ones_like(loss_T)], dim=1))
    if model.groups.is_last_stage:
        reduce_over(model.groups.data, totals)
    broadcast_from_last_stage(totals, model.groups)
    values: dict[str, float] = {}
    for name, (total, count) in zip(names, totals.tolist(), strict=True):
        if count:  # all rows of a set may be left out
            values[f"heldout/{name}/loss"] = total / count
            values[f"heldout/{name}/perplexity"] = float(np.exp(total / count))
    return values


def score_probes(
    model: Model, ops: OpsConfig, shape: SplitShape, sequences: Sequence[Sequence[int]]
) -> tuple[tuple[float, ...], ...] | None:
    """Return the log-probs of all tokens of each sequence but the first, on rank 0.

    For ``weight_sync.verify``, with the current weights. A collective over all ranks; None on the
    others. Each sequence has two token ids or more; it is scored as a response to its first token.
    """
    output = PolicyOutput.of(model, ops, temperature=1.0)  # as engines score
    samples = [*map(_as_sample, sequences)]
    nothing_B = np.zeros(len(samples), dtype=np.float32)
    _, micro_batches = shape.pack(samples, range(len(samples)), nothing_B, nothing_B)
    scored = model.forward_only(micro_batches, output.read)
    local = [
        (mb.sample_T.numpy(), mb.position_T.numpy(), logprob_T.cpu().numpy())
        # No log-probs on any stage but the last.
        for mb, (logprob_T, _) in zip(micro_batches, scored, strict=False)
    ]
    gathered = gather_objects(local, model.groups)
    if gathered is None:
        return None
    logprobs = [np.full(len(token_ids) - 1, np.nan) for token_ids in sequences]
    for sample_T, position_T, logprob_T in (part for parts in gathered for part in parts):
        for number in np.unique(sample_T):
            in_sample_T = sample_T == number
            logprobs[number][position_T[in_sample_T]] = logprob_T[in_sample_T]
    return tuple(tuple(row.tolist()) for row in logprobs)


def _as_sample(token_ids: Sequence[int]) -> Sample:
    response_ids = np.array(token_ids[1:], dtype=np.int32)
    return Sample(
        group_id=0,
        index=0,
        prompt=PromptTokens("probe", np.array(token_ids[:1], dtype=np.int32)),
        response_token_ids=response_ids,
        behaviour_logprobs=np.zeros(len(response_ids), dtype=np.float32),
        versions=(VersionSpan(0, len(response_ids)),),
        finish_reason=FinishReason.STOP,
    )
