"""The proxy answers the unmodified openai SDK, and records what was sampled."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from bapo_megatron.agent import proxy as proxy_module
from bapo_megatron.agent.protocol import SamplingRules
from bapo_megatron.agent.proxy import Session, SessionLimits
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.record import Call
from bapo_megatron.types import FinishReason
from tests.agent.episodes import TOOL, Policy, make_renderer, open_session, sequences_of

ASK = [{"role": "user", "content": "1+1?"}]
ASKED: Any = {"model": "m", "messages": ASK}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
STRICT_TOOL: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
"""Streams of the SDK take no other; ``strict`` is no part of what is rendered."""


@pytest.fixture(scope="module")
def renderer(tokenizer_dir: Path) -> ChatRenderer:
    return make_renderer(tokenizer_dir)


@contextlib.asynccontextmanager
async def served(
    renderer: ChatRenderer,
    sample: Any,
    limits: SessionLimits | None = None,
    rules: SamplingRules | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Session, openai.AsyncOpenAI]]:
    """A session, and the SDK with its key."""
    async with (
        open_session(renderer, sample, limits=limits, rules=rules) as (session, url, key),
        openai.AsyncOpenAI(base_url=url, api_key=key, **options) as sdk,
    ):
        yield session, sdk


def says(*texts: str) -> Any:
    """The turns in order, the last one again and again."""
    turns = iter(texts)
    return lambda call: next(turns, texts[-1])


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_of_the_sdk_with_a_tool_is_one_sequence(
    renderer: ChatRenderer, streamed: bool
) -> None:
    policy = Policy(renderer, says(f"I add.{CALL}", "It is 2."))
    async with served(renderer, policy.sample) as (session, sdk):
        messages: list[Any] = list(ASK)
        if streamed:
            async with sdk.chat.completions.stream(
                model="policy", messages=messages, tools=[STRICT_TOOL], temperature=1
            ) as stream:
                completion: Any = await stream.get_final_completion()
        else:
            completion = await sdk.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL], temperature=1, n=1
            )
        [choice] = completion.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I add."
        [call] = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 1, "b": "ü"}
        # Rewritten as clients do: null fields, arguments serialised in another way.
        function = {"name": "add", "arguments": '{"b":"\\u00fc","a":1}'}
        turn = {"role": "assistant", "content": "I add.", "refusal": None, "function_call": None}
        turn["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
        answer = {
            "role": "tool",
            "tool_call_id": call.id,
            "content": [{"type": "text", "text": "2"}],
        }
        last = await sdk.chat.completions.create(
            model="policy", messages=[*messages, turn, answer], tools=[TOOL]
        )
        assert last.choices[0].message.content == "It is 2."
        assert (await sdk.models.list()).data[0].id == "policy"
    [sequence] = sequences_of(session.record)
    text = renderer.decode(sequence.response_token_ids.tolist())
    assert text == (
        f"I add.{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\nIt is 2.<|im_end|>"
    )
    prompt = renderer.decode(sequence.prompt.token_ids.tolist())
    assert prompt.startswith("<|im_start|>system\n# Tools\n<tools>\n{")
    assert prompt.endswith("<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n")
    assert policy.prompts[1] == [
        *sequence.prompt.token_ids,
        *sequence.response_token_ids[: -len("It is 2.") - 1],
    ]
    assert not any(call.is_fork for call in session.record.calls)


XML_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
GLM_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
CALL_OF_HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
)
LLAMA3_CALL = '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>'


@pytest.mark.parametrize(
    ("tool_format", "call", "answer", "written"),
    [
        ("hermes", CALL.replace(', "b": "ü"', ""), "2", "\n<tool_response>\n2\n"),
        ("llama3", LLAMA3_CALL, "2<|eot_id|>", "ipython<|end_header_id|>\n\n2"),
        ("qwen3_coder", XML_CALL, "2", "\n<tool_response>\n2\n"),
        ("glm45", GLM_CALL, "2", "\n<tool_response>\n2\n"),
        (
            "harmony",
            CALL_OF_HARMONY,
            "<|channel|>final<|message|>2<|return|>",
            '<|call|><|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|>',
        ),
    ],
)
async def test_an_episode_of_each_tool_format_is_one_sequence(
    tokenizer_dir: Path, tool_format: str, call: str, answer: str, written: str
) -> None:
    renderer = make_renderer(tokenizer_dir, tool_format)
    policy = Policy(renderer, says(call, answer, answer))
    async with served(renderer, policy.sample) as (session, sdk):
        messages: list[Any] = list(ASK)
        for asked in (None, {"role": "user", "content": "Sure?"}, None):
            completion = await sdk.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL]
            )
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for tool_call in message.tool_calls or ():
                assert json.loads(tool_call.function.arguments) == {"a": 1}
                messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": "2"})
            messages += [asked] if asked else []
        assert message.content == "2"
    [sequence] = sequences_of(session.record)
    assert written in renderer.decode(sequence.response_token_ids.tolist())
    assert not any(call.is_fork for call in session.record.calls)


async def test_the_policy_reads_the_errors_of_calls_beside_valid_ones(
    renderer: ChatRenderer,
) -> None:
    unknown = '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'
    policy = Policy(renderer, says(f"{unknown}{CALL}<tool_call>{{</tool_call>", unknown))
    async with served(renderer, policy.sample) as (session, sdk):
        first = await sdk.chat.completions.create(**ASKED, tools=[TOOL])
        message = first.choices[0].message
        assert message.content is None
        [call] = message.tool_calls or ()
        output = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        messages: list[Any] = [*ASK, message.model_dump(exclude_none=True), output]
        last = await sdk.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        assert last.choices[0].message.content == unknown
        assert last.choices[0].message.tool_calls is None
    assert len(sequences_of(session.record)) == 1
    outputs = renderer.decode(policy.prompts[1]).split("<tool_response>\n")[1:]
    assert [output.partition("\n")[0] for output in outputs] == [
        "error: there is no tool 'rm', only add",
        "2",
        "error: a tool call is not valid JSON (Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1))",
    ]
    assert not any(call.is_fork for call in session.record.calls)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_responses_api_continues_its_own_items(
    renderer: ChatRenderer, streamed: bool
) -> None:
    policy = Policy(renderer, says(CALL, "It is 2."))
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}  # type: ignore[dict-item]
    async with served(renderer, policy.sample) as (session, sdk):
        items: list[Any] = [{"role": "user", "content": "1+1?"}]

        async def ask() -> Any:
            asked: Any = {"model": "m", "input": items, "tools": [tool], "instructions": "Add."}
            if not streamed:
                return await sdk.responses.create(**asked)
            async with sdk.responses.stream(**asked) as stream:
                kinds = [event.type async for event in stream]
                assert kinds[0] == "response.created"
                assert kinds[-1] == "response.completed"
                return await stream.get_final_response()

        first = await ask()
        [call] = first.output
        assert (call.type, json.loads(call.arguments)) == ("function_call", {"a": 1, "b": "ü"})
        items += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
        second = await ask()
        assert second.output_text == "It is 2."
        assert second.usage.output_tokens == len("It is 2.") + 1
    assert len(session.record.sequences()) == 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("names", ["items", "response"])
async def test_items_and_responses_are_known_by_their_ids(
    renderer: ChatRenderer, names: str, streamed: bool
) -> None:
    policy = Policy(renderer, says(f"I add.{CALL}", "It is 2.", "Yes."))
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}  # type: ignore[dict-item]
    asked: Any = {
        "model": "m",
        "tools": [tool],
        "instructions": "Add.",
        "text": {"verbosity": "low"},
    }
    async with served(renderer, policy.sample) as (session, sdk):

        async def ask(items: list[Any], before: Any) -> Any:
            fields = {"previous_response_id": before.id} if before and names == "response" else {}
            if not streamed:
                return await sdk.responses.create(**asked, input=items, **fields)
            async with sdk.responses.stream(**asked, input=items, **fields) as stream:
                return await stream.get_final_response()

        async def play() -> list[str]:
            response, history, ids = None, list[Any](), list[str]()
            new: list[Any] = [{"role": "user", "content": "1+1?"}]
            for _ in range(3):
                history += new
                response = await ask(new if names == "response" else history, response)
                ids += [response.id, *(item.id for item in response.output)]
                history += [{"type": "item_reference", "id": item.id} for item in response.output]
                new = [
                    {"type": "function_call_output", "call_id": item.call_id, "output": "2"}
                    for item in response.output
                    if item.type == "function_call"
                ] or [{"role": "user", "content": "Sure?"}]
            return ids

        ids = await play()
        assert len(ids) == 7
        assert session.num_refusals == 0
        await session.restart()
        assert await play() == ids
        with pytest.raises(
            openai.BadRequestError, match=r"must have the id of .*, got 'msg_1'; send"
        ):
            await sdk.responses.create(**asked, input=[{"type": "item_reference", "id": "msg_1"}])
        with pytest.raises(openai.BadRequestError, match="got 'resp_1'; send the whole"):
            await sdk.responses.create(**asked, input="?", previous_response_id="resp_1")
    assert len(policy.calls) == len(session.record.calls) == 3
    [sequence] = sequences_of(session.record)
    text = renderer.decode([*sequence.prompt.token_ids, *sequence.response_token_ids])
    assert text.count("Add.") == text.count("1+1?") == text.count("Sure?") == 1


async def test_a_client_that_times_out_and_tries_again_makes_one_call(
    renderer: ChatRenderer,
) -> None:
    policy, may_go = Policy(renderer, says("Two.")), asyncio.Event()

    async def sample(call: Call) -> None:
        await may_go.wait()
        await policy.sample(call)

    async with served(renderer, sample, timeout=1, max_retries=8) as (session, sdk):
        asking = asyncio.create_task(sdk.chat.completions.create(**ASKED))
        await asyncio.sleep(2)
        may_go.set()
        assert (await asking).choices[0].message.content == "Two."
    assert len(policy.calls) == len(session.record.calls) == 1


async def test_a_call_with_the_header_is_served_and_does_not_train(renderer: ChatRenderer) -> None:
    policy = Policy(renderer, says("No.", "Yes."))
    async with served(renderer, policy.sample) as (session, sdk):
        judged = await sdk.chat.completions.create(**ASKED, extra_headers={"X-Bapo-Train": "false"})
        answer = await sdk.chat.completions.create(**ASKED)
        with pytest.raises(openai.BadRequestError, match=r"X-Bapo-Train: must be true .*'no'"):
            await sdk.chat.completions.create(**ASKED, extra_headers={"X-Bapo-Train": "no"})
    assert [reply.choices[0].message.content for reply in (judged, answer)] == ["No.", "Yes."]
    [sequence] = sequences_of(session.record)
    assert renderer.decode(sequence.response_token_ids.tolist()) == "Yes.<|im_end|>"
    assert session.record.num_tokens == sum(call.num_tokens for call in policy.calls)


async def test_a_stream_that_takes_long_is_kept_open_by_comments(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "_PAUSE_S", 0.05)
    policy = Policy(renderer, says("Two."))

    async def sample(call: Call) -> None:
        await asyncio.sleep(3)
        await policy.sample(call)

    async with served(renderer, sample, timeout=2, max_retries=0) as (_, sdk):
        stream = await sdk.chat.completions.create(**ASKED, stream=True)
        parts = [part.choices[0].delta.content or "" async for part in stream]
        assert "".join(parts) == "Two."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.7}, "temperature: must be 1.0, got 0.7; leave it out, or set"),
        ({"top_p": 0.5}, "top_p: must be 1.0, got 0.5"),
        ({"stop": list("abcde")}, "the body: 'stop"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs: must be 0, got 2; answers have"),
        ({"n": 2}, "n: must be 1, got 2; every call is one turn of the policy"),
        ({"tool_choice": "required"}, "tool_choice: must be 'auto', got 'required'"),
        ({"extra_body": {"min_p": 0.1}}, "min_p: must be 0, got 0.1"),
        ({"extra_body": {"top_a": 0.1}}, "top_a: must be left out, got 0.1"),
        (
            {"response_format": {"type": "json_object"}},
            'response_format: must be {"type": "text"}, got {"type": "json_object"}; a grammar '
            "would sample from renormalised probabilities, which",
        ),
        ({"messages": []}, "the body: 'messages' must have at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages: must hold"),
        ({"tools": [{"type": "custom"}]}, "the body: 'tools[0].type' must be 'function', got 'cus"),
        ({"tools": [{"type": "function"}]}, "the body: 'tools[0].function' is missing"),
    ],
)
async def test_what_would_change_the_distribution_is_refused_in_one_line(
    renderer: ChatRenderer, fields: dict[str, Any], message: str
) -> None:
    policy = Policy(renderer, says("Two."))
    async with served(renderer, policy.sample) as (session, sdk):
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.chat.completions.create(**{**ASKED, **fields})
        text = caught.value.body["message"]  # type: ignore[index,call-overload]
        assert text.startswith(message)
        assert "\n" not in text
        assert session.record.calls == []


async def test_sampling_parameters_are_overridden_where_the_run_says_so(
    renderer: ChatRenderer,
) -> None:
    policy = Policy(renderer, says("Two."))
    rules = SamplingRules(temperature=0.8, overrides=True)
    async with served(renderer, policy.sample, rules=rules) as (session, sdk):
        await sdk.chat.completions.create(**ASKED, temperature=0, top_p=0.1, seed=3)
        with pytest.raises(openai.BadRequestError, match="n: must be 1"):
            await sdk.chat.completions.create(**ASKED, n=2)
        with pytest.raises(openai.BadRequestError, match="conversation: must be left out"):
            await sdk.responses.create(model="m", input="1+1?", conversation="conv_1")
    assert len(session.record.calls) == 1


async def test_an_unknown_key_a_huge_body_and_a_wrong_path_get_one_answer_each(
    renderer: ChatRenderer,
) -> None:
    policy = Policy(renderer, says("Two."))
    async with open_session(renderer, policy.sample) as (session, url, key):
        async with openai.AsyncOpenAI(base_url=url, api_key="sk-other") as sdk:
            with pytest.raises(openai.AuthenticationError, match="OPENAI_API_KEY"):
                await sdk.chat.completions.create(**ASKED)
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as sdk:
            huge: Any = [{"role": "user", "content": "x" * 100_000_000}]
            with pytest.raises(openai.APIStatusError, match="at most 32 MB") as caught:
                await sdk.chat.completions.create(model="m", messages=huge)
            assert caught.value.status_code == 413
            with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
                await sdk.embeddings.create(model="m", input="x")
            await sdk.chat.completions.create(**ASKED)
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{url}/chat/completions", data=b"{") as reply,
        ):
            assert reply.status == 400
            assert "not valid JSON" in (await reply.json())["error"]["message"]
        headers = {"Authorization": f"bearer  {key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(f"{url}/responses", data=b"[]") as reply:
                error = (await reply.json())["error"]["message"]
                assert error == "the body: must be an object, got []"
            async with http.get(f"{url}/models/policy") as reply:
                assert (await reply.json())["id"] == "policy"
    assert len(session.record.calls) == 1
    assert session.num_refusals == 4  # all but the unknown key's


async def test_equal_calls_in_flight_end_with_the_episode(renderer: ChatRenderer) -> None:
    num_running = 0

    async def sample(call: Call) -> None:
        nonlocal num_running
        num_running += 1
        try:
            await asyncio.sleep(3600)
        finally:
            num_running -= 1

    async with served(renderer, sample, max_retries=0) as (session, sdk):
        asked: Any = {"model": "m", "messages": ASK, "max_tokens": 9}
        calls = [asyncio.create_task(sdk.chat.completions.create(**asked)) for _ in range(3)]
        while num_running < 3:
            await asyncio.sleep(0.01)
        await session.close()
        assert num_running == 0
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(answer, openai.APIError) for answer in answers)
        with pytest.raises(openai.AuthenticationError, match="the episode has ended"):
            await sdk.chat.completions.create(**asked)


async def test_a_client_that_never_reads_loses_nothing(renderer: ChatRenderer) -> None:
    policy = Policy(renderer, says("Two."))
    async with open_session(renderer, policy.sample) as (session, url, key):
        host, _, port = url.removeprefix("http://").removesuffix("/v1").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"messages": ASK, "stream": True}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        while not session.record.calls or not session.record.calls[0].is_finished:
            await asyncio.sleep(0.01)
        writer.close()
    [sequence] = sequences_of(session.record)
    assert renderer.decode(sequence.response_token_ids.tolist()) == "Two.<|im_end|>"


async def test_limits_of_calls_and_tokens_hold_over_all_branches(renderer: ChatRenderer) -> None:
    policy = Policy(renderer, says("0123456789"))
    limits = SessionLimits(max_calls=3, max_tokens=25, max_prompt_tokens=100)
    async with served(renderer, policy.sample, limits=limits, max_retries=0) as (session, sdk):
        huge: Any = [{"role": "user", "content": "x" * 2_000_000}]
        with pytest.raises(
            openai.APIStatusError, match=r"at most .* context length is 125 tokens"
        ) as caught:
            await sdk.chat.completions.create(model="m", messages=huge)
        assert caught.value.status_code == 413
        cut = await sdk.chat.completions.create(**ASKED, max_tokens=4)
        assert cut.choices[0].finish_reason == "length"
        assert session.ended_by is None
        with pytest.raises(openai.BadRequestError, match=r"context length is 100 tokens .*, got 2"):
            await sdk.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x" * 200}]
            )
        await sdk.chat.completions.create(**ASKED)
        last = await sdk.chat.completions.create(**ASKED)
        assert last.usage.completion_tokens == 25 - 4 - 11
        assert last.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="has had its 3 calls"):
            await sdk.chat.completions.create(**ASKED)
        assert session.ended_by is FinishReason.TURNS
        assert session.num_refusals == 2
    assert session.record.num_tokens == 25


async def test_calls_at_the_same_time_share_what_is_left(renderer: ChatRenderer) -> None:
    policy = Policy(renderer, says("0123456789"))
    limits = SessionLimits(max_calls=9, max_tokens=30, max_prompt_tokens=100)
    together = asyncio.Barrier(3)

    async def sample(call: Call) -> None:
        if call.max_tokens == 8:
            await together.wait()
        await policy.sample(call)

    async with served(renderer, sample, limits=limits) as (session, sdk):
        await asyncio.gather(
            *(sdk.chat.completions.create(**ASKED, max_tokens=8) for _ in range(3))
        )
        await asyncio.gather(
            *(sdk.chat.completions.create(**ASKED) for _ in range(2)), return_exceptions=True
        )
        with pytest.raises(openai.BadRequestError, match="maximum context length is 30 tokens"):
            await sdk.chat.completions.create(**ASKED)
    assert session.record.num_tokens == 30
    assert session.ended_by is FinishReason.LENGTH


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("puts_back", [False, True])
async def test_a_turn_ends_at_a_stop_string_and_is_continued_with_the_template_s_end(
    renderer: ChatRenderer, streamed: bool, puts_back: bool
) -> None:
    policy = Policy(renderer, says("Käse: Observation: 3", "Done."))
    async with served(renderer, policy.sample) as (session, sdk):
        asked: Any = {**ASKED, "stop": ["\n\n", "Observation:"]}
        if streamed:
            async with sdk.chat.completions.stream(**asked) as stream:
                first: Any = await stream.get_final_completion()
        else:
            first = await sdk.chat.completions.create(
                **asked, max_tokens=len("Käse: Observation:") + 1
            )
        [choice] = first.choices
        assert (choice.message.content, choice.finish_reason) == ("Käse: ", "stop")
        turn = {"role": "assistant", "content": "Käse: " + "Observation:" * puts_back}
        messages: Any = [*ASK, turn, {"role": "user", "content": "4"}]
        second = await sdk.chat.completions.create(model="m", messages=messages, stop="")
        assert second.choices[0].message.content == "Done."
    [sequence] = sequences_of(session.record)
    assert renderer.decode(sequence.response_token_ids.tolist()) == (
        "Käse: Observation:<|im_end|>\n<|im_start|>user\n4<|im_end|>\n<|im_start|>assistant\n"
        "Done.<|im_end|>"
    )
    # ä is two tokens; the end that the template wrote does not train.
    assert sequence.num_sampled == len("Käse: Observation:") + 1 + len("Done.") + 1
    assert session.record.num_tokens == len(sequence.response_token_ids)


@pytest.mark.parametrize("streamed", [False, True])
async def test_log_probs_and_token_ids_are_those_that_train(
    renderer: ChatRenderer, streamed: bool
) -> None:
    policy = Policy(renderer, says("Zwölf."))
    async with served(renderer, policy.sample) as (session, sdk):
        fields: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}}
        if streamed:
            async with sdk.chat.completions.stream(**ASKED, **fields) as stream:
                chunks = [event.chunk async for event in stream if event.type == "chunk"]
                completion: Any = await stream.get_final_completion()
            ids = chunks[0].choices[0].token_ids
            prompt_ids = chunks[0].prompt_token_ids
        else:
            completion = await sdk.chat.completions.create(**ASKED, **fields)
            ids, prompt_ids = completion.choices[0].token_ids, completion.prompt_token_ids
        plain = await sdk.chat.completions.create(**ASKED)
        assert plain.choices[0].logprobs is None
        assert "token_ids" not in plain.choices[0].model_extra
    sequence = sequences_of(session.record)[0]
    assert ids == sequence.response_token_ids.tolist()
    assert prompt_ids == list(sequence.prompt.token_ids)
    rows = completion.choices[0].logprobs.content
    assert [row.logprob for row in rows] == sequence.behaviour_logprobs.tolist()
    assert [row.token for row in rows] == ["Z", "w", "\ufffd", "\ufffd", *"lf.", "<|im_end|>"]
    assert [row.bytes for row in rows[:3]] == [[90], [119], None]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("opening", ["<think>", ""])
async def test_reasoning_is_beside_the_content_where_the_run_says_so(
    tokenizer_dir: Path, streamed: bool, opening: str
) -> None:
    renderer = make_renderer(tokenizer_dir, agent_reasoning="separate")
    policy = Policy(renderer, says(f"{opening}\nHm.\n</think>\n\nTwo.", "Three."))
    async with served(renderer, policy.sample) as (session, sdk):
        if streamed:
            async with sdk.chat.completions.stream(**ASKED) as stream:
                message: Any = (await stream.get_final_completion()).choices[0].message
        else:
            message = (await sdk.chat.completions.create(**ASKED)).choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm.", "Two.")
        for turn in (message.model_dump(), {"role": "assistant", "content": "Two."}):
            messages: Any = [*ASK, turn, {"role": "user", "content": "+1"}]
            await sdk.chat.completions.create(model="m", messages=messages)
        response = await sdk.responses.create(model="m", input="1+1?")
        assert response.output_text == "Three."
    assert [call.parent is None for call in session.record.calls] == [True, False, False, True]
