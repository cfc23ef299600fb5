"""What a stream of events becomes: pieces whose tokens, log-probs and versions are certain."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.data.staleness import token_versions
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings
from bapo_megatron.engine.sglang import stream
from bapo_megatron.engine.sglang.stream import EventReader, StreamParser
from bapo_megatron.errors import RefusedError
from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    from bapo_megatron.engine.base import Completion

STOP = {"type": "stop", "matched": 1}
ABORT = {"type": "abort", "message": "Abort in waiting queue"}


def _rows(ids: list[int]) -> list[list[Any]]:
    """Log-prob −id/8 of each token, which float32 holds exactly."""
    return [[-token_id / 8, token_id, None] for token_id in ids]


def _event(
    ids: list[int],
    total: int,
    version: int = 3,
    finish: dict[str, Any] | None = None,
    spans: list[tuple[int, int, int]] | None = None,
    rows: list[list[Any]] | None = None,
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "finish_reason": finish,
        "weight_version": str(version),
        "completion_tokens": total,
        "output_token_logprobs": _rows(ids) if rows is None else rows,
    }
    if spans is not None:
        meta["weight_versions"] = [
            {"version": str(v), "start": start, "end": end} for v, start, end in spans
        ]
    return {"output_ids": ids, "meta_info": meta}


def _parser(is_incremental: bool = True, **options: Any) -> StreamParser:
    values: dict[str, Any] = {"max_new_tokens": 20, "version": 3, "is_known": lambda version: True}
    values |= options
    sampling = SamplingSettings(1.0, values["max_new_tokens"])
    request = GenerateRequest(input_ids=[], sampling=sampling, label="", version=values["version"])
    return StreamParser(request, values["is_known"], is_incremental)


def _plain(part: Completion | None) -> tuple[list[int], list[float], list[int], str] | None:
    if part is None:
        return None
    return (
        part.token_ids.tolist(),
        part.logprobs.tolist(),
        token_versions(part.versions).tolist(),
        str(part.finish_reason),
    )


@pytest.mark.parametrize("is_incremental", [True, False])
def test_pieces_of_one_version_come_at_once(is_incremental: bool) -> None:
    parser = _parser(is_incremental)
    second = [16] if is_incremental else [8, 16]
    third = [24, 32] if is_incremental else [8, 16, 24, 32]
    assert _plain(parser.feed(_event([8], 1))) == ([8], [-1.0], [3], "abort")
    assert _plain(parser.feed(_event(second, 2))) == ([16], [-2.0], [3], "abort")
    last = parser.feed(_event(third, 4, finish=STOP, spans=[(3, 0, 4)]))
    assert _plain(last) == ([24, 32], [-3.0, -4.0], [3, 3], "stop")
    assert parser.is_finished


def test_lists_that_are_longer_than_the_event_says_are_cut() -> None:
    # Composed at 2 tokens, sent when there were 3: SGLang passes references to the growing lists.
    parser = _parser(is_incremental=False)
    assert _plain(parser.feed(_event([8, 16, 24], 2))) == ([8, 16], [-1.0, -2.0], [3, 3], "abort")
    last = parser.feed(_event([8, 16, 24], 3, finish=STOP, spans=[(3, 0, 3)]))
    assert _plain(last) == ([24], [-3.0], [3], "stop")


def test_events_after_a_change_of_version_wait_for_the_spans_of_the_last_one() -> None:
    parser = _parser(is_known=lambda version: version in (3, 4))
    assert parser.feed(_event([8], 1)) is not None
    assert parser.feed(_event([16, 24], 3, version=4)) is None
    assert parser.feed(_event([32], 4, version=4)) is None
    last = parser.feed(_event([40], 5, version=4, finish=STOP, spans=[(3, 0, 2), (4, 2, 5)]))
    assert _plain(last) == ([16, 24, 32, 40], [-2.0, -3.0, -4.0, -5.0], [3, 4, 4, 4], "stop")


def test_a_version_that_is_not_known_is_refused_at_once() -> None:
    parser = _parser(is_known=lambda version: version == 3)
    with pytest.raises(ValueError, match="weights version 9, which this run did not give it"):
        parser.feed(_event([8], 1, version=9))


def test_spans_that_contradict_what_was_handed_out_are_refused() -> None:
    parser = _parser()
    parser.feed(_event([8, 16], 2))
    with pytest.raises(ValueError, match="contradict the stream"):
        parser.feed(_event([24], 3, version=4, finish=STOP, spans=[(3, 0, 1), (4, 1, 3)]))


@pytest.mark.parametrize("num_before", [1, 2])
def test_an_abort_in_the_queue_repeats_a_token_that_is_not_taken_again(num_before: int) -> None:
    # Incremental: the last token and every log-prob once more (tokenizer_manager._handle_abort_req)
    ids = [8, 16][:num_before]
    parser = _parser()
    parser.feed(_event(ids, num_before))
    event = _event(ids[-1:], num_before, finish=ABORT, rows=_rows(ids), spans=[(3, 0, num_before)])
    assert _plain(parser.feed(event)) == ([], [], [], "abort")


@pytest.mark.parametrize("num_before", [1, 2])
def test_an_abort_in_the_queue_that_is_joined_with_new_tokens_keeps_these(num_before: int) -> None:
    # Two events that were not fetched in time are sent as one: lists joined, the rest of the last.
    ids = [8, 16][:num_before]
    parser = _parser()
    parser.feed(_event(ids, num_before))
    rows = _rows([24]) + _rows([*ids, 24])
    event = _event([24, 24], num_before + 1, finish=ABORT, rows=rows, spans=[(3, 0, 3)])
    assert _plain(parser.feed(event)) == ([24], [-3.0], [3], "abort")


def test_an_abort_before_the_first_token_is_an_empty_piece() -> None:
    event = _event([], 0, finish=ABORT, rows=[])
    assert _plain(_parser().feed(event)) == ([], [], [], "abort")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (_event([16], 3), "1 token ids where 2 of 3 are new"),
        (_event([], 0), "0 tokens after 1 of 20 tokens"),
        (_event([16] * 20, 21), "21 tokens after 1 of 20 tokens"),
        (_event([16], 2, rows=[]), "log-probs of 0 tokens do not belong to its 1 tokens"),
        (_event([16], 2, rows=_rows([24])), "log-probs of 1 tokens do not belong to its 1 tokens"),
        (_event([16], 2, rows=[[None, 16, None]]), r"log-prob None at response token 1 \(id 16\)"),
        (_event([16], 2, finish={"type": "eos"}), "'eos' is not a valid FinishReason"),
        (_event([16], 2, finish=STOP, spans=[(3, 0, 1)]), "do not cover its 2 tokens"),
        ({"error": {"message": "scheduler died", "code": 500}}, "HTTP 500: scheduler died"),
    ],
)
def test_nonsense_is_refused(event: dict[str, Any], message: str) -> None:
    parser = _parser()
    parser.feed(_event([8], 1))
    with pytest.raises(ValueError, match=message) as caught:
        parser.feed(event)
    assert not isinstance(caught.value, RefusedError)


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "too long", "code": 400}},
        _event([], 0, finish={"type": "abort", "message": "too long", "status_code": 400}),
    ],
)
def test_a_refused_request_is_told_apart_from_a_broken_server(event: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="HTTP 400: too long; correct the setting it names"):
        _parser().feed(event)


def test_a_response_that_the_server_cut_off_is_no_full_length() -> None:
    with pytest.raises(RefusedError, match="cut off after 1 of 20 tokens"):
        _parser().feed(_event([8], 1, finish={"type": "length"}, spans=[(3, 0, 1)]))
    full = _parser(max_new_tokens=1).feed(_event([8], 1, finish={"type": "length"}))
    assert full is not None
    assert full.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_found_however_the_bytes_arrive(size: int) -> None:
    sent = [{"text": "ä\n\nö"}, {"n": 2}]
    stream = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in sent)
    stream += b"data: [DONE]\n\n"
    reader = EventReader()
    chunks = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [event for chunk in chunks for event in reader.feed(chunk)] == sent


def test_what_is_no_stream_of_events_is_refused() -> None:
    with pytest.raises(ValueError, match="not an event of a stream: b'<html>'"):
        list(EventReader().feed(b"<html>\n\n"))


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MAX_EVENT_BYTES", 1000)
    reader = EventReader()
    assert list(reader.feed(b"data: " + bytes(900))) == []
    with pytest.raises(ValueError, match="an event of more than 1000 bytes"):
        list(reader.feed(bytes(100)))
