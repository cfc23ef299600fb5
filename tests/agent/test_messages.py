"""Anthropic's protocol on the record of OpenAI's: what clients of both send and read."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bapo_megatron.agent import proxy
from bapo_megatron.agent.messages import MessagesRequest
from bapo_megatron.agent.protocol import ChatRequest, SamplingRules
from bapo_megatron.agent.proxy import Session, SessionLimits
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.record import Call
from tests.agent.episodes import TOOL, Policy, make_renderer, open_session, sequences_of

ASK = [{"role": "user", "content": "1+1?"}]
USE_TOOL: dict[str, Any] = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "cache_control": {"type": "ephemeral"},
}
"""``TOOL`` as Anthropic writes it."""
CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def renderer(tokenizer_dir: Path) -> ChatRenderer:
    return make_renderer(tokenizer_dir)


class Client:
    """What Anthropic's SDK sends and reads, by hand."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self.http, self.url, self.headers = http, f"{url}/messages", {"x-api-key": key}

    async def ask(
        self, messages: Sequence[Any] = ASK, path: str = "", **fields: Any
    ) -> tuple[int, Any]:
        body = {"model": "m", "max_tokens": 9999, "messages": messages, **fields}
        async with self.http.post(self.url + path, json=body, headers=self.headers) as reply:
            if fields.get("stream") and reply.status == 200:
                return 200, read_stream(await reply.text())
            return reply.status, json.loads(await reply.text(), parse_constant=pytest.fail)

    async def turn(self, messages: Sequence[Any] = ASK, **fields: Any) -> dict[str, Any]:
        status, message = await self.ask(messages, **fields)
        assert status == 200, message
        return message  # type: ignore[no-any-return]


