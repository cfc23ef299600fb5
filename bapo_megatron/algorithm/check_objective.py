"""Checks an objective on a few tokens, at the start of a run and in your own tests.

A token's loss must depend on that token alone: one that mixes tokens, say by a mean or a sort,
would make results depend on micro-batches and ranks. The objective runs on a small batch, whole and
in shuffled parts, and must behave as it declares:

    check_objective(QuantileClip(share=0.02))

Shape legend: T = tokens of the trial.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from bapo_megatron.algorithm.loss import differentiate, with_sums
from bapo_megatron.algorithm.objective import Needs, Objective, Speculate, TokenBatch, hide_rest
from bapo_megatron.algorithm.user_code import UserCodeError, kind_of
from bapo_megatron.ops.logprob import importance_ratio

ColumnKinds = Mapping[str, tuple[type, int | None]]
"""NumPy's type of each token column, and K of one with K values per token."""

CPU = torch.device("cpu")
_TRIAL_TOKENS, _TRIAL_RESPONSES = 48, 6
_TOLERANCE = 1e-5
_NO_GRADIENT = (
    "returns a loss without a gradient; compute it from tokens.logprob, tokens.ratio or "
    "tokens.entropy, and do not detach it"
)


class ObjectiveError(UserCodeError):
    """An objective breaks a rule; the message says which, and what to do."""


def check_objective(
    objective: Objective, device: torch.device = CPU, columns: ColumnKinds | None = None
) -> None:
    """Refuse an objective whose results depend on which tokens share a batch.

    Args:
        objective: An instance, with its options.
        device: Device of the tokens.
        columns: What ``tokens.columns`` has, such as ``{"reference_logprob": (np.float32, None)}``.

    Raises:
        ObjectiveError: It breaks a rule; the first one is named. Its own errors pass through.
    """
    _check_declarations(objective)
    tokens, untouched = (trial_tokens(device, columns) for _ in range(2))
    if objective.needs != "token":
        _check_statistics(objective, tokens)
        tokens = with_sums(objective, tokens)
    whole = _values(objective, tokens)
    for name, value_T in whole.items():
        _require(
            torch.isfinite(value_T).all(),
            f"returns NaN or infinity as {name} for finite tokens; guard divisions, logarithms and "
            "exponentials",
        )
    for name, value in untouched.tensors().items():
        is_same = torch.equal(value, tokens.tensors()[name])
        _require(is_same, f"changes tokens.{name} in place; make a new tensor")
    gradients = [value for name, value in whole.items() if name.startswith("gradient")]
    _require(any(bool(value.any()) for value in gradients), _NO_GRADIENT)
    for index in _parts(device):
        part = _values(objective, tokens.select(index))
        same_names = part.keys() == whole.keys()
        _require(same_names, "reports different names for different tokens; always use the same")
        for name, value_T in part.items():
            _require(
                torch.allclose(value_T, whole[name][index], rtol=_TOLERANCE, atol=_TOLERANCE),
                f"mixes tokens: its {name} changes with the other tokens of the batch, so results "
                "would depend on micro-batches and ranks; use values of one token, and declare "
                "needs = 'response' or 'update' for sums over others",
            )
    if objective.trains_zero_advantage is False:
        _check_zero_advantage(objective, tokens)
    if tokens.decision is None:
        return
    values = objective.report_decision(tokens.decision.tolist()).values()
    are_numbers = all(isinstance(value, int | float) for value in values)
    _require(are_numbers, "reports a decision value that is not a number; return floats")
    objective.refuses(tokens.decision)
    objective.explain_refusal(tokens.decision.tolist())
    if objective.decisive is not None:
        objective.decide(objective.foresee(objective.statistics(tokens), None))
        hidden = replace(tokens, decision=hide_rest(tokens.decision, objective.decisive))
        _require(
            all(map(torch.equal, _values(objective, hidden).values(), whole.values())),
            f"declares decisive = {objective.decisive}, but changes with other entries of the "
            "decision; name all that loss, bounds and report read",
        )


def trial_tokens(device: torch.device = CPU, columns: ColumnKinds | None = None) -> TokenBatch:
    """Tokens of several responses, some masked, with ratios on both sides of usual bounds."""
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float, count: int = _TRIAL_TOKENS) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    response_T = torch.arange(_TRIAL_TOKENS) % _TRIAL_RESPONSES
    behaviour_T = uniform(-4.0, -0.1)
    mask_T = (torch.arange(_TRIAL_TOKENS) % 7 != 3).float()
    logprob_T = torch.where(mask_T > 0, behaviour_T + uniform(-0.8, 0.8), behaviour_T).clamp(max=0)
    entropy_T = uniform(0.0, 3.0) * mask_T
    tokens_B = torch.zeros(_TRIAL_RESPONSES).index_add_(0, response_T, mask_T)
    values: dict[str, Any] = {
        "logprob": logprob_T,
        "behaviour_logprob": behaviour_T,
        "rollout_logprob": behaviour_T + uniform(-0.01, 0.01),
        "advantage": uniform(-2.0, 2.0, _TRIAL_RESPONSES)[response_T] * mask_T,
        "reward": uniform(0.0, 1.0, _TRIAL_RESPONSES).round()[response_T],
        "mask": mask_T,
        "entropy": entropy_T,
        "collected_entropy": entropy_T.clone(),
        "response": response_T,
        "response_tokens": tokens_B[response_T],
    }
    values = {name: value.to(device) for name, value in values.items()}
    ratio_T = importance_ratio(values["logprob"], values["behaviour_logprob"])
    return TokenBatch(
        **values,
        ratio=ratio_T,
        response_sums=None,
        decision=None,
        update=0,
        columns={name: _trial_column(*kind).to(device) for name, kind in (columns or {}).items()},
    )


