"""The examples of docs/extending.md work as they are printed."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bapo_megatron.algorithm.advantage import Advantages
from bapo_megatron.algorithm.check_objective import trial_tokens
from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.algorithm.loss import differentiate
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.engine.load import load_kind
from tests.data.samples import make_episode

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


@pytest.fixture
def printed() -> Iterator[str]:
    """A module with everything that the page defines."""
    module = ModuleType("printed_on_the_page")
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), module.__dict__)
    sys.modules[module.__name__] = module
    yield module.__name__
    del sys.modules[module.__name__]


def test_the_environment_of_the_page_is_the_one_that_is_tested() -> None:
    tested = PAGE.parents[1] / "tests" / "environment" / "calculator.py"
    assert f"```python\n{tested.read_text()}```" in PAGE.read_text()


@pytest.mark.parametrize(
    ("name", "decision_size"),
    [("cispo", 0), ("QuantileClip", 1), ("PredictedQuantileClip", 1)],
)
def test_objectives_of_the_page_are_taken(printed: str, name: str, decision_size: int) -> None:
    loaded = load_objective(AlgorithmConfig(objective=f"{printed}:{name}"))
    assert loaded.decision_size == decision_size


def test_the_quantile_clip_limits_the_share_that_it_promises(printed: str) -> None:
    config = AlgorithmConfig(objective=f"{printed}:QuantileClip", objective_options={"share": 0.25})
    objective = load_objective(config).objective
    tokens = trial_tokens(torch.device("cpu"))
    decision = objective.decide(objective.statistics(tokens))
    from dataclasses import replace

    gradient = differentiate(objective, replace(tokens, decision=decision), tokens.mask)
    trained = (tokens.mask > 0) & (tokens.advantage != 0)
    clipped = trained & (gradient.logprob_T == 0)
    assert 0.1 <= float(clipped.sum() / trained.sum()) <= 0.25
    assert objective.report_decision(decision.tolist()) == {
        "quantile_clip/high": pytest.approx(decision.item())
    }


def test_the_advantage_of_the_page_centres_by_length(printed: str) -> None:
    samples: Any = [
        SimpleNamespace(reward=reward, episode_tokens=length)
        for reward, length in ((1.0, 1), (0.0, 3))
    ]
    advantages = Advantages(f"{printed}:centred_by_length")
    groups: Any = [SimpleNamespace(samples=samples)]
    assert advantages.compute(groups).tolist() == [[0.75, -0.25]]


def test_the_advantage_of_the_page_adds_that_of_the_calls(printed: str) -> None:
    group: Any = SimpleNamespace(samples=[make_episode(2, (1, 1, 2)), make_episode(2, (3,))])
    first, second = group.samples
    first.reward, first.call_rewards, second.reward = 1.0, (1.0, 0.0), 0.0
    values = Advantages(f"{printed}:grpo_with_calls").compute([group])
    # ±½ / √½; rewards 1, 0, 0 of calls have mean ⅓ and variance ⅓.
    episode, std = 0.5 / (0.5**0.5 + 1e-6), (1 / 3) ** 0.5 + 1e-6
    expected = [episode + 2 / 3 / std, episode - 1 / 3 / std, -episode - 1 / 3 / std]
    assert values.tolist() == pytest.approx(expected, rel=1e-6)


def test_the_engine_of_the_page_is_found_and_refuses_by_key(printed: str) -> None:
    kind = load_kind(f"{printed}:MyKind")
    config: Any = SimpleNamespace(rollout=SimpleNamespace(colocated=True))
    with pytest.raises(ConfigError, match=r"^rollout\.colocated: must be false with my_engine"):
        kind.check(config)


def test_the_model_family_of_the_page_is_the_one_of_the_package() -> None:
    family = PAGE.parents[1] / "bapo_megatron" / "policy" / "families" / "qwen3.py"
    docstring, code = family.read_text().split("\n\n", 1)
    assert docstring.startswith('"""')
    assert f"```python\n{code}```" in PAGE.read_text()