def read_stream(text: str) -> dict[str, Any]:
    """The message that a stream adds up to, as Anthropic documents its events."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    *events, rest = text.split("\n\n")
    assert rest == ""
    for event in events:
        name, content = event.split("\n")
        value = json.loads(content.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        kind, index = value["type"], value.get("index")
        if kind == "message_start":
            message = value["message"]
            assert (message["content"], message["stop_reason"]) == ([], None)
        elif kind == "content_block_start":
            assert index == len(message["content"])
            message["content"].append(value["content_block"])
        elif kind == "content_block_delta" and value["delta"]["type"] == "text_delta":
            message["content"][index]["text"] += value["delta"]["text"]
        elif kind == "content_block_delta":
            inputs[index] = inputs.get(index, "") + value["delta"]["partial_json"]
        elif kind == "content_block_stop" and index in inputs:
            assert message["content"][index]["input"] == {}
            message["content"][index]["input"] = json.loads(inputs[index])
        elif kind == "message_delta":
            message |= value["delta"] | {"usage": value["usage"]}
    assert kind == "message_stop"
    return message


@contextlib.asynccontextmanager
async def served(
    renderer: ChatRenderer, sample: Any, **options: Any
) -> AsyncIterator[tuple[Session, Client]]:
    async with (
        open_session(renderer, sample, **options) as (session, url, key),
        aiohttp.ClientSession() as http,
    ):
        yield session, Client(http, url, key)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_with_tools_is_one_sequence(
    renderer: ChatRenderer, streamed: bool
) -> None:
    turns = iter((f"I add.{CALL.format(1)}{CALL.format(2)}", "It is 3."))
    policy = Policy(renderer, lambda call: next(turns))
    async with served(renderer, policy.sample) as (session, client):
        asked: Any = {"tools": [USE_TOOL], "stream": streamed, "temperature": 1.0}
        first = await client.turn(**asked, system=[{"type": "text", "text": "s"}])
        text, *uses = first.pop("content")
        usage = first.pop("usage")
        identity = first.pop("id")
        assert first == {
            "type": "message",
            "role": "assistant",
            "model": "policy",
            "stop_reason": "tool_use",
            "stop_sequence": None,
        }
        assert identity == f"msg_{session.record.calls[0].name}"
        assert usage == {
            "input_tokens": len(policy.prompts[0]),
            "output_tokens": session.record.calls[0].num_tokens,
        }
        assert text == {"type": "text", "text": "I add."}
        assert [(use["type"], use["name"], use["input"]) for use in uses] == [
            ("tool_use", "add", {"a": 1}),
            ("tool_use", "add", {"a": 2}),
        ]
        history: list[Any] = [
            *ASK,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "?"}, text, *uses]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": uses[0]["id"], "content": "one"},
                    {
                        "type": "tool_result",
                        "tool_use_id": uses[1]["id"],
                        "content": [{"type": "text", "text": "two"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ]
        last = await client.turn(history, **asked, system="s")
        assert last["content"] == [{"type": "text", "text": "It is 3."}]
        assert last["stop_reason"] == "end_turn"
    [sequence] = sequences_of(session.record)
    assert renderer.decode(sequence.response_token_ids.tolist()) == (
        f"I add.{CALL.format(1)}{CALL.format(2)}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\nIt is 3.<|im_end|>"
    )
    assert not any(call.is_fork for call in session.record.calls)


def test_blocks_are_the_messages_of_chat_completions() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = ChatRequest.model_validate(
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "I add.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": ""},
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": None},
                {"role": "user", "content": "well?"},
            ],
            "tools": [TOOL],
        }
    ).conversation()
    texts = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=74943;"}
    turn = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c1"}
    messages = MessagesRequest.model_validate(
        {
            "system": [header, *texts],
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": turn},
                {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
                {"role": "assistant", "content": []},
                {"role": "user", "content": "well?"},
            ],
            "tools": [USE_TOOL],
        }
    ).conversation()
    assert messages.keys() == chat.keys()
    assert messages.tools == chat.tools


async def test_an_episode_may_use_both_protocols(renderer: ChatRenderer) -> None:
    turns = iter((CALL.format(1), "It is 1.", "Yes."))
    policy = Policy(renderer, lambda call: next(turns))
    async with served(renderer, policy.sample) as (session, client):
        first = await client.turn(tools=[USE_TOOL])
        [use] = first["content"]
        function = {"name": "add", "arguments": '{"a":1}'}
        chat: list[Any] = [
            *ASK,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": use["id"], "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": use["id"], "content": "1"},
        ]
        url = client.url.replace("messages", "chat/completions")
        headers = {"Authorization": f"Bearer {client.headers['x-api-key']}"}
        body = {"messages": chat, "tools": [TOOL]}
        async with client.http.post(url, json=body, headers=headers) as reply:
            said = (await reply.json())["choices"][0]["message"]["content"]
        assert said == "It is 1."
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "1"}
        history = [
            *ASK,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": said},
            {"role": "user", "content": "Sure?"},
        ]
        await client.turn(history, tools=[USE_TOOL])
    assert len(session.record.calls) == 3
    assert len(session.record.sequences()) == 1


@pytest.mark.parametrize(
    "value",
    ['"\\ud83d"', "1e999", "NaN", "[" * 300 + "]" * 300, "[" * 3000 + "]" * 3000],
    ids=["half of a surrogate pair", "infinity", "not a number", "deep", "deeper"],
)
async def test_arguments_that_clients_cannot_parse_arrive_as_text(
    renderer: ChatRenderer, value: str
) -> None:
    turns = iter((CALL.format(value), "Sorry."))
    policy = Policy(renderer, lambda call: next(turns))
    async with served(renderer, policy.sample) as (session, client):
        message = await client.turn(tools=[USE_TOOL])
        assert message["stop_reason"] == "end_turn"
        assert message["content"] == [{"type": "text", "text": CALL.format(value)}]
        turn = {"role": "assistant", "content": message["content"]}
        await client.turn([*ASK, turn, {"role": "user", "content": "No."}], tools=[USE_TOOL])
    assert len(session.record.sequences()) == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"temperature": 0.5}, "temperature: must be 1.0, got 0.5; leave it out, or set"),
        ({"stop_sequences": [""]}, "the body: 'stop_sequences[0]' must have at least 1 char"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: must be 'auto', got"),
        ({"max_tokens": 0}, "the body: 'max_tokens' must be greater than or equal to 1, got 0"),
        ({"messages": []}, "the body: 'messages' must have at least 1 item"),
        (
            {"messages": [*ASK, {"role": "assistant", "content": "It"}]},
            "messages: must not end with an assistant's",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages: must hold messages with role and content, got",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "the body: 'tools[0].type' must be 'custom', got 'web_search_20250305'",
        ),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, "prompt is too long: messages: "),
    ],
)
async def test_a_refusal_is_an_error_of_anthropics_form(
    renderer: ChatRenderer, fields: dict[str, Any], text: str
) -> None:
    policy = Policy(renderer, lambda call: "Two.")
    limits = SessionLimits(max_calls=9, max_tokens=999, max_prompt_tokens=300)
    async with served(renderer, policy.sample, limits=limits) as (session, client):
        for stream in (False, True):
            status, content = await client.ask(**{**fields, "stream": stream})
            error = content["error"]
            assert (status, content["type"]) == (400, "error")
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith(text)
            assert "\n" not in error["message"]
    assert session.record.calls == []


async def test_other_statuses_have_their_types(renderer: ChatRenderer) -> None:
    async def fails(call: Call) -> None:
        raise RuntimeError("no engine")

    async with served(renderer, fails) as (session, client):
        refusals = [
            await client.ask(path="/batches"),
            await client.ask([{"role": "user", "content": "x" * 40_000_000}]),
            await client.ask(),
        ]
        client.headers["x-api-key"] = "sk-other"
        refusals.append(await client.ask())
        assert [(status, content["error"]["type"]) for status, content in refusals] == [
            (404, "not_found_error"),
            (413, "request_too_large"),
            (500, "api_error"),
            (401, "authentication_error"),
        ]
        with pytest.raises(RuntimeError, match="no engine"):
            session.end.result()


async def test_what_clients_always_send_is_taken_and_more_is_overridden(
    renderer: ChatRenderer,
) -> None:
    policy = Policy(renderer, lambda call: "Two.")
    usual: Any = {
        "temperature": 1,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tool_choice": {"type": "auto"},
        "stop_sequences": [],
    }
    async with served(renderer, policy.sample) as (_, client):
        await client.turn(**usual)
    rules = SamplingRules(temperature=0.7, overrides=True)
    async with served(renderer, policy.sample, rules=rules) as (_, client):
        await client.turn(**usual, context_management={"edits": []}, top_k=5)
        # Ignoring it would lose messages; with these details the SDK goes on without it.
        status, content = await client.ask(thread={"type": "create"})
        assert status == 400
        assert content["error"]["details"] == {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_turn_ends_at_a_stop_sequence_and_is_continued(
    renderer: ChatRenderer, streamed: bool
) -> None:
    turns = iter(("It is 2. And 3.", "Yes."))
    policy = Policy(renderer, lambda call: next(turns))
    async with served(renderer, policy.sample) as (session, client):
        turn = await client.turn(stop_sequences=["x", " And"], stream=streamed)
        assert (turn["stop_reason"], turn["stop_sequence"]) == ("stop_sequence", " And")
        assert turn["content"] == [{"type": "text", "text": "It is 2."}]
        more = [{"role": "assistant", "content": turn["content"]}, {"role": "user", "content": "?"}]
        await client.turn([*ASK, *more])
    [sequence] = session.record.sequences()
    assert [call.num_tokens for call in sequence] == [len("It is 2. And"), len("Yes.") + 1]


async def test_a_retry_gets_the_same_turn_and_a_cut_turn_says_so(renderer: ChatRenderer) -> None:
    turns = iter(("Two.", "Three."))
    policy = Policy(renderer, lambda call: next(turns))
    async with served(renderer, policy.sample) as (session, client):
        first = await client.turn()
        client.headers["x-stainless-retry-count"] = "1"
        assert await client.turn() == first
        cut = await client.turn(max_tokens=3, stream=True)
        assert (cut["content"], cut["stop_reason"]) == (
            [{"type": "text", "text": "Thr"}],
            "max_tokens",
        )
    assert len(session.record.calls) == 2


async def test_tokens_are_counted_without_a_call(renderer: ChatRenderer) -> None:
    policy = Policy(renderer, lambda call: "Two.")
    async with served(renderer, policy.sample) as (session, client):
        asked: Any = {"tools": [USE_TOOL], "system": "s"}
        status, count = await client.ask(path="/count_tokens", **asked)
        assert status == 200
        assert session.record.calls == []
        message = await client.turn(**asked)
        assert count == {"input_tokens": message["usage"]["input_tokens"]}


async def test_a_stream_that_fails_after_a_comment_ends_with_an_error(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_PAUSE_S", 0.01)

    async def fails(call: Call) -> None:
        await asyncio.sleep(0.5)
        raise RuntimeError("no engine")

    async with served(renderer, fails) as (session, client):
        body = {"messages": ASK, "stream": True}
        async with client.http.post(client.url, json=body, headers=client.headers) as reply:
            *comments, event = (await reply.text()).strip().split("\n\n")
        assert set(comments) == {": the turn is being sampled"}
        assert event == (
            'event: error\ndata: {"type": "error", "error": {"type": "api_error", '
            '"message": "the run has failed", "details": null}}'
        )
        assert session.end.exception() is not None
