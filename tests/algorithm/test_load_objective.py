"""Objectives of a user: what is taken, and errors with the user's file and line."""

import inspect
import os
import re
from typing import Any

import pytest
import torch

from bapo_megatron.algorithm.check_objective import trial_tokens
from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.algorithm.user_code import UserCodeError
from bapo_megatron.config.load import ConfigError, parse_section
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.data.token_columns import scored
from tests.algorithm import own_objectives

OWN = "tests.algorithm.own_objectives"


def config(name: str, **options: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {"objective": f"{OWN}:{name}", "objective_options": options}
    )


@pytest.mark.parametrize(
    ("name", "report_names", "sizes"),
    [
        ("cispo", (), (0, 0)),
        ("Gspo", ("gspo/log_ratio",), (0, 0)),
        ("HighEntropy", (), (64, 1)),
        ("Bare", (), (0, 0)),
    ],
)
def test_the_sizes_of_what_an_objective_returns(
    name: str, report_names: tuple[str, ...], sizes: tuple[int, int]
) -> None:
    loaded = load_objective(config(name))
    assert loaded.report_names == report_names
    assert (loaded.statistic_size, loaded.decision_size) == sizes
    assert loaded.collects == (name in ("Gspo", "HighEntropy"))


@pytest.mark.parametrize("objective", ["bapo", "clip", "none"])
def test_built_in_objectives_report_the_same_clipped_shares(objective: str) -> None:
    loaded = load_objective(AlgorithmConfig(objective=objective))
    names = ("clip/fraction_high", "clip/fraction_low", "clip/fraction_dual")
    assert loaded.report_names == names
    assert loaded.decision_size == (8 if objective == "bapo" else 0)


def test_an_objective_gets_the_columns_of_the_run_and_no_others() -> None:
    teacher = {"path": "/teacher", "engine": "local"}
    content: dict[str, Any] = {
        "objective": f"{OWN}:towards_reference",
        "kl": {"measure": True},
        "distillation": {"coefficient": 1, "loss": "top_k", "top_k": 3, "teacher": teacher},
    }
    section = AlgorithmConfig.model_validate(content)
    assert load_objective(section, columns=scored(section)).report_names == ()
    for lacking, column in (("kl", "reference_logprob"), ("distillation", "teacher_top_logprobs")):
        section = AlgorithmConfig.model_validate({k: v for k, v in content.items() if k != lacking})
        with pytest.raises(UserCodeError, match=f"raised KeyError: '{column}'"):
            load_objective(section, columns=scored(section))


def test_options_reach_the_function_and_the_class() -> None:
    wide = load_objective(config("cispo", high=5.0)).objective
    tokens = trial_tokens()
    expected = -tokens.advantage * tokens.ratio.clamp(max=5.0) * tokens.logprob
    torch.testing.assert_close(wide.loss(tokens), expected)
    assert not torch.equal(load_objective(config("cispo")).objective.loss(tokens), expected)
    half = load_objective(config("HighEntropy", share=0.5)).objective
    assert half.decide(torch.ones(64, dtype=torch.int64)).tolist() == [32.0]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("whitens", "mixes tokens: its loss"),
        ("NoLoss", "raised TypeError: Can't instantiate abstract class"),
        ("raises", "raised KeyError: 'negative'"),
        ("clamps_in_place", "raised RuntimeError: one of the variables needed for gradient"),
        ("exits", "raised SystemExit: 0"),
    ],
)
def test_an_error_is_one_line_with_the_place_in_the_user_s_file(name: str, problem: str) -> None:
    with pytest.raises(UserCodeError) as refused:
        load_objective(config(name))
    message = str(refused.value)
    assert message.startswith(f"algorithm.objective: '{OWN}:{name}' ")
    assert problem in message
    assert "\n" not in message
    lines, first = inspect.getsourcelines(getattr(own_objectives, name))
    (place,) = re.findall(rf"\({re.escape(own_objectives.__file__)}:(\d+)\)", message)
    culprit = {"raises": 'weights["negative"]', "exits": "sys.exit"}
    wanted = culprit.get(name, "def " if name[0].islower() else "class ")
    assert wanted in lines[int(place) - first]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tests.algorithm.nowhere:cispo", "cannot import tests.algorithm.nowhere"),
        (f"{OWN}:nothing", "has no 'nothing'"),
        (f"{OWN}:NOT_CALLABLE", "is a int; name a function or a class"),
    ],
)
def test_a_name_of_no_objective_is_refused(name: str, problem: str) -> None:
    with pytest.raises(UserCodeError, match=problem):
        load_objective(AlgorithmConfig(objective=name))


def test_options_that_a_class_does_not_take_are_refused() -> None:
    with pytest.raises(UserCodeError, match="Gspo' raised TypeError: "):
        load_objective(config("Gspo", share=1.2))


def test_errors_after_the_start_name_the_place_too() -> None:
    objective = load_objective(config("fails_late")).objective
    tokens = trial_tokens()
    object.__setattr__(tokens, "update", 1)
    with pytest.raises(UserCodeError, match=r"the second update is too much \(/.*:\d+\)"):
        objective.loss(tokens)
    with pytest.raises(UserCodeError, match="fails_late' raised KeyError"), objective.guarded():
        raise KeyError


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"objective": "grpo"}, "'objective' must be .*got 'grpo'; the loss of GRPO is clip"),
        ({"objective": "clip", "objective_options": {"low": 0.8}}, "'objective_options' are for"),
        ({"advantage": "gae"}, "'advantage' must be .* or package.module:function"),
    ],
)
def test_settings_that_name_nothing_are_refused(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_section(AlgorithmConfig, section, place="test")


def test_a_child_that_an_objective_forks_does_not_go_on_as_a_trainer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pid = os.getpid()
    load_objective(config("forks"))
    assert os.getpid() == pid, "a child came back"
    for child in own_objectives.FORKED:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert own_objectives.FORKED
    (line,) = set(capfd.readouterr().err.splitlines())
    assert f"'{OWN}:forks' forked a process" in line
