"""Episodes of a client, and what they show."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bapo_megatron.data.record import Call, Record
from bapo_megatron.engine.base import SamplingSettings
from bapo_megatron.environment.base import EnvironmentFailedError
from bapo_megatron.rollout.agents import Agents
from bapo_megatron.types import Prompt, Sample
from examples.agents.clients._script import STYLES, next_turn, question
from tests.agent.episodes import Policy, sequences_of

_SAMPLING = SamplingSettings(temperature=1.0, max_new_tokens=50_000, seed=0)

Turn = tuple[list[int], list[int], list[float]]
"""Prompt, sampled tokens and their log-probs."""


@dataclass
class Report:
    """What a client did in one episode of each style."""

    num_right: int = 0
    """Episodes whose value has the right sum."""
    calls: list[int] = field(default_factory=list)
    """Number of calls of each episode."""
    forks: list[str] = field(default_factory=list)
    """The style of each call that forks."""
    num_sequences: int = 0
    """Sequences with sampled tokens."""
    num_sampled: int = 0
    """Tokens of all turns."""
    is_exact: bool = True
    """Whether these train, once each, and no others."""
    refusal: str = ""
    """The last one of the proxy."""
    failures: list[str] = field(default_factory=list)
    """Errors of the episodes that failed."""

    def cells(self) -> tuple[str, ...]:
        """Return what the table shows."""
        styles = [f"{style} {self.forks.count(style)}" for style in STYLES if style in self.forks]
        return (
            f"{self.num_right}/{len(self.calls)}",
            " to ".join(map(str, sorted({min(self.calls), max(self.calls)}))),
            f"{len(self.forks)}" + (f" ({', '.join(styles)})" if styles else ""),
            str(self.num_sequences),
            str(self.num_sampled) if self.is_exact else "**no**",
        )


def trains_what_was_sampled(turns: Sequence[Turn], sequences: Sequence[Sample]) -> bool:
    """Whether each turn trains once, after the prompt that the engine saw, with its log-probs."""
    trained = []
    for sample in sequences:
        places = len(sample.prompt.token_ids) + sample.loss_mask.nonzero()[0]
        logprobs = dict(zip(places.tolist(), sample.behaviour_logprobs.tolist(), strict=True))
        trained.append(([*sample.prompt.token_ids, *sample.response_token_ids], logprobs))
    for prompt, token_ids, logprobs in turns:
        places = range(len(prompt), len(prompt) + len(token_ids))
        found = [
            tokens[: places.stop] == prompt + token_ids and [at.get(n) for n in places] == logprobs
            for tokens, at in trained
        ]
        if found.count(True) != 1:
            return False
    return sum(len(turn[1]) for turn in turns) == sum(len(at) for _, at in trained)


async def play_styles(agents: Agents) -> Report:
    """Play an episode of each style, one after the other."""
    report = Report()
    for seed, style in enumerate(STYLES):
        await _play(agents, style, seed, report)
    return report


async def _play(agents: Agents, style: str, seed: int, report: Report) -> None:
    numbers = random.Random(seed).sample(range(5000, 9999), 3)
    decode, turns = agents.renderer.decode, list[Turn]()
    policy = Policy(agents.renderer, lambda call: next_turn(decode(call.prompt().tolist()), style))

    async def sample(call: Call) -> None:
        prompt = call.prompt().tolist()
        await policy.sample(call)
        turns.append((prompt, call.turn.token_ids.tolist(), call.turn.logprobs.tolist()))

    session = agents.session(Record(), _SAMPLING, sample, is_serial=False)
    messages = [{"role": "user", "content": question(*numbers)}]
    prompt = Prompt(f"{style}:{seed}", (), "", "", row={"messages": messages})
    value: Any = None
    try:
        _, value = await agents.play(session, prompt, seed, lambda has_to_wait: None)
    except EnvironmentFailedError as error:
        report.failures.append(str(error))
    session.record.close()
    sequences = sequences_of(session.record)
    report.num_right += str(sum(numbers)) in json.dumps(value)
    report.calls.append(len(session.record.calls))
    report.forks += [style for call in session.record.calls if call.is_fork]
    report.num_sequences += sum(sequence.num_sampled > 0 for sequence in sequences)
    report.num_sampled += sum(len(token_ids) for _, token_ids, _ in turns)
    report.is_exact &= trains_what_was_sampled(turns, sequences)
    report.refusal = session.last_refusal or report.refusal
