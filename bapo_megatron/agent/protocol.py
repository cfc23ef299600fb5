"""The OpenAI protocol: requests of chat completions and responses, and their answers.

Both are one conversation in and one turn out. What a request says about sampling is the run's to
decide: values that change nothing are taken, others are refused, or ignored if the run overrides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.record import Call, Conversation, checked_messages
from bapo_megatron.data.tools import Message
from bapo_megatron.runtime.calls import describe_invalid, shown_value
from bapo_megatron.types import FinishReason

MODEL = "policy"
"""The name of the model; requests may name any."""
_IGNORED = frozenset(
    (
        *("user", "metadata", "store", "seed", "service_tier", "safety_identifier", "verbosity"),
        *("prompt_cache_key", "prompt_cache_retention", "reasoning", "reasoning_effort"),
        *("include", "truncation", "background", "stream_options", "model", "max_tool_calls"),
        *("thinking", "cache_control"),
    )
)
"""Fields that do not change what is sampled."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tool_choice": ("auto", {"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}),
    "modalities": (["text"],),
    "functions": ([],),
    "n": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
}
"""Values besides null that leave the distribution as it is."""
_WHOLE = "send the whole conversation"
_NO_GRAMMAR = (
    "a grammar would sample from renormalised probabilities, which the trainer cannot compute, so "
    "importance ratios would be wrong; leave it out, or set rollout.agent_sampling=override to "
    "ignore it"
)
_GRAMMAR_FIELDS = frozenset(("tool_choice", "response_format", "text"))
"""Fields that need a grammar."""
_NEVER = {
    **dict.fromkeys(("conversation", "prompt"), _WHOLE),
    "n": "every call is one turn of the policy, so make several calls",
    "top_logprobs": "answers have log-probs of sampled tokens only; leave it out",
}
"""Fields that are refused even with ``override``, and what to do instead."""


class RefusalError(Exception):
    """A request that gets no turn, with the protocol's error as its one answer."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code
        kind = "invalid_request_error"
        self.content = {"error": {"message": message, "type": kind, "param": None, "code": code}}


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """What requests may say about sampling."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    overrides: bool = False
    """Ignore other values instead of refusing them (``rollout.agent_sampling: override``)."""

    def check(self, fields: Mapping[str, Any]) -> None:
        """Refuse fields that would change the distribution."""
        ours = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        for name, value in fields.items():
            if isinstance(value, dict) and name == "text":
                value = {key: part for key, part in value.items() if key != "verbosity"}
            if name in _IGNORED or value is None:
                continue
            accepted = (ours[name],) if name in ours else _NEUTRAL.get(name, ())
            if value in accepted or (self.overrides and name not in _NEVER):
                continue
            rule = f"must be {shown_value(accepted[0])}" if accepted else "must be left out"
            override = "leave it out, or set rollout.agent_sampling=override to ignore such values"
            remedy = _NO_GRAMMAR if name in _GRAMMAR_FIELDS else _NEVER.get(name, override)
            raise RefusalError(f"{name}: {rule}, got {shown_value(value)}; {remedy}")


class Request(BaseModel):
    """What requests of all protocols share."""

    model_config = ConfigDict(extra="allow")

    stream: bool | None = None

    @classmethod
    def read(cls, content: bytes) -> Self:
        """Read a body; a ``RefusalError`` names the first field that does not fit."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise RefusalError(f"the body: {describe_invalid(error)}") from error

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields that the run decides on."""
        return self.model_extra or {}


class _Function(BaseModel):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    type: Literal["function"]


class _ChatTool(_Tool):
    function: _Function


class _ResponsesTool(_Function, _Tool):  # its type is checked first
    pass


class ChatRequest(Request):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[_ChatTool] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    """As vLLM's server: ``prompt_token_ids``, and ``token_ids`` of the turn."""

    @property
    def limit(self) -> int | None:
        """Tokens of the turn."""
        return self.max_completion_tokens or self.max_tokens

    def conversation(self) -> Conversation:
        """Return messages and tools; ``RefusalError`` for messages of another form."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return Conversation(checked(self.messages), tools, stop=tuple(filter(None, stop)))


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) and value else value


class ResponsesRequest(Request):
    """``POST /v1/responses``."""

    input: Annotated[list[dict[str, Any]], BeforeValidator(_as_items)] = Field(min_length=1)
    previous_response_id: str | None = None
    instructions: str | None = None
    tools: list[_ResponsesTool] | None = None
    limit: int | None = Field(None, ge=1, alias="max_output_tokens")
    """Tokens of the turn."""

    def conversation(self) -> Conversation:
        """Return messages and tools; ``RefusalError`` for items that no message can hold."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            _add_item(messages, item)
        return Conversation(checked(messages), schemas(self.tools or ()))


def schemas(tools: Sequence[BaseModel]) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools that have a type of their protocol beside these fields."""
    return [
        {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
        for tool in tools
    ]


@dataclass(slots=True)
class Responses:
    """What the responses of an episode said, for requests that name them or their items.

    Ids depend on the conversation alone: after a restart the agent names the same ones.
    """

    _items: dict[str, dict[str, Any]] = field(default_factory=dict)
    _conversations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The items before and in each response, by its id."""
    _equal: dict[str, dict[str, Any]] = field(default_factory=dict)
    """One of equal items: a history that is sent in every request is held once."""

    def resolve(self, request: ResponsesRequest) -> None:
        """Put what a request names in its input; ``RefusalError`` for unknown ids."""
        previous = request.previous_response_id
        before = [] if previous is None else self._conversations.get(previous)
        if before is None:
            raise RefusalError(
                f"previous_response_id: must be the id of a response of this episode, got "
                f"{shown_value(previous)}; {_WHOLE}"
            )
        request.input = [*before, *map(self._resolved, request.input)]

    def noted(self, request: ResponsesRequest, answer: Answer) -> Answer:
        """Let later requests name the response to a resolved request."""
        response = answer.response()
        self._items |= {item["id"]: item for item in response["output"]}
        items = [*request.input, *response["output"]]
        equal = [self._equal.setdefault(json.dumps(item), item) for item in items]
        self._conversations[response["id"]] = equal
        return answer

    def _resolved(self, item: dict[str, Any]) -> dict[str, Any]:
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind != "item_reference":
            return item
        if (known := self._items.get(str(item.get("id")))) is None:
            raise RefusalError(
                f"input: an item_reference must have the id of an output item of this episode, got "
                f"{shown_value(item.get('id'))}; send the item itself"
            )
        return known


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _text_parts(item.get("content"))})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _text_parts(item.get("output"))
        messages.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id")})
    elif kind != "reasoning":
        raise RefusalError(
            f"input: must hold messages, function calls and their outputs, got {shown_value(kind)}"
        )