def _trial_column(dtype: type, width: int | None) -> Tensor:
    shape = (_TRIAL_TOKENS,) if width is None else (_TRIAL_TOKENS, width)
    number = np.arange(_TRIAL_TOKENS * (width or 1)).reshape(shape)
    if issubclass(dtype, np.integer):  # ids, each once per token
        return torch.from_numpy(number.astype(dtype))
    return torch.from_numpy((-0.1 - number * 7 % 40 / 10).astype(dtype))


def _parts(device: torch.device) -> tuple[Tensor, ...]:
    order = torch.randperm(_TRIAL_TOKENS, generator=torch.Generator().manual_seed(1))
    return order.to(device).tensor_split([1, _TRIAL_TOKENS // 2])


def _require(holds: Any, problem: str) -> None:
    if not holds:
        raise ObjectiveError(problem)


def _check_declarations(objective: Objective) -> None:
    needs = objective.needs
    has_statistics = type(objective).statistics is not Objective.statistics
    selects, decisive = objective.selects_tokens, objective.decisive is not None
    for name, kind in (("needs", Needs), ("speculate", Speculate)):
        value, choices = getattr(objective, name), get_args(kind)
        _require(value in choices, f"declares {name} = {value!r}; choose {', '.join(choices)}")
    _require(
        needs == "token" or has_statistics,
        f"declares needs = {needs!r}; write statistics(self, tokens)",
    )
    _require(
        not selects or needs in ("response", "update"),
        f"selects tokens with needs = {needs!r}; the denominators count the selected tokens before "
        "the first gradient, so declare needs = 'update'",
    )
    _require(
        not decisive or (needs == "update" and not selects),
        "declares decisive, which requires needs = 'update' and no selects_tokens; remove it",
    )


def _check_statistics(objective: Objective, tokens: TokenBatch) -> None:
    """Require statistics that ranks can sum and, of an update, a decision they can broadcast."""
    statistics = objective.statistics(tokens)
    if objective.needs == "response":
        _check_per_token("statistics", statistics, tokens)
        return
    _require(
        isinstance(statistics, Tensor) and statistics.dtype == torch.int64,
        f"returns {kind_of(statistics)} with needs = {objective.needs!r}; return an int64 tensor "
        "[K], since only sums of integers are the same on any ranks",
    )
    sums = [objective.statistics(tokens.select(index)) for index in _parts(statistics.device)]
    _require(
        torch.equal(statistics, torch.stack(sums).sum(0)),
        "mixes tokens: its statistics of parts do not add up to those of the whole; return sums of "
        "integers over tokens",
    )
    decision = objective.decide(statistics)
    _require(
        decision.dtype == torch.float64 and decision.dim() == 1,
        f"returns {kind_of(decision)} as decision; return float64 [D]",
    )


def _check_per_token(method: str, value_T: Any, tokens: TokenBatch) -> None:
    shape, device = tokens.logprob.shape, tokens.logprob.device
    _require(
        isinstance(value_T, Tensor) and value_T.shape == shape and value_T.device == device,
        f"returns {kind_of(value_T)} as {method} of {len(tokens)} tokens on {device}; return one "
        f"value per token, [{len(tokens)}], on their device",
    )


def _check_zero_advantage(objective: Objective, tokens: TokenBatch) -> None:
    """Require that A = 0 gives a token no loss, no gradient and no part in the statistics."""
    is_zero_T = tokens.response == 0
    tokens = replace(tokens, advantage=tokens.advantage.masked_fill(is_zero_T, 0.0))
    values = _values(objective, tokens)
    names = [name for name in values if name.startswith(("loss", "gradient"))]
    takes_part = any(bool(values[name][is_zero_T].any()) for name in names)
    if objective.needs in ("update", "micro_batch"):
        without_K = objective.statistics(tokens.select(~is_zero_T))
        takes_part |= not torch.equal(objective.statistics(tokens), without_K)
    _require(
        not takes_part,
        "declares trains_zero_advantage = False, but A = 0 gives tokens a loss, a gradient or a "
        "part in the statistics; remove the declaration, or set it to True if updates whose tokens "
        "all have A = 0 must train",
    )


def _values(objective: Objective, tokens: TokenBatch) -> dict[str, Tensor]:
    logprob_T, entropy_T = (t.detach().requires_grad_() for t in (tokens.logprob, tokens.entropy))
    ratio_T = importance_ratio(logprob_T, tokens.behaviour_logprob)
    leaves = replace(tokens, logprob=logprob_T, entropy=entropy_T, ratio=ratio_T)
    loss_T = objective.loss(leaves)
    _check_per_token("loss", loss_T, tokens)
    _require(loss_T.requires_grad, _NO_GRADIENT)
    gradient = differentiate(objective, tokens, tokens.mask / 4)
    values = {"loss": gradient.loss_T * tokens.mask, "gradient": gradient.logprob_T}
    if gradient.entropy_T is not None:
        values["gradient of the entropy"] = gradient.entropy_T
    for name, value_T in objective.report(tokens).items():
        _check_per_token("report", value_T, tokens)
        values[f"report of {name}"] = value_T.float() * tokens.mask
    if objective.needs == "response":
        values["statistics"] = objective.statistics(tokens)
    if objective.selects_tokens:
        selected_T = objective.select(tokens)
        _check_per_token("select", selected_T, tokens)
        _require(selected_T.dtype == torch.bool, "returns numbers from select; return bool [T]")
        values["select"] = selected_T.float()
    limits = objective.bounds(tokens)
    if limits is not None:
        values["bounds"] = tokens.ratio.clamp(*limits)
    return {name: value_T.detach() for name, value_T in values.items()}
