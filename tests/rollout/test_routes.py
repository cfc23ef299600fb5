"""The experts of a response in progress: joined over requests, kept by checkpoints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.completion import Completion
from bapo_megatron.data.record import Call
from bapo_megatron.rollout import saved
from bapo_megatron.rollout.buffer import RolloutBuffer
from bapo_megatron.rollout.saved import SavedRollout
from bapo_megatron.types import FinishReason, Prompt, VersionSpan
from tests.rollout.calls import begin
from tests.rollout.saved_files import AT_START, file_of, read_file

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


def started() -> RolloutBuffer:
    buffer = RolloutBuffer()
    buffer.start_group(PROMPT, 3)
    return buffer


def test_routes_of_later_requests_follow_those_of_earlier_ones() -> None:
    episode, *_ = started().groups[0].episodes
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
    episode, *_ = started().groups[0].episodes
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


def test_a_checkpoint_keeps_the_routes_of_what_is_underway() -> None:
    buffer = started()
    first, second, _ = buffer.groups[0].episodes
    begin(first).append(piece(3, range(120, 126)))  # up to expert 130
    begin(second).append(piece(2))
    restored = read_file(file_of(SavedRollout(AT_START, buffer))).buffer
    kept, without, *empty = (
        call.turn.routes for episode in restored.groups[0].episodes for call in episode.record.calls
    )
    assert kept is not None
    assert kept.dtype == np.int16
    assert kept[:, 0].tolist() == list(range(120, 126))
    assert without is None
    assert not empty


def test_a_checkpoint_without_routes_is_as_it_was() -> None:
    buffer = started()
    begin(buffer.groups[0].episodes[0]).append(piece(2))
    content = file_of(SavedRollout(AT_START, buffer))
    assert b"routed_tokens" not in content
    [call] = read_file(content).buffer.groups[0].episodes[0].record.calls
    assert call.turn.routes is None


def test_routes_that_do_not_fit_their_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = started()
    begin(buffer.groups[0].episodes[0]).append(piece(3, range(6)))
    kind, _ = saved._ROUTES["routed_tokens"]
    columns = {"routed_tokens": (kind, lambda row: 7 if row.call.num_tokens else 0)}
    file = replace(saved._FILE, optional={**saved._FILE.optional, **columns})
    monkeypatch.setattr(saved, "_FILE", file)
    with pytest.raises(DumpError, match=r"sample 0 of group 0: call: routes: 36 exp.* 7 tokens"):
        read_file(file_of(SavedRollout(AT_START, buffer)))
