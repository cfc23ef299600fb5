"""Clients of others play; the table of docs/agents.md names what they were played with."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.types import FinishReason, PromptTokens, Sample, WrittenSpan
from examples.agents.clients.__main__ import CLIENTS, play, required, version
from examples.agents.clients._episodes import Report, trains_what_was_sampled
from tests.agent.episodes import make_renderer
from tests.launch import REPOSITORY

TURNS = [([1, 2], [3, 4], [-0.5, -0.25]), ([1, 2, 3, 4, 5], [6], [-1.0])]


@pytest.fixture(scope="module")
def renderer(tokenizer_dir: Path) -> ChatRenderer:
    return make_renderer(tokenizer_dir)


@pytest.mark.parametrize("name", ["curl", "openai_chat", "openai_stream", "openai_responses"])
async def test_clients_that_need_no_environment_continue_every_turn_exactly(
    renderer: ChatRenderer, name: str
) -> None:
    if name == "curl" and not (shutil.which("curl") and shutil.which("jq")):
        pytest.skip("needs curl and jq")
    report, refusal = await play(CLIENTS[name], renderer, None)
    assert not refusal
    # Six episodes of two additions and an answer, each one sequence.
    assert report == Report(6, [3] * 6, [], 6, report.num_sampled)
    assert report.num_sampled > 1000


def sample(tokens: list[int], written: Any, logprobs: list[float]) -> Sample:
    return Sample(
        0,
        0,
        PromptTokens("p", np.array(tokens[:2], np.int32)),
        np.array(tokens[2:], np.int32),
        np.array(logprobs, np.float32),
        ((0, len(logprobs)),),
        FinishReason.STOP,
        written,
    )


@pytest.mark.parametrize(
    ("tokens", "logprobs", "is_exact"),
    [
        ([1, 2, 3, 4, 5, 6], [-0.5, -0.25, -1.0], True),
        ([1, 2, 3, 4, 5, 7], [-0.5, -0.25, -1.0], False),
        ([1, 9, 3, 4, 5, 6], [-0.5, -0.25, -1.0], False),
        ([1, 2, 3, 4, 5, 6], [-0.5, -0.75, -1.0], False),
        ([1, 2, 3, 4, 5, 6, 6], [-0.5, -0.25, -1.0, -1.0], False),
    ],
    ids=["equal", "token", "prompt", "log-prob", "one more"],
)
def test_one_other_token_or_log_prob_is_not_what_was_sampled(
    tokens: list[int], logprobs: list[float], is_exact: bool
) -> None:
    trained = sample(tokens, (WrittenSpan(2, 1),), logprobs)
    assert trains_what_was_sampled(TURNS, [trained]) is is_exact
    assert not trains_what_was_sampled(TURNS, [trained, trained])


def test_clients_are_short_and_pin_what_the_documented_table_names() -> None:
    text = (REPOSITORY / "docs" / "agents.md").read_text()
    table = dict(re.findall(r"^\| (\w+) \| ([\d.]+|–) \|", text, re.MULTILINE))
    assert table == {name: version(path) for name, path in CLIENTS.items()}
    for path in CLIENTS.values():
        assert len(path.read_text().splitlines()) <= 30, path.name
        assert all(re.search(r"(==|.@)[\d.]+$", package) for package in required(path)), path.name
