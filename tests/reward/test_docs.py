"""docs/rewards.md and examples/rewards: what they show is read, imported and run."""

import re
import subprocess
import sys

import pytest
import yaml

from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.reward.base import Response, SampleFacts
from bapo_megatron.reward.math_answer import Reason
from bapo_megatron.runtime.names import SHAPING_TERMS
from tests.launch import REPOSITORY, free_port
from tests.reward.scoring import score

DOCS = (REPOSITORY / "docs" / "rewards.md").read_text()
EXAMPLES = REPOSITORY / "examples" / "rewards"


def config_in(path):
    """The reward section in an example's own words."""
    section = re.search(r"^( *)reward:\n(?:\1  .*\n)+", path.read_text(), re.MULTILINE)
    return yaml.safe_load(section[0])["reward"]


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL))
def test_every_configuration_of_the_page_is_one(block):
    assert RewardConfig.model_validate(yaml.safe_load(block)["reward"])


def test_every_reason_and_term_is_explained():
    for word in (*Reason, "limit", *SHAPING_TERMS):
        assert f"`{word}`" in DOCS or f"`reward/{word}`" in DOCS, word


@pytest.mark.slow
def test_the_function_of_the_page_works(tmp_path, monkeypatch):
    source = re.search(r"```python\n(.*?)```", DOCS, re.DOTALL)[1]
    (tmp_path / "my_rewards.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    functions = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)[1])["reward"]

    [[total], _] = score(functions, Response(r"\boxed{7}", "7"))

    assert total.reward == pytest.approx(1.1)
    assert total.components == {"math": 1.0, "style": 1.0}


@pytest.mark.slow
def test_the_group_function_of_the_page_rewards_the_shortest_right_response(tmp_path, monkeypatch):
    source = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)[1]
    (tmp_path / "my_groups.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (block,) = (
        text for text in re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL) if "my_groups" in text
    )
    section = yaml.safe_load(block)["reward"]
    responses = [
        Response(rf"\boxed{{{number}}}", "7", SampleFacts(num_tokens=num_tokens))
        for number, num_tokens in ((7, 30), (7, 20), (8, 10), (7, 25))
    ]

    _, totals = score(section, *responses)
    _, [wrong] = score(section, responses[2])

    assert [total.reward for total in (*totals, wrong)] == [1.0, 1.2, 0.0, 1.0, 0.0]
    assert totals[1].components == {"math": 1.0, "shortest": 1.0}


@pytest.mark.slow
def test_short_answers_are_worth_more():
    config = config_in(EXAMPLES / "short_answers.py")

    [short, long, wrong], _ = score(
        config,
        Response(r"\boxed{7}", "7", SampleFacts(num_tokens=50), {"token_budget": 100}),
        Response(r"\boxed{7}", "7", SampleFacts(num_tokens=500), {"token_budget": 100}),
        Response(r"\boxed{8}", "7", SampleFacts(num_tokens=5), {}),
    )

    assert (short.reward, long.reward, wrong.reward) == (0.75, 0.5, 0.0)
    assert short.metrics == {"short/used_share": 0.5}
    assert short.reason == "equal_text"


def test_the_service_answers():
    port = free_port()
    config = config_in(EXAMPLES / "service.py")
    config["functions"][0]["url"] = config["functions"][0]["url"].replace("8700", str(port))
    service = subprocess.Popen(
        [sys.executable, EXAMPLES / "service.py", str(port)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert service.stdout.readline() == f"scoring at http://127.0.0.1:{port}/score\n"
        [good, bad], _ = score(
            config,
            Response("Therefore 7.", "7", SampleFacts(num_tokens=4)),
            Response("7", "7", SampleFacts(num_tokens=4000)),
        )
    finally:
        service.kill()
        service.wait()
        service.stdout.close()

    assert (good.reward, bad.reward) == (1.0, 0.0)
    assert good.metrics == {"sections/conclusion": 1.0}
