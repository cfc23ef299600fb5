"""What answers become: pieces whose tokens, log-probs and versions are certain, and verdicts."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from bapo_megatron.data.record import Completion
from bapo_megatron.data.staleness import token_versions
from bapo_megatron.engine.base import GenerateRequest, SamplingSettings
from bapo_megatron.engine.sglang.protocol import (
    StreamParser,
    parse_info,
    parse_scores,
    score_body,
    stream_body,
)
from bapo_megatron.errors import RefusedError, RolloutError
from bapo_megatron.types import FinishReason
from tests.fakes.fake_sglang import INFO, top_fields

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
    retractions: int = 0,
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "finish_reason": finish,
        "num_retractions": retractions,
        "weight_version": str(version),
        "completion_tokens": total,
        "output_token_logprobs": _rows(ids) if rows is None else rows,
    }
    if spans is not None:
        meta["weight_versions"] = [
            {"version": str(v), "start": start, "end": end} for v, start, end in spans
        ]
    return {"output_ids": ids, "meta_info": meta}


class Parser(StreamParser):
    """Of a request to weights version 3; the run gave out 3 and 4."""

    def __init__(self, max_new_tokens: int = 20, **options: Any) -> None:
        request = GenerateRequest(
            input_ids=[0] * 4,
            sampling=SamplingSettings(1.0, max_new_tokens, seed=0),
            label="",
            version=3,
            **options,
        )
        super().__init__(request, {3, 4}.__contains__)

    def take(self, event: dict[str, Any]) -> Completion | None:
        return self.feed(b"data: %s\n\n" % json.dumps(event).encode())


def _plain(part: Completion | None) -> tuple[list[int], list[float], list[int], str] | None:
    if part is None:
        return None
    return (
        part.token_ids.tolist(),
        part.logprobs.tolist(),
        token_versions(part.versions).tolist(),
        str(part.finish_reason),
    )


def test_pieces_of_one_version_come_at_once() -> None:
    parser = Parser()
    assert _plain(parser.take(_event([8], 1))) == ([8], [-1.0], [3], "abort")
    assert _plain(parser.take(_event([16], 2))) == ([16], [-2.0], [3], "abort")
    assert not parser.is_finished
    last = parser.take(_event([24, 32], 4, finish=STOP, spans=[(3, 0, 4)]))
    assert _plain(last) == ([24, 32], [-3.0, -4.0], [3, 3], "stop")
    assert parser.is_finished
    assert parser.feed(b"data: [DONE]\n\n") is None


def test_events_after_a_change_of_version_wait_for_the_spans_of_the_last_one() -> None:
    parser = Parser()
    assert parser.take(_event([8], 1)) is not None
    assert parser.take(_event([16, 24], 3, version=4)) is None
    assert parser.take(_event([32], 4, version=4)) is None
    last = parser.take(_event([40], 5, version=4, finish=STOP, spans=[(3, 0, 2), (4, 2, 5)]))
    assert _plain(last) == ([16, 24, 32, 40], [-2.0, -3.0, -4.0, -5.0], [3, 4, 4, 4], "stop")


@pytest.mark.parametrize("ids", [[8], [8, 16]])
def test_an_abort_in_the_queue_repeats_a_token_that_is_not_taken_again(ids: list[int]) -> None:
    # The last token and every log-prob once more (tokenizer_manager._handle_abort_req).
    num_before = len(ids)
    parser = Parser()
    parser.take(_event(ids, num_before))
    event = _event(ids[-1:], num_before, finish=ABORT, rows=_rows(ids), spans=[(3, 0, num_before)])
    assert _plain(parser.take(event)) == ([], [], [], "abort")

    # Two events that were not fetched in time are sent as one: lists joined, the rest of the last.
    parser = Parser()
    parser.take(_event(ids, num_before))
    rows = _rows([24]) + _rows([*ids, 24])
    event = _event([24, 24], num_before + 1, finish=ABORT, rows=rows, spans=[(3, 0, 3)])
    assert _plain(parser.take(event)) == ([24], [-3.0], [3], "abort")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (_event([16], 3), "1 token ids where 2 of 3 are new"),
        (_event([], 0), "0 tokens after 1 of 20 tokens"),
        (_event([16] * 20, 21), "21 tokens after 1 of 20 tokens"),
        (_event([-1], 2), "token id -1"),
        (_event([16], 2, rows=[]), "log-probs of 0 tokens do not belong to its 1 tokens"),
        (_event([16], 2, rows=_rows([24])), "log-probs of 1 tokens do not belong to its 1 tokens"),
        (_event([16], 2, rows=[[None, 16, None]]), r"log-prob None at response token 1 \(id 16\)"),
        (_event([16], 2, finish={"type": "eos"}), "'eos' is not a valid FinishReason"),
        (_event([16], 2, finish=STOP, spans=[(3, 0, 1)]), "do not cover its 2 tokens"),
        (_event([16], 2, version=9), "weights version 9, which this run did not give it"),
        (_event([16], 2, version=4, finish=STOP, spans=[(4, 0, 2)]), "contradict the stream"),
        ({"error": {"message": "scheduler died", "code": 500}}, "HTTP 500: scheduler died"),
    ],
)
def test_nonsense_is_refused(event: dict[str, Any], message: str) -> None:
    parser = Parser()
    parser.take(_event([8], 1))
    with pytest.raises(ValueError, match=message) as caught:
        parser.take(event)
    assert not isinstance(caught.value, RefusedError)


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(ValueError, match="not an event of a stream: b'<html>"):
        Parser().feed(b"<html>\n\n")


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "too long", "code": 400}},
        _event([], 0, finish={"type": "abort", "message": "too long", "status_code": 400}),
    ],
)
def test_a_refused_request_is_told_apart_from_a_broken_server(event: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="HTTP 400: too long"):
        Parser().take(event)


def test_a_response_that_the_server_cut_off_is_no_full_length() -> None:
    with pytest.raises(RefusedError, match=r"1 of 20 tokens .*rollout\.server\.max_total_tokens"):
        Parser().take(_event([8], 1, finish={"type": "length"}, spans=[(3, 0, 1)]))
    full = Parser(max_new_tokens=1).take(_event([8], 1, finish={"type": "length"}))
    assert full is not None
    assert full.finish_reason is FinishReason.LENGTH


def test_every_sampling_setting_is_sent_so_that_no_server_default_acts() -> None:
    request = GenerateRequest(
        input_ids=(7, 8), sampling=SamplingSettings(0.5, 4, top_p=0.9, top_k=3, seed=6), label=""
    )
    assert stream_body(request) == {
        "input_ids": [7, 8],
        "sampling_params": {
            "temperature": 0.5,
            "max_new_tokens": 4,
            "top_p": 0.9,
            "top_k": 3,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "sampling_seed": 6,
            "stream_interval": 64,
        },
        "return_logprob": True,
        "stream": True,
    }


def test_scores_are_those_of_the_tokens_that_were_sent() -> None:
    rows = [[None, 5, None], [-1.0, 6, None], [None, 0, None]]
    scores = parse_scores({"meta_info": {"input_token_logprobs": rows}}, [5, 6, 7], 1, 0)
    np.testing.assert_equal(scores.logprobs, [-1.0, np.nan])
    for token_ids in ([5, 6], [5, 8, 7]):
        with pytest.raises(ValueError, match="log-probs of 3 input tokens do not belong"):
            parse_scores({"meta_info": {"input_token_logprobs": rows}}, token_ids, 1, 0)


def test_the_prompt_is_not_scored_and_may_be_in_the_cache() -> None:
    body = score_body([5, 6, 7, 8], 3, 0)
    assert body["logprob_start_len"] == 2
    assert "top_logprobs_num" not in body
    rows = [[None, 7, None], [-1.0, 8, None]]
    scores = parse_scores({"meta_info": {"input_token_logprobs": rows}}, [5, 6, 7, 8], 3, 0)
    assert scores.logprobs.tolist() == [-1.0]


TOP = {
    "input_token_logprobs": [[None, 7, None], [-1.0, 8, None], [-2.0, 9, None]],
    **top_fields(np.array([[8, 3], [4, 9]]), np.array([[-1.0, -1.5], [-0.5, -2.0]])),
}


def test_the_likeliest_tokens_are_asked_for_and_read() -> None:
    assert score_body([5, 6, 7, 8, 9], 3, 2)["top_logprobs_num"] == 2
    scores = parse_scores({"meta_info": TOP}, [5, 6, 7, 8, 9], 3, 2)
    assert scores.top_ids.tolist() == [[8, 3], [4, 9]]
    assert scores.top_logprobs.tolist() == [[-1.0, -1.5], [-0.5, -2.0]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input_top_logprobs_shape": [2, 3]}, r"\[2, 3\].*expected .*\[2, 2\]"),
        ({"input_top_logprobs_null_prefix": 0}, r"likeliest tokens as \(0"),
        ({"input_top_logprobs_idx_flat_b64_dtype": "int64"}, "int64"),
        ({"input_top_logprobs_val_flat_b64": "AAAA"}, "buffer size"),
        ({"input_top_logprobs_val_flat_b64": "AAAAAA=="}, "cannot reshape"),
        ({"input_top_logprobs_idx_flat_b64": base64.b64encode(b"\xff" * 16)}, "token id -1"),
        ({"input_token_logprobs": []}, "of 0 input tokens do not belong to the 3"),
    ],
)
def test_likeliest_tokens_that_do_not_belong_to_the_request_are_refused(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_scores({"meta_info": {**TOP, **changes}}, [5, 6, 7, 8, 9], 3, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"version": "0.5.23.post1"}, ""),
        ({"version": "0.10.0"}, ""),
        ({"version": "1.0"}, ""),
        ({"version": "0.5.22.post1"}, "needs at least 0.5.23"),
        ({"incremental_streaming_output": False}, "--incremental-streaming-output"),
    ],
)
def test_servers_are_refused_by_how_they_were_started(
    changes: dict[str, Any], message: str
) -> None:
    if message:
        with pytest.raises(RolloutError, match=message):
            parse_info("http://a", {**INFO, **changes}, {}, ())
    else:
        capabilities = parse_info("http://a", {**INFO, **changes, "tp_size": 2}, {}, (4, 5))
        assert (capabilities.num_ranks, capabilities.gpus) == (2, (4, 5))
        assert capabilities.methods == {"broadcast", "disk", "tensor"}


@pytest.mark.parametrize("name", ["pp_size", "dp_size"])
def test_a_server_with_ranks_that_buckets_do_not_reach_takes_directories_only(name: str) -> None:
    capabilities = parse_info("http://a", {**INFO, name: 2}, {}, ())
    assert (capabilities.num_ranks, capabilities.methods) == (2, {"disk"})
    assert capabilities.cache_tokens == (2 << 20 if name == "dp_size" else 1 << 20)


def test_the_requests_that_run_at_a_time_are_those_of_all_copies() -> None:
    states = [{"effective_max_running_requests_per_dp": number} for number in (12, 11)]
    assert parse_info("http://a", {**INFO, "internal_states": states}, {}, ()).max_requests == 23


def _with_top(event: dict[str, Any], rows: list[Any]) -> dict[str, Any]:
    event["meta_info"]["output_top_logprobs"] = rows
    return event


def test_the_likeliest_tokens_come_with_their_pieces_also_where_an_event_repeats_one() -> None:
    parser = Parser(top_logprobs=2)
    assert stream_body(parser.request)["top_logprobs_num"] == 2
    one, two = [[-0.5, 7, None], [-1.5, 8, None]], [[-0.25, 2**24 + 1, None], [-2.5, 8, None]]
    first = parser.take(_with_top(_event([8], 1), [one]))
    assert parser.take(_with_top(_event([16], 2, version=4), [two])) is None
    event = _event([24, 24], 3, 4, ABORT, [(3, 0, 1), (4, 1, 3)], rows=_rows([24, 24]))
    last = parser.take(_with_top(event, [one, two]))
    assert first is not None
    assert last is not None
    assert [part.columns["sampler_top_ids"].tolist() for part in (first, last)] == [
        [[7, 8]],
        [[2**24 + 1, 8], [7, 8]],
    ]
    assert [part.columns["sampler_top_logprobs"].tolist() for part in (first, last)] == [
        [[-0.5, -1.5]],
        [[-0.25, -2.5], [-0.5, -1.5]],
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"^\[\] likeliest tokens in 0 rows, expected 2 in 1$"),
        ([None], r"^\[0\] likeliest tokens in 1 rows"),
        ([[[-0.5, 7, None]]], r"^\[1\] likeliest tokens in 1 rows"),
        ([[[-0.5, 7, None], [None, 8, None]]], "None, 8, None.* at response token 0"),
        ([[[-0.5, 7, None], [-1.0, -8, None]]], "-1.0, -8, None.* at response token 0"),
    ],
)
def test_likeliest_tokens_that_do_not_fit_are_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parser(top_logprobs=2).take(_with_top(_event([8], 1), rows))


def _with_routes(event: dict[str, Any], rows: int) -> dict[str, Any]:
    """Experts 0, 1, 2 … of two layers with two experts per token."""
    values = np.arange(4 * rows, dtype="<i4")
    event["meta_info"]["routed_experts"] = base64.b64encode(values.tobytes()).decode()
    return event


def test_the_experts_of_a_response_come_with_its_last_event() -> None:
    parser = Parser(routes_from=1)
    body = stream_body(parser.request)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 1)
    first = parser.take(_event([8, 16], 2))
    assert first is not None
    assert first.routes is None
    # Four input tokens but the first, and three sampled ones but the last.
    last = parser.take(_with_routes(_event([24], 3, finish=STOP), rows=5))
    assert last is not None
    assert last.routes is not None
    assert last.routes.dtype == np.int16
    assert last.routes.tolist() == np.arange(20).reshape(5, 4).tolist()


def test_what_was_computed_again_after_a_retraction_has_unknown_experts() -> None:
    parser = Parser(routes_from=1)
    parser.take(_event([8], 1))
    parser.take(_event([16], 2, retractions=1))
    parser.take(_event([24, 32], 4, retractions=1))
    last = parser.take(_with_routes(_event([40], 5, finish=STOP, retractions=1), rows=7))
    assert last is not None
    assert last.routes is not None
    assert (last.routes[:5] == -1).all()  # the input, and two tokens
    assert last.routes[5:].tolist() == [[20, 21, 22, 23], [24, 25, 26, 27]]


@pytest.mark.parametrize("rows", [0, 3])
def test_experts_that_do_not_fit_the_tokens_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"{4 * rows} experts for 5 tokens"):
        Parser(routes_from=0).take(_with_routes(_event([8, 16], 2, finish=STOP), rows))


@pytest.mark.parametrize("before", [[], [8, 16]])
def test_an_abort_in_the_queue_has_no_experts(before: list[int]) -> None:
    parser = Parser(routes_from=0)
    for number, token_id in enumerate(before, start=1):
        parser.take(_event([token_id], number))
    last = parser.take(_event([], len(before), finish=ABORT))
    assert _plain(last) == ([], [], [], "abort")
    assert last is not None
    assert last.routes is None
    with pytest.raises(KeyError, match="routed_experts"):
        Parser(routes_from=0).take(_event([8], 1, finish=STOP))
