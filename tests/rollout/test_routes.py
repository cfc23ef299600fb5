"""The experts of a response in progress: joined over requests, kept by checkpoints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bapo_megatron.data.columns import DumpError
from bapo_megatron.engine.base import Completion
from bapo_megatron.rollout import saved
from bapo_megatron.rollout.buffer import RolloutBuffer
from bapo_megatron.rollout.saved import SavedRollout
from bapo_megatron.types import FinishReason, Prompt, VersionSpan
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
    pending, *_ = started().groups[0].samples
    pending.append(piece(2), 50)
    pending.append(piece(1, range(6)), 50)  # four of the prompt, two of three tokens
    assert pending.input_ids() == [3, 20, 77, 4, 0, 1, 0]
    assert pending.sample.routes is not None
    assert pending.sample.routes.shape == (6, 6)
    pending.append(piece(2, range(6, 8), FinishReason.STOP), 50)
    pending.write([5, 6])
    pending.append(piece(1, range(8, 11)), 50)  # the last sampled one, and those written
    pending.settle()
    assert pending.sample.routes[:, 0].tolist() == list(range(11))


def test_a_checkpoint_keeps_the_routes_of_what_is_underway() -> None:
    buffer = started()
    first, second, _ = buffer.groups[0].samples
    first.append(piece(3, range(120, 126)), 50)  # up to expert 130
    second.append(piece(2), 50)
    restored = read_file(file_of(SavedRollout(AT_START, buffer))).buffer
    kept, without, empty = (pending.sample.routes for pending in restored.groups[0].samples)
    assert kept is not None
    assert kept.dtype == np.int16
    assert kept[:, 0].tolist() == list(range(120, 126))
    assert without is None
    assert empty is None


def test_a_checkpoint_without_routes_is_as_it_was() -> None:
    buffer = started()
    buffer.groups[0].samples[0].append(piece(2), 50)
    content = file_of(SavedRollout(AT_START, buffer))
    assert b"routed_tokens" not in content
    assert read_file(content).buffer.groups[0].samples[0].sample.routes is None


def test_routes_that_do_not_fit_their_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = started()
    buffer.groups[0].samples[0].append(piece(3, range(6)), 50)
    kind, _ = saved._ROUTES["routed_tokens"]
    columns = {"routed_tokens": (kind, lambda row: 7 if row.pending.num_tokens else 0)}
    file = replace(saved._FILE, optional={**saved._FILE.optional, **columns})
    monkeypatch.setattr(saved, "_FILE", file)
    with pytest.raises(DumpError, match="sample 0 of group 0: routes: 36 experts for 7 tokens"):
        read_file(file_of(SavedRollout(AT_START, buffer)))
