"""Tool calls in a chat: how a policy writes them, and the messages around them.

A *mark* is a piece of text that delimits a call. Where the tokenizer has a token for it, only that
token is the mark, so that a text which spells it out calls nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.runtime.files import parse_json

Message = dict[str, Any]
"""A chat message: ``role`` and ``content``, a text or parts of type ``text``; an assistant's may
have ``tool_calls`` and the reasoning before them, a tool's ``name`` and ``tool_call_id``."""

MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
}
"""The marks of each of ``config.rollout.TOOL_FORMATS``."""
_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""Further fields of a message that templates read."""
UNSEEN = frozenset(
    (
        *("image", "images", "video", "videos", "audio", "audios", "documents", "history"),
        *("system", "system_prompt", "functions", "choices", "options", "context", "passage"),
        *("chat_template_kwargs", "reasoning_effort", "enable_thinking"),
    )
)
"""Columns, and fields of messages, that the model should see and no template renders."""
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


class Mark(str):
    """A mark among the pieces of a turn."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, as the policy wrote it."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why it cannot be run, for the policy to read; empty if it can."""


def calls_in(tool_format: str, pieces: Sequence[str], names: Sequence[str]) -> tuple[ToolCall, ...]:
    """Return the calls in a turn of texts and ``Mark``s; ``names`` are those of the tools."""
    texts = _hermes_calls(pieces) if tool_format == "hermes" else _llama3_calls(pieces)
    return tuple(call if isinstance(call, ToolCall) else _call(call, names) for call in texts)


def escaped(text: str) -> str:
    """Return a tool's output in which tags of tool formats are no tags."""
    for tag in _TAGS:
        text = text.replace(tag, f"&lt;{tag[1:]}")
    return text


def checked_message(message: Any) -> Message:
    """Return a message of a data file or an environment in the form that templates read.

    Parts are joined to a text, and arguments of calls that are JSON texts become objects.

    Raises:
        ValueError: It is not a chat message.
    """
    fields = message if isinstance(message, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    calls = fields.get("tool_calls") or fields.get("function_call")
    if content is None and calls:
        content = ""
    if isinstance(content, list) and content and all(map(_is_text_part, content)):
        content = "".join(part["text"] for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"must hold messages with role and content, got {shown_value(message)}")
    if unseen := [name for name in fields if name in UNSEEN | {"tools"} and fields[name]]:
        raise ValueError(f"must hold messages of text alone, got one with {unseen[0]}")
    checked: Message = {"role": role, "content": content}
    for name in _TEXTS:
        if isinstance(fields.get(name), str):
            checked[name] = fields[name]
    if calls:
        checked["tool_calls"] = [_checked_call(call) for call in _list(calls)]
    return checked


def _is_text_part(part: Any) -> bool:
    is_text = isinstance(part, dict) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _checked_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"must hold tool_calls with a name, got {shown_value(call)}")
    function = {"name": function["name"], "arguments": arguments or {}}
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": function}


def _hermes_calls(pieces: Sequence[str]) -> Iterator[str | ToolCall]:
    """``<tool_call>{json}</tool_call>``, any number of times between other text."""
    start, end = MARKS["hermes"]
    text: str | None = None
    for piece in (*pieces, Mark("")):
        is_mark = isinstance(piece, Mark)
        if is_mark and piece == end and text is not None:
            yield text
        elif is_mark and (text is not None or piece == end):
            lacks = end if text is not None else start
            yield ToolCall(error=f"a tool call lacks its {lacks}")
        if is_mark:
            text = "" if piece == start else None
        elif text is not None:
            text += piece


def _llama3_calls(pieces: Sequence[str]) -> Iterator[str | ToolCall]:
    """``<|python_tag|>{json}; {json}``, or a turn that is nothing but such an object."""
    place = next((n for n, piece in enumerate(pieces) if isinstance(piece, Mark)), None)
    text = "".join(pieces if place is None else pieces[place + 1 :]).strip()
    if place is None and not (text.startswith("{") and '"name"' in text):
        return
    if not text:
        yield text
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = len(text)  # what is wrong with it is said where it is parsed
        yield text[at:end]
        rest = text[end:].lstrip("; \n")
        at = len(text) - len(rest)


def _call(text: str, names: Sequence[str]) -> ToolCall:
    try:
        value = parse_json(text)
    except ValueError as error:
        return ToolCall(error=f"a tool call is {error}")
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return ToolCall(error='a tool call must be {"name": …, "arguments": {…}}')
    if name not in names:
        return ToolCall(error=f"there is no tool {shown_value(name)}, only {', '.join(names)}")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            return ToolCall(name, error=f"the arguments of {name} are {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name, error=f"the arguments of {name} must be an object")
    return ToolCall(name, arguments)
