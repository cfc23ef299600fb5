"""The agent that docs/extending.md names plays what its environment twin plays, token for token."""

from pathlib import Path

import pytest
from openai import DefaultAioHttpClient

from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.environment.base import Task, Turn
from examples.agents import calculator
from tests.agent.episodes import EOS, Policy, make_renderer, open_session, sequences_of
from tests.environment.calculator import Calculator

QUESTION = [{"role": "user", "content": "5+9+0+3=?"}]


@pytest.fixture(scope="module")
def renderer(tokenizer_dir: Path) -> ChatRenderer:
    return make_renderer(tokenizer_dir)


@pytest.mark.parametrize(
    ("turns", "score"),
    [
        (["5+9+0+3=17, so \\boxed{17}", "\\boxed{13}"], 1.0),
        (["\\boxed{17}", "\\boxed{14}"], 0.0),
        (["I don't know."], 0.0),
    ],
)
async def test_agent_and_environment_see_the_same_tokens(
    renderer: ChatRenderer, turns: list[str], score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter(turns)
    # A client belongs to an event loop, and each test has one of its own.
    monkeypatch.setattr(calculator, "HTTP", DefaultAioHttpClient())
    policy = Policy(renderer, lambda call: next(said))
    async with open_session(renderer, policy.sample) as (session, url, key):
        task = {"messages": QUESTION, "answer": ""}
        state = await calculator.play(task, url, key)
    [sequence] = sequences_of(session.record)

    environment = Calculator()
    other = environment.start(Task("p", "", renderer.text(QUESTION), ""))
    tokens = list(renderer.token_ids([renderer.text(QUESTION)])[0])
    for number, text in enumerate(turns):
        tokens += renderer.token_ids([text + EOS])[0]
        step = environment.step(other, Turn(number, text, (), 99))
        other = step.state
        if step.messages:
            tokens += renderer.continuation(step.messages)
    assert calculator.score(state) == environment.score(other) == score
    assert [*sequence.prompt.token_ids, *sequence.response_token_ids] == tokens
