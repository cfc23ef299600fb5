"""Objectives of a user: what is taken, and what is refused at the start, with file and line."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from typing import Any

import pytest
import torch

from bapo_megatron.algorithm.load_objective import load_objective, trial_tokens
from bapo_megatron.algorithm.user_code import UserCodeError
from bapo_megatron.config.load import ConfigError, parse_section
from bapo_megatron.config.schema import AlgorithmConfig
from tests.algorithm import own_objectives
from tests.algorithm.own_objectives import OwnWarning

OWN = "tests.algorithm.own_objectives"


def config(name: str, **options: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {"objective": f"{OWN}:{name}", "objective_options": options}
    )


@pytest.mark.parametrize("name", ["cispo", "Gspo", "HighEntropy", "Anchor"])
def test_objectives_of_single_tokens_and_their_sums_are_taken(name: str) -> None:
    loaded = load_objective(config(name))
    assert loaded.report_names == (("gspo/log_ratio",) if name == "Gspo" else ())
    assert loaded.statistic_size == (64 if name == "HighEntropy" else 0)
    assert loaded.decision_size == (1 if name == "HighEntropy" else 0)


@pytest.mark.parametrize("objective", ["bapo", "clip", "none"])
def test_built_in_objectives_report_the_same_clipped_shares(objective: str) -> None:
    loaded = load_objective(AlgorithmConfig(objective=objective))
    names = ("clip/fraction_high", "clip/fraction_low", "clip/fraction_dual")
    assert loaded.report_names == names
    assert loaded.decision_size == (8 if objective == "bapo" else 0)


def test_options_reach_the_function_and_the_class() -> None:
    wide = load_objective(config("cispo", high=5.0)).objective
    narrow = load_objective(config("cispo")).objective
    tokens = trial_tokens(torch.device("cpu"))
    held = tokens.ratio > 1.2
    assert held.any()
    tokens.logprob.requires_grad_()
    expected = -tokens.advantage * tokens.ratio.clamp(max=5.0) * tokens.logprob
    torch.testing.assert_close(wide.loss(tokens), expected)
    differs = wide.loss(tokens) != narrow.loss(tokens)
    assert torch.equal(differs, held & (tokens.advantage != 0) & (tokens.logprob != 0))
    assert load_objective(config("HighEntropy", share=0.5)).decision_size == 1


def test_a_class_may_name_the_limits_of_the_ratio() -> None:
    objective = load_objective(config("Bounded")).objective
    limits = objective.bounds(trial_tokens(torch.device("cpu")))
    assert limits is not None
    assert [limit.item() for limit in limits] == [0.5, 2.0]


MIXES = "mixes tokens: its loss changes where the same tokens are"
REFUSED = {
    "whitens": f"{MIXES} split",
    "sorts": f"{MIXES} permuted",
    "sums_up": "returns a float32 tensor [] as loss of 48 tokens; return one value per token, [48]",
    "detached": "returns a loss without a gradient",
    "divides": "returns NaN or infinity as loss for finite tokens",
    "overwrites": "changes tokens.advantage in place; make a new tensor",
    "FloatStatistics": "returns a float32 tensor [1] as statistics with needs = 'update'",
    "MaximumStatistics": "its statistics of parts do not add up to those of the whole",
    "NoLoss": "is a class without a method 'loss'; write loss(self, tokens)",
    "SelectsUnseen": "selects tokens with needs = 'token'",
    "ListOfBounds": "returns no pair of tensors; return (low, high) or None",
    "returns_a_number": "returns a float as loss of 48 tokens; return one value per token, [48]",
    "flat": "returns a loss without a gradient",
    "NoStatistics": "declares needs = 'response'; write statistics(self, tokens)",
    "NOT_CALLABLE": "is a int; name a function or a class",
    "clamps_in_place": "raised RuntimeError: one of the variables needed for gradient computation",
    "fails_backward": "raised KeyError: 'no gradient today'",
    "clamps_entropy": "changes tokens.collected_entropy in place; make a new tensor",
    "OtherReports": "but other/48 before; report the same names of all tokens",
    "LateReports": "reports other/1, but nothing before; report the same names of all tokens",
    "FailingBounds": "raised LookupError: no bounds",
    "FloatSelection": "selects by a float32 tensor [48]; return bool [T]",
    "ScalarDecision": "returns a float64 tensor [] as decision; return float64 [D]",
    "UnknownNeed": "declares needs = 'batch'; choose token, response, update, micro_batch",
    "AnchorsZero": "declares trains_zero_advantage = False, but A = 0 gives tokens a loss",
    "sets_default_dtype": "sets torch's default dtype to torch.float64, for the trainer as well",
    "turns_gradients_off": "turns gradients off, for the trainer as well; change it within your",
    "makes_warnings_errors": "makes warnings errors, for the trainer as well",
    "exits": "raised SystemExit: 0 (",
    "CountsZero": "but A = 0 gives tokens a part in the statistics; remove the declaration",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UserCodeError) as refused:
        load_objective(config(name))
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(f"algorithm.objective: '{OWN}:{name}'")
    assert REFUSED[name] in message
    if name not in ("NOT_CALLABLE", "fails_backward"):
        named = getattr(own_objectives, name)
        lines, first = inspect.getsourcelines(named)
        places = re.findall(rf"\({re.escape(own_objectives.__file__)}:(\d+)\)", message)
        assert len(places) == 1
        assert first <= int(places[0]) < first + len(lines)


def test_what_a_refused_function_has_changed_for_all_code_is_taken_back() -> None:
    filters = warnings.filters[:]
    for name in ("sets_default_dtype", "turns_gradients_off", "makes_warnings_errors"):
        with pytest.raises(UserCodeError):
            load_objective(config(name))
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)
    assert warnings.filters == filters


def test_a_module_that_changes_torchs_defaults_when_it_is_imported_is_refused() -> None:
    name = "tests.algorithm.double_module:cispo"
    with pytest.raises(UserCodeError) as refused:
        load_objective(AlgorithmConfig(objective=name))
    assert re.fullmatch(
        rf"algorithm\.objective: '{name}' \(/.*/double_module\.py:8\) sets torch's default "
        "dtype to torch.float64, for the trainer as well; change it within your own code only",
        str(refused.value),
    )


def test_errors_of_a_warning_of_ones_own_are_no_change_for_others() -> None:
    try:
        load_objective(config("makes_own_warnings_errors"))
    finally:
        warnings.filters[:] = [f for f in warnings.filters if f[2] is not OwnWarning]


def test_a_child_that_an_objective_forks_does_not_go_on_as_a_trainer(capfd) -> None:
    pid = os.getpid()
    load_objective(config("forks"))
    assert os.getpid() == pid, "a child came back"
    for child in own_objectives.FORKED:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert own_objectives.FORKED
    line = f"algorithm.objective: '{OWN}:forks' forked a process that came back; it was ended"
    assert set(capfd.readouterr().err.splitlines()) == {line}


def test_an_exception_of_the_user_names_its_line() -> None:
    with pytest.raises(UserCodeError) as raised:
        load_objective(config("raises"))
    lines, first = inspect.getsourcelines(own_objectives.raises)
    (offset,) = (i for i, line in enumerate(lines) if 'weights["negative"]' in line)
    assert str(raised.value) == (
        f"algorithm.objective: '{OWN}:raises' raised KeyError: 'negative' "
        f"({own_objectives.__file__}:{first + offset}); correct it"
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tests.algorithm.nowhere:cispo", "cannot import tests.algorithm.nowhere"),
        (f"{OWN}:nothing", "has no 'nothing'"),
    ],
)
def test_a_path_that_does_not_exist_is_named(name: str, problem: str) -> None:
    with pytest.raises(UserCodeError, match=problem):
        load_objective(AlgorithmConfig(objective=name))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"objective": "grpo"},
            "m2po or package.module:name, got 'grpo'; the loss of GRPO is clip",
        ),
        ({"clip": "fixed"}, "clip is now called objective, got clip: fixed; write objective: clip"),
        ({"clip": "bapo"}, "write objective: bapo"),
        ({"clip": {"low": 0.8}}, "clip is now called objective"),
        (
            {"objective": "a:b", "objective_options": {"high": float("inf")}},
            "objective_options.high must be finite, got inf",
        ),
        (
            {"objective": "clip", "objective_options": {"low": 0.8}},
            "'objective_options' are those of an objective of your own",
        ),
        (
            {"advantage": "gae"},
            "opo, reinforce_pp, reinforce_pp_baseline or package.module:function",
        ),
    ],
)
def test_settings_that_name_nothing_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_section(AlgorithmConfig, given, place="test")
