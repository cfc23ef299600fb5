"""Anthropic's protocol: requests of ``POST /v1/messages``, their answers and errors.

A request becomes the conversation of the same request in OpenAI's protocol, so an episode may use
both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from bapo_megatron.agent.protocol import MODEL, Answer, RefusalError, Request, checked, schemas
from bapo_megatron.data.record import Conversation
from bapo_megatron.types import FinishReason

_BILLING = "x-anthropic-billing-header"
"""Begins a system block of Claude Code that differs in every request and is not for the model."""
_ERROR_TYPES = {
    **{401: "authentication_error", 404: "not_found_error"},
    **{413: "request_too_large", 500: "api_error"},
}
"""By HTTP status; others are ``invalid_request_error``."""
_NO_THREADS = "thread_unsupported_request"
"""The code by which the SDK's tool runner learns to send the whole conversation."""
Block = dict[str, Any]


class _Tool(BaseModel):
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] = Field(alias="input_schema")


class _Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesRequest(Request):
    """``POST /v1/messages``, and ``/v1/messages/count_tokens``."""

    messages: list[_Message] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[_Tool] | None = None
    limit: int | None = Field(None, ge=1, alias="max_tokens")
    """Maximum number of tokens of the turn."""
    stop_sequences: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    thread: Any = None

    def conversation(self) -> Conversation:
        """Return messages and tools; ``RefusalError`` for blocks that no message can hold."""
        if self.messages[-1].role == "assistant":
            rule = "must not end with an assistant's, since the policy continues no prefilled turn"
            raise RefusalError(f"messages: {rule}; leave it out")
        if self.thread is not None:  # later requests would hold the new messages alone
            told = "thread: must be left out; send the whole conversation"
            raise RefusalError(told, code=_NO_THREADS)
        system = self.system
        if isinstance(system, list):
            system = [b for b in system if not str(b.get("text")).startswith(_BILLING)]
        messages = [{"role": "system", "content": system}] if system else []
        for message in self.messages:
            messages += _messages(message.role, message.content)
        tools = schemas(self.tools or ())
        return Conversation(checked(messages), tools, stop=self.stop_sequences or ())


def _messages(role: str, content: str | list[Block]) -> list[dict[str, Any]]:
    """Return the tool results of one message as messages of their own, and what else it holds."""
    texts, calls, results = [], [], []
    for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            identity, output = block.get("tool_use_id"), block.get("content")
            results.append({"role": "tool", "tool_call_id": identity, "content": output})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    if results and not texts:
        return results
    return [*results, {"role": role, "content": texts, "tool_calls": calls}]


def message(answer: Answer) -> dict[str, Any]:
    """Return the body of an answer."""
    is_cut = answer.call.finish_reason is FinishReason.LENGTH
    ended = "stop_sequence" if answer.stop else "end_turn"
    text = answer.message["content"]
    blocks: list[Block] = [{"type": "text", "text": text}] if text else []
    for call in answer.tool_calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    usage = {"input_tokens": len(answer.call.prompt()), "output_tokens": answer.call.num_tokens}
    return {
        "id": f"msg_{answer.call.name}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": blocks,
        "stop_reason": "max_tokens" if is_cut else "tool_use" if answer.tool_calls else ended,
        "stop_sequence": answer.stop or None,
        "usage": usage,
    }


def message_events(answer: Answer) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer."""
    whole = message(answer)
    end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_start", "message": {**whole, **dict.fromkeys(end), "content": []}}
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            begun = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            begun = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": begun}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": end, "usage": whole["usage"]}
    yield {"type": "message_stop"}


def error(refusal: RefusalError) -> dict[str, Any]:
    """Return the body of an error, which begins as clients expect for long prompts."""
    code = refusal.code
    text = f"prompt is too long: {refusal}" if code == "context_length_exceeded" else str(refusal)
    details = {"error_code": code, "unsupported": ["thread"]} if code == _NO_THREADS else None
    kind = _ERROR_TYPES.get(refusal.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": text, "details": details}}
