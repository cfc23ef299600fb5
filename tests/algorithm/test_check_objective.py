"""Trials of an objective: which rules are held."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithm.check_objective import ObjectiveError, check_objective
from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.algorithm.objective import FunctionObjective, Objective, TokenBatch
from bapo_megatron.algorithm.objectives.bapo import Bapo, BapoConfig
from bapo_megatron.config.schema import OBJECTIVES, AlgorithmConfig
from tests.algorithm.own_objectives import Anchor, Gspo, HighEntropy, cispo, plain
from tests.algorithm.test_objectives import CASES


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("entropy_share", [1.0, 0.5])
def test_no_objective_mixes_tokens_or_trains_zero_advantages(
    name: str, entropy_share: float
) -> None:
    if entropy_share < 1 and name in ("gspo", "gmpo", "opsm"):
        pytest.skip("refused")
    algorithm = {**CASES.get(name, ({}, None))[0], "objective": name}
    config = AlgorithmConfig.model_validate(algorithm | {"entropy_share": entropy_share})
    objective = load_objective(config).objective
    assert objective.trains_zero_advantage is (name == "nll")
    if objective.selects_tokens:  # those that select count tokens with A = 0
        objective.trains_zero_advantage = None
    check_objective(objective)


@pytest.mark.parametrize("objective", [Gspo(), HighEntropy(), Anchor(), FunctionObjective(cispo)])
def test_objectives_of_single_tokens_and_their_sums_pass(objective: Objective) -> None:
    check_objective(objective)


def broken(base: type[Any] = Objective, **members: Any) -> Objective:
    """An objective −A r, or of the base, with other members."""
    defaults = {} if hasattr(base, "width") else {"loss": lambda _, tokens: plain(tokens)}
    objective: Objective = type("Broken", (base,), {**defaults, **members})()
    return objective


def function(loss: Callable[[TokenBatch], Any]) -> Objective:
    return FunctionObjective(loss)


def count_all(_: Any, tokens: TokenBatch) -> Tensor:
    return (tokens.mask > 0).sum(dtype=torch.int64)[None]


class Narrow(Bapo):
    """Declares fewer entries than it reads."""

    def __init__(self) -> None:
        super().__init__(BapoConfig(), None)
        self.decisive = slice(0, 1)


class Selecting(Narrow):
    selects_tokens = True


BROKEN: dict[str, tuple[Objective, str]] = {
    "mixes by a mean": (
        function(lambda t: plain(t) - plain(t).mean()),
        "mixes tokens: its loss",
    ),
    "mixes by order": (function(lambda t: plain(t).cumsum(0)), "mixes tokens: its loss"),
    "mixes bounds": (
        broken(bounds=lambda _, t: (t.ratio * 0, t.ratio.mean().expand(len(t)))),
        "mixes tokens: its bounds",
    ),
    "sums up": (function(lambda t: plain(t).sum()), r"float32 tensor \[\] as loss of 48"),
    "a number": (function(lambda _: 0.0), "returns a float as loss"),
    "detached": (function(lambda t: plain(t).detach()), "without a gradient"),
    "flat": (function(lambda t: 0.0 * t.ratio), "without a gradient"),
    "NaN": (function(lambda t: plain(t) * (t.advantage / t.advantage)), "NaN or infinity"),
    "overwrites": (function(lambda t: -t.advantage.mul_(2) * t.ratio), "tokens.advantage"),
    "clamps a field": (
        function(lambda t: plain(t) + 0 * t.collected_entropy.clamp_(max=0.5)),
        "tokens.collected_entropy in place",
    ),
    "other names": (broken(report=lambda _, t: {f"other/{len(t)}": t.ratio}), "different names"),
    "one report": (broken(report=lambda _, t: {"x": t.ratio.mean()}), "as report of 48"),
    "float statistics": (
        broken(HighEntropy, statistics=lambda _, t: t.entropy.sum()[None]),
        r"float32 tensor \[1\] with needs = 'update'",
    ),
    "a maximum": (
        broken(HighEntropy, statistics=lambda _, t: t.mask.long().amax()[None].expand(64)),
        "do not add up",
    ),
    "one sum for responses": (
        broken(needs="response", statistics=lambda _, t: t.ratio.sum()),
        "as statistics of 48 tokens",
    ),
    "decision without a dimension": (
        broken(HighEntropy, decide=lambda _, total_K: total_K.sum().double()),
        r"float64 tensor \[\] as decision",
    ),
    "float selection": (
        broken(HighEntropy, select=lambda _, t: t.entropy),
        r"return bool \[T\]",
    ),
    "unknown need": (broken(needs="batch"), "declares needs = 'batch'; choose token"),
    "no statistics": (broken(needs="response"), "write statistics"),
    "selects unseen": (broken(selects_tokens=True), "selects tokens with needs = 'token'"),
    "selects a decision": (Selecting(), "declares decisive"),
    "decisive too few": (Narrow(), r"declares decisive = slice\(0, 1, None\)"),
    "trains A = 0": (
        broken(Anchor, trains_zero_advantage=False, loss=Anchor.loss),
        "declares trains_zero_advantage = False",
    ),
    "counts A = 0": (
        broken(needs="update", trains_zero_advantage=False, statistics=count_all),
        "part in the statistics",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_right_is_refused_in_one_line(name: str) -> None:
    objective, problem = BROKEN[name]
    with pytest.raises(ObjectiveError, match=problem) as refused:
        check_objective(objective)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("method", ["loss", "bounds", "report_decision", "foresee"])
def test_an_exception_of_any_method_passes_through(method: str) -> None:
    def fail(*_: Any) -> None:
        raise LookupError(method)

    objective = Narrow()
    objective.decisive = slice(0, 2)
    setattr(objective, method, fail)
    with pytest.raises(LookupError, match=method):
        check_objective(objective)