def _text_parts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    kinds = ("input_text", "output_text", "text")
    return [
        {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in kinds else part
        for part in content
    ]


def checked(messages: Sequence[Any]) -> list[Message]:
    """Return messages in the form of the record; ``RefusalError`` for others."""
    try:
        return checked_messages(messages)
    except ValueError as error:
        raise RefusalError(f"messages: {error}; send texts only") from error


@dataclass(frozen=True, slots=True)
class Answer:
    """The turn that answers a request."""

    call: Call
    message: Message
    """``tool_calls`` have JSON text as arguments."""
    renderer: ChatRenderer
    stop: str = ""
    """The stop string that ended the turn; its text ends before it."""

    @classmethod
    def of(cls, call: Call, conversation: Conversation, renderer: ChatRenderer) -> Self:
        """Decode a finished call; a turn without a valid call is plain text.

        The policy reads the errors of the others after the outputs of the valid ones.
        Ids of tool calls depend on the conversation alone, so that they repeat.
        """
        token_ids = call.turn.token_ids.tolist()
        calls = renderer.calls(token_ids, conversation.tools) if conversation.tools else ()
        has_calls = not all(tool_call.error for tool_call in calls)
        content = renderer.content(token_ids, has_calls=has_calls)
        message: Message = {"role": "assistant", "content": content}
        if not has_calls:
            stops = [(content.find(stop), stop) for stop in call.stop if stop in content]
            end, stop = min(stops, default=(len(content), ""))
            return cls(call, {**message, "content": content[:end]}, renderer, stop)
        key, _, number = call.name.partition(".")
        message["content"] = content.strip()
        message["tool_calls"] = [
            {
                "id": f"call_{key[:20]}_{number}_{place}",
                "type": "function",
                "function": {"name": tool_call.name, "arguments": json.dumps(tool_call.arguments)},
            }
            for place, tool_call in enumerate(calls)
            if not tool_call.error
        ]
        return cls(call, message, renderer)

    @property
    def separated(self) -> Message:
        """The message with its reasoning where ``rollout.agent_reasoning`` says."""
        reasoning, end, rest = self.message["content"].partition("</think>")
        if not (end and self.renderer.separates_reasoning):
            return self.message
        reasoning = reasoning.lstrip().removeprefix("<think>").strip()  # a template may open it
        return {**self.message, "reasoning_content": reasoning, "content": rest.lstrip()}

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The message's calls."""
        return list(self.message.get("tool_calls", ()))

    def chat(self, asked: ChatRequest) -> dict[str, Any]:
        """Return the body of a chat completion."""
        message = {"refusal": None, **self.separated}
        if self.tool_calls and not message["content"]:
            message["content"] = None
        choice = {"index": 0, "message": message, "finish_reason": self._finish()}
        fields = self._chat_fields("chat.completion") | self._prompt_ids(asked)
        choices = [choice | self._token_fields(asked)]
        return {**fields, "choices": choices, "usage": self._usage()}

    def chat_chunks(self, asked: ChatRequest) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed chat completion."""
        fields = self._chat_fields("chat.completion.chunk")
        delta = {name: value for name, value in self.separated.items() if name != "tool_calls"}
        choice = {"index": 0, "delta": delta, "finish_reason": None, **self._token_fields(asked)}
        yield {**fields, **self._prompt_ids(asked), "choices": [choice]}
        for place, call in enumerate(self.tool_calls):
            delta = {"tool_calls": [{"index": place, **call}]}
            yield {**fields, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield {**fields, "choices": [{"index": 0, "delta": {}, "finish_reason": self._finish()}]}
        options = asked.sampling.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            yield {**fields, "choices": [], "usage": self._usage()}

    def response(self, *, is_done: bool = True) -> dict[str, Any]:
        """Return the body of a response; at first its status is ``in_progress``."""
        is_cut = self._finish() == "length"
        status = ("incomplete" if is_cut else "completed") if is_done else "in_progress"
        num_prompt, num_turn = len(self.call.prompt()), self.call.num_tokens
        return {
            "id": f"resp_{self.call.name}",
            "object": "response",
            "created_at": 0,
            "model": MODEL,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut and is_done else None,
            "output": self._items() if is_done else [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": num_turn,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_prompt + num_turn,
            },
        }

    def response_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed response."""
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": self.response(is_done=False)},
            {"type": "response.in_progress", "response": self.response(is_done=False)},
        ]
        for place, item in enumerate(self._items()):
            at = {"item_id": item["id"], "output_index": place}
            is_text = item["type"] == "message"
            begun = {**item, "status": "in_progress"}
            begun["content" if is_text else "arguments"] = [] if is_text else ""
            events.append(
                {"type": "response.output_item.added", "output_index": place, "item": begun}
            )
            if is_text:
                [part] = item["content"]
                at["content_index"] = 0
                text = {"logprobs": [], **at}
                events += [
                    {"type": "response.content_part.added", "part": {**part, "text": ""}, **at},
                    {"type": "response.output_text.delta", "delta": part["text"], **text},
                    {"type": "response.output_text.done", "text": part["text"], **text},
                    {"type": "response.content_part.done", "part": part, **at},
                ]
            else:
                text = {"arguments": item["arguments"], "name": item["name"]}
                kind = "response.function_call_arguments"
                events.append({"type": f"{kind}.delta", "delta": item["arguments"], **at})
                events.append({"type": f"{kind}.done", **text, **at})
            events.append(
                {"type": "response.output_item.done", "output_index": place, "item": item}
            )
        response = self.response()
        events.append({"type": f"response.{response['status']}", "response": response})
        for number, event in enumerate(events):
            yield {**event, "sequence_number": number}

    def _prompt_ids(self, asked: ChatRequest) -> dict[str, Any]:
        return {"prompt_token_ids": self.call.prompt().tolist()} if asked.return_token_ids else {}

    def _token_fields(self, asked: ChatRequest) -> dict[str, Any]:
        """Return a choice's fields about its sampled tokens, which are those that train."""
        turn = self.call.turn
        token_ids = turn.token_ids.tolist()
        fields: dict[str, Any] = {"token_ids": token_ids} if asked.return_token_ids else {}
        if not asked.logprobs:
            return {"logprobs": None, **fields}
        rows = []
        for token_id, logprob in zip(token_ids, turn.logprobs.tolist(), strict=True):
            text = self.renderer.decode([token_id])
            # Part of a character has no bytes that are known.
            utf8 = None if "\ufffd" in text else list(text.encode())
            rows.append({"token": text, "bytes": utf8, "logprob": logprob, "top_logprobs": []})
        return {"logprobs": {"content": rows, "refusal": None}, **fields}

    def _finish(self) -> str:
        if self.call.finish_reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.tool_calls else "stop"

    def _chat_fields(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.call.name}", "object": kind, "created": 0, "model": MODEL}

    def _usage(self) -> dict[str, int]:
        num_prompt, num_turn = len(self.call.prompt()), self.call.num_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_turn,
            "total_tokens": num_prompt + num_turn,
        }

    def _items(self) -> list[dict[str, Any]]:
        status = "incomplete" if self._finish() == "length" else "completed"
        items: list[dict[str, Any]] = []
        if self.message["content"] or not self.tool_calls:
            part = {"type": "output_text", "text": self.message["content"], "annotations": []}
            item = {"type": "message", "id": f"msg_{self.call.name}", "role": "assistant"}
            items.append({**item, "status": status, "content": [part]})
        items += [
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "status": status,
                **call["function"],
            }
            for call in self.tool_calls
        ]
        return items


MODEL_FIELDS = {"id": MODEL, "object": "model", "created": 0, "owned_by": "bapo_megatron"}
"""The body of ``GET /v1/models/policy``, and the one entry of ``GET /v1/models``."""
