"""The objective that ``algorithm.objective`` names, tried on a few tokens before it is used.

A user's function must give each token its loss from that token alone. One that secretly mixes
tokens, by a mean or a sort, say, would make results depend on micro-batches and ranks. So it is run
on a small batch whole, permuted and split, and refused where the results differ.

Shape legend: T = tokens of the trial.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from bapo_megatron.algorithm.built_in import BUILT_IN
from bapo_megatron.algorithm.histograms import HighEntropy
from bapo_megatron.algorithm.objective import (
    Needs,
    Objective,
    TokenBatch,
    differentiate,
    with_sums,
)
from bapo_megatron.algorithm.prediction import hide_rest
from bapo_megatron.algorithm.user_code import UserCode
from bapo_megatron.config.objectives import Speculate
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.ops.backend import Kernels, select_kernels
from bapo_megatron.ops.ratio import importance_ratio

CPU = torch.device("cpu")
_TRIAL_TOKENS, _TRIAL_RESPONSES = 48, 6
_TOLERANCE = 1e-5
_NO_GRADIENT = (
    "returns a loss without a gradient; compute it from tokens.logprob, tokens.ratio or "
    "tokens.entropy, and do not detach it"
)


@dataclass(frozen=True, slots=True)
class LoadedObjective:
    """An objective, and the sizes of what it returns; equal on all ranks."""

    objective: Objective
    report_names: tuple[str, ...]
    """Keys of ``report``."""
    statistic_size: int
    """K of ``needs: update`` and ``micro_batch``, else 0."""
    decision_size: int
    """D of ``needs: update`` and ``micro_batch``, else 0."""

    @property
    def collects(self) -> bool:
        """Whether it must see the whole update before the first gradient."""
        return self.objective.needs in ("response", "update")


def load_objective(
    config: AlgorithmConfig, device: torch.device = CPU, kernels: Kernels | None = None
) -> LoadedObjective:
    """Make the objective and try it.

    Args:
        config: The algorithm section.
        device: Where tokens will be.
        kernels: None: the best for the device.

    Raises:
        UserCodeError: The user's code cannot be imported, raises, or returns what cannot be used.
    """
    kernels = kernels or select_kernels("auto", device)
    objective: Objective
    if config.objective in BUILT_IN:
        objective = BUILT_IN[config.objective](config, kernels)
    else:
        code = UserCode("algorithm.objective", config.objective)
        objective = _UserObjective(code, config.objective_options)
        tokens = with_sums(objective, trial_tokens(device))
        _try(objective, tokens, kernels)
        if tokens.decision is not None:
            objective.report_decision(tokens.decision.tolist())
            objective.refuses(tokens.decision)
            objective.explain_refusal(tokens.decision.tolist())
        if objective.decisive is not None:
            _try_decisive(objective, tokens, kernels)
    if config.entropy_share < 1:
        objective = HighEntropy(objective, config.entropy_share)
    tokens = with_sums(objective, trial_tokens(device))
    by_update = tokens.decision is not None
    return LoadedObjective(
        objective,
        report_names=tuple(objective.report(tokens)),
        statistic_size=objective.statistics(tokens).numel() if by_update else 0,
        decision_size=0 if tokens.decision is None else tokens.decision.numel(),
    )


class _UserObjective(Objective):
    """A user's objective whose results are checked; errors name the user's file and line."""

    def __init__(self, code: UserCode, options: Mapping[str, Any]) -> None:
        """Make an instance of the named class, or wrap the named function."""
        self._code = code
        self._report_names: tuple[str, ...] | None = None
        named = code.object
        self._is_class = inspect.isclass(named)
        if self._is_class:
            if not callable(getattr(named, "loss", None)):
                code.refuse("is a class without a method 'loss'; write loss(self, tokens)")
            with code.guard():
                # A class that is no subclass of Objective gets the defaults as well.
                self._inner: Any = type(named.__name__, (named, Objective), {})(**options)
        elif callable(named):
            loss = staticmethod(functools.partial(named, **options))
            self._inner = type("Function", (Objective,), {"loss": loss})()
        else:
            code.refuse(f"is a {type(named).__name__}; name a function or a class")
        self.needs = self._inner.needs
        self.trains_zero_advantage = self._inner.trains_zero_advantage
        self.selects_tokens = bool(self._inner.selects_tokens)
        self.decisive = self._inner.decisive
        self.speculate = self._inner.speculate
        if self.needs not in get_args(Needs):
            code.refuse(f"declares needs = {self.needs!r}; choose {', '.join(get_args(Needs))}")
        if self.needs != "token" and type(self._inner).statistics is Objective.statistics:
            code.refuse(f"declares needs = {self.needs!r}; write statistics(self, tokens)")
        if self.selects_tokens and self.needs not in ("response", "update"):
            code.refuse(
                f"selects tokens with needs = {self.needs!r}; the denominators count the selected "
                "tokens before the first gradient, so declare needs = 'update'"
            )
        if self.speculate not in get_args(Speculate):
            choices = ", ".join(get_args(Speculate))
            code.refuse(f"declares speculate = {self.speculate!r}; choose {choices}")
        if not isinstance(self.decisive, slice | None):
            code.refuse(f"declares decisive = {self.decisive!r}; declare a slice of the decision")
        if self.decisive is not None and (self.needs != "update" or self.selects_tokens):
            code.refuse(
                f"declares decisive with needs = {self.needs!r}"
                f"{' and selects tokens' if self.selects_tokens else ''}; decisions of whole "
                "updates that select no tokens are predicted, so remove the declaration"
            )

    def loss(self, tokens: TokenBatch) -> Tensor:
        loss_T = self._per_token("loss", tokens)
        if torch.is_grad_enabled() and not loss_T.requires_grad:
            self.refuse("loss", _NO_GRADIENT)
        return loss_T

    def statistics(self, tokens: TokenBatch) -> Tensor:
        if self.needs == "response":
            return self._per_token("statistics", tokens)
        total_K: Any = self._call("statistics", tokens)
        if not isinstance(total_K, Tensor) or total_K.dtype != torch.int64:
            self.refuse(
                "statistics",
                f"returns {_kind(total_K)} as statistics with needs = {self.needs!r}; return an "
                "int64 tensor [K], since only integers add up to the same on any ranks",
            )
        return total_K

    def decide(self, total_K: Tensor) -> Tensor:
        decision: Any = self._call("decide", total_K)
        is_tensor = isinstance(decision, Tensor)
        if not is_tensor or decision.dtype != torch.float64 or decision.dim() != 1:
            self.refuse("decide", f"returns {_kind(decision)} as decision; return float64 [D]")
        return decision  # type: ignore[no-any-return]

    def foresee(self, known_K: Tensor, recent_K: Tensor | None) -> Tensor:
        with self._code.guard():
            total_K: Any = self._inner.foresee(known_K, recent_K)
        is_tensor = isinstance(total_K, Tensor)
        if not is_tensor or total_K.dtype != torch.int64 or total_K.shape != known_K.shape:
            self.refuse("foresee", f"foresees {_kind(total_K)}; return int64 [{len(known_K)}]")
        return total_K  # type: ignore[no-any-return]

    def select(self, tokens: TokenBatch) -> Tensor:
        selected_T = self._per_token("select", tokens)
        if selected_T.dtype != torch.bool:
            self.refuse("select", f"selects by {_kind(selected_T)}; return bool [T]")
        return selected_T

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor] | None:
        limits: Any = self._call("bounds", tokens)
        if limits is None:
            return None
        if not isinstance(limits, tuple) or [type(limit) for limit in limits] != [Tensor] * 2:
            self.refuse("bounds", "returns no pair of tensors; return (low, high) or None")
        return limits[0], limits[1]

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        with self._code.guard():
            values = dict(self._inner.report(tokens))
        if self._report_names is None:
            self._report_names = tuple(values)
        names = self._report_names
        if set(values) != set(names):
            self.refuse(
                "report",
                f"reports {', '.join(values) or 'nothing'}, but {', '.join(names) or 'nothing'} "
                "before; report the same names of all tokens",
            )
        for name, value_T in values.items():
            self._check("report", f"report['{name}']", value_T, tokens)
        return values

    def guarded(self) -> AbstractContextManager[None]:
        return self._code.guard()

    def report_decision(self, decision: Sequence[float]) -> Mapping[str, float]:
        with self._code.guard():
            return {k: float(v) for k, v in self._inner.report_decision(decision).items()}

    def refuses(self, decision: Tensor) -> Tensor | None:
        return self._call("refuses", decision)  # type: ignore[no-any-return]

    def explain_refusal(self, decision: Sequence[float]) -> str:
        return str(self._call("explain_refusal", decision))

    def refuse(self, method: str, problem: str) -> NoReturn:
        """Raise for what ``method`` returned."""
        self._code.refuse(problem, getattr(self._inner, method) if self._is_class else None)

    def _call(self, method: str, argument: Any) -> Any:
        with self._code.guard():
            return getattr(self._inner, method)(argument)

    def _per_token(self, method: str, tokens: TokenBatch) -> Tensor:
        value_T: Tensor = self._call(method, tokens)
        self._check(method, method, value_T, tokens)
        return value_T

    def _check(self, method: str, what: str, value_T: Any, tokens: TokenBatch) -> None:
        if not isinstance(value_T, Tensor) or value_T.shape != tokens.logprob.shape:
            self.refuse(
                method,
                f"returns {_kind(value_T)} as {what} of {len(tokens)} tokens; return one value "
                f"per token, [{len(tokens)}]",
            )
        if value_T.device != tokens.logprob.device:
            self.refuse(
                method,
                f"returns a tensor on {value_T.device} as {what}, but the tokens are on "
                f"{tokens.logprob.device}; make new tensors from theirs",
            )


def trial_tokens(device: torch.device) -> TokenBatch:
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
    values = {
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
    moved = {name: value.to(device) for name, value in values.items()}
    ratio_T = importance_ratio(moved["logprob"], moved["behaviour_logprob"])
    return TokenBatch(**moved, ratio=ratio_T, response_sums=None, decision=None, update=0)


def _try(objective: _UserObjective, tokens: TokenBatch, kernels: Kernels) -> None:
    """Refuse an objective whose results depend on which tokens come together."""
    kept = {name: value.clone() for name, value in tokens.tensors().items()}
    whole = _run(objective, tokens, kernels)
    for name, value in tokens.tensors().items():
        if not torch.equal(value, kept[name]):
            objective.refuse("loss", f"changes tokens.{name} in place; make a new tensor")
    if not bool(whole["gradient"].any()) and "gradient of the entropy" not in whole:
        objective.refuse("loss", _NO_GRADIENT)
    count, generator = len(tokens), torch.Generator().manual_seed(1)
    order = torch.randperm(count, generator=generator).to(tokens.logprob.device)
    permuted = _run(objective, tokens.select(order), kernels)
    parts = [tokens.select(slice(*ends)) for ends in ((0, 1), (1, count // 2), (count // 2, count))]
    split = [_run(objective, part, kernels) for part in parts]
    for name, value_T in whole.items():
        others = {
            "permuted": (permuted[name], value_T[order]),
            "split": (torch.cat([part[name] for part in split]), value_T),
        }
        for how, (found_T, wanted_T) in others.items():
            if not torch.allclose(found_T, wanted_T, rtol=_TOLERANCE, atol=_TOLERANCE):
                method = name.partition("[")[0]
                objective.refuse(
                    method if method in ("report", "statistics", "select", "bounds") else "loss",
                    f"mixes tokens: its {name} changes where the same tokens are {how}, so results "
                    "would depend on micro-batches and ranks; use values of the token alone, and "
                    "declare needs = 'response' or 'update' for sums over others",
                )
    if objective.needs in ("update", "micro_batch"):
        total_K = sum(objective.statistics(part) for part in parts)
        if not torch.equal(objective.statistics(tokens), torch.as_tensor(total_K)):
            objective.refuse(
                "statistics",
                "mixes tokens: its statistics of parts do not add up to those of the whole; "
                "return sums of integers over tokens",
            )
    if objective.trains_zero_advantage is False:
        _try_zero_advantage(objective, tokens, kernels)


def _try_zero_advantage(objective: _UserObjective, tokens: TokenBatch, kernels: Kernels) -> None:
    """Refuse an objective that A = 0 gives something although it declares that it does not."""
    is_zero_T = tokens.response == 0
    tokens = replace(tokens, advantage=torch.where(is_zero_T, 0.0, tokens.advantage))
    found = _run(objective, tokens, kernels)
    names = ("loss", "gradient", "gradient of the entropy")
    given = [name for name in names if name in found and bool(found[name][is_zero_T].any())]
    if objective.needs in ("update", "micro_batch"):
        total_K = objective.statistics(tokens.select(~is_zero_T))
        if not torch.equal(objective.statistics(tokens), total_K):
            given.append("part in the statistics")
    if given:
        objective.refuse(
            "loss",
            f"declares trains_zero_advantage = False, but A = 0 gives tokens a {given[0]}; remove "
            "the declaration, or set it to True where updates with A = 0 everywhere must train",
        )


def _try_decisive(objective: _UserObjective, tokens: TokenBatch, kernels: Kernels) -> None:
    """Refuse an objective that reads more of a decision than it declares."""
    assert tokens.decision is not None
    assert objective.decisive is not None
    objective.foresee(objective.statistics(tokens), None)
    hidden = hide_rest(tokens.decision, objective.decisive)
    found = _values(objective, replace(tokens, decision=hidden), kernels)
    for name, value_T in _values(objective, tokens, kernels).items():
        if not torch.equal(found[name], value_T):
            objective.refuse(
                "loss",
                f"declares decisive = {objective.decisive}, but its {name} changes with other "
                "entries of the decision; name all that loss, bounds and report read",
            )


def _run(objective: _UserObjective, tokens: TokenBatch, kernels: Kernels) -> dict[str, Tensor]:
    """``_values``, all of them finite."""
    found = _values(objective, tokens, kernels)
    for name, value_T in found.items():
        if not bool(torch.isfinite(value_T).all()):
            objective.refuse(
                "loss",
                f"returns NaN or infinity as {name} for finite tokens; guard divisions, logarithms "
                "and exponentials",
            )
    return found


def _values(objective: _UserObjective, tokens: TokenBatch, kernels: Kernels) -> dict[str, Tensor]:
    """Everything [T] that the objective says of tokens."""
    gradient = differentiate(objective, tokens, tokens.mask / 4, kernels)
    found = {"loss": gradient.loss_T * tokens.mask, "gradient": gradient.logprob_T}
    if gradient.entropy_T is not None:
        found["gradient of the entropy"] = gradient.entropy_T
    for name, value_T in objective.report(tokens).items():
        found[f"report['{name}']"] = value_T.float() * tokens.mask
    if objective.needs == "response":
        found["statistics"] = objective.statistics(tokens).float()
    if objective.selects_tokens:
        found["select"] = objective.select(tokens).float()
    limits = objective.bounds(tokens)
    if limits is not None:
        found["bounds"] = tokens.ratio.clamp(*limits)
    return {name: value_T.detach() for name, value_T in found.items()}


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor {list(value.shape)}".replace("torch.", "")
    return f"a {type(value).__name__}"
