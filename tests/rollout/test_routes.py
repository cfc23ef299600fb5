"""The experts of a response in progress, joined over requests."""

import numpy as np

from bapo_megatron.data.completion import Completion
from bapo_megatron.data.record import Call
from bapo_megatron.rollout.buffer import Episode
from bapo_megatron.types import FinishReason, Prompt, VersionSpan
from tests.rollout.calls import begin

PROMPT = Prompt("p:0", (3, 20, 77, 4), "", "")
ABORT = FinishReason.ABORT


def piece(num_tokens: int, routes: range | None = None, reason: FinishReason = ABORT) -> Completion:
    """Tokens of version 0; ``routes``: the first expert of each row of six."""
    values = None
    if routes is not None:
        values = np.array([[first + n for n in range(6)] for first in routes], np.int16)
    tokens = np.arange(num_tokens, dtype=np.int32)
    spans = (VersionSpan(0, num_tokens),) if num_tokens else ()
    return Completion(tokens, np.zeros(num_tokens, np.float32), spans, reason, values)


def test_routes_of_later_requests_follow_those_of_earlier_ones() -> None:
    episode = Episode(0, 0, PROMPT)
    record, first = episode.record, begin(episode)
    first.append(piece(2))
    first.append(piece(1, range(6)))  # four of the prompt, two of three tokens
    assert first.routed == 6
    first.append(piece(2, range(6, 8), FinishReason.STOP))
    record.write([5, 6])
    second = record.calls[-1]
    second.max_tokens = 50
    assert second.routed == 8
    second.append(piece(1, range(8, 11), FinishReason.STOP))  # the last sampled one, those written
    assert second.routed == 11
    episode.finish(FinishReason.STOP)
    routes = episode.finished().routes
    assert routes is not None
    assert routes[:, 0].tolist() == list(range(11))


def test_branches_of_an_agent_have_the_routes_of_what_they_share() -> None:
    episode = Episode(0, 0, PROMPT)
    record, first = episode.record, begin(episode)
    first.append(piece(3, range(6), FinishReason.STOP))
    for start in (20, 40):
        call = Call(f"call {start}", first, np.array([7, 8], np.int32), max_tokens=50)
        assert call.routed == 6
        call.append(piece(2, range(start, start + 4), FinishReason.STOP))
        record.calls.append(call)
    episode.finish(FinishReason.STOP)
    one, other = episode.finished().sequences
    for sequence, start in ((one, 20), (other, 40)):
        assert sequence.routes is not None
        assert sequence.routes[:, 0].tolist() == [*range(6), *range(start, start + 4)]
        assert len(sequence.routes) == sequence.sequence_tokens - 1
