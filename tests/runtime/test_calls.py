"""What crosses the border between two processes arrives as it was sent."""

import asyncio
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from bapo_megatron.runtime.calls import (
    Answers,
    Call,
    Failure,
    Notice,
    Progress,
    Reply,
    Request,
    Result,
    decode,
    encode,
    shown_value,
)


@dataclass(frozen=True, slots=True)
class Part:
    path: Path
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    parts: tuple[Part, ...]
    difference: float | None


WHOLE = Whole((Part(Path("/a"), (2, 3)), Part(Path("/b"), ())), math.inf)
SAME = Call("same", Whole, Whole)


def test_a_request_is_one_line_with_the_fields_of_its_record() -> None:
    line = encode(Request(7, "same", WHOLE))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert json.loads(line) == {
        "id": 7,
        "call": "same",
        "arguments": {
            "parts": [{"path": "/a", "shape": [2, 3]}, {"path": "/b", "shape": []}],
            "difference": math.inf,
        },
    }


def test_a_call_is_answered_with_records_on_both_sides() -> None:
    received: list[Whole] = []

    async def same(request: Whole) -> Whole:
        received.append(request)
        return request

    answers = Answers()
    answers.bind(SAME, same)
    request = decode(Request, json.loads(encode(Request(1, "same", WHOLE))))
    sent = encode(Result(1, asyncio.run(answers.answer(request))))
    reply = decode(Reply, json.loads(sent))
    assert received == [WHOLE]
    assert isinstance(reply, Result)
    assert decode(SAME.response, reply.result) == WHOLE


def test_a_value_that_is_not_a_number_stays_one() -> None:
    sent = encode(Request(1, "same", Whole((), math.nan)))
    assert math.isnan(decode(Whole, decode(Request, json.loads(sent)).arguments).difference or 0.0)


@pytest.mark.parametrize(
    "reply",
    [
        *(Result(3, None), Failure(3, "no server"), Progress("1/8"), Notice("it is slow")),
        Progress("\ud800 half"),  # of a surrogate pair
    ],
)
def test_replies_are_told_apart_by_their_fields(reply: Reply) -> None:
    assert decode(Reply, json.loads(encode(reply))) == reply


def test_what_does_not_fit_is_refused_with_the_name_of_the_field() -> None:
    answers = Answers()
    answers.bind(SAME, lambda request: asyncio.sleep(0, request))
    with pytest.raises(ValueError, match="difference"):
        asyncio.run(answers.answer(Request(1, "same", {"parts": []})))
    with pytest.raises(ValueError, match=r"'Result\.result' is missing"):
        decode(Reply, {"id": 1, "answer": None})
    with pytest.raises(ValueError, match="<class 'object'>"):
        encode(Result(1, object()))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\nb  c", "'a b c'"),
        ("\n", r"'\n'"),
        (" \t", r"' \t'"),
        ("\nStop: ", r"'\nStop: '"),
        ("\x1b[31m\0\ud800 π", r"'\x1b[31m\x00\ud800 π'"),
        ({"a": [None, True, "b"]}, '{"a": [null, true, "b"]}'),
        ("x" * 80, f"'{'x' * 80}'"),
        ("x" * 81, f"'{'x' * 80}…'"),
    ],
)
def test_a_value_is_shown_on_one_line_that_no_terminal_obeys(value: object, shown: str) -> None:
    assert shown_value(value) == shown
