"""Tool calls in a chat: how a policy writes them, and the messages around them.

A *mark* is a piece of text that delimits a call. Where the tokenizer has a token for it, only that
token is the mark, so that a text which spells it out calls nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

from pydantic_core import from_json

from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.runtime.files import parse_json

Message = dict[str, Any]
"""A chat message: ``role`` and ``content``, a text or parts of type ``text``; an assistant's may
have ``tool_calls`` and the reasoning before them, a tool's ``name`` and ``tool_call_id``."""

_TAGS = ("<tool_call>", "</tool_call>")
_GLM_TAGS = (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MARKS = {
    "hermes": _TAGS,
    "llama3": ("<|python_tag|>",),
    "qwen3_coder": _TAGS,
    "glm45": _GLM_TAGS,
    "harmony": (
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
}
"""The marks of each of ``config.rollout.TOOL_FORMATS``."""
_XML = {
    "qwen3_coder": (
        re.compile(r"\s*<function=([^>\n]+)>\s*"),
        re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL),
        "</function>",
    ),
    "glm45": (
        re.compile(r"\s*([^<\n]+)\s*"),
        re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL),
        "",
    ),
}
"""How a call begins, one argument, and how the call ends."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Values as Qwen3-Coder's template writes them."""
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
Schemas = Mapping[str, Mapping[str, Any] | None]
"""The JSON schemas of each tool's arguments, by its name."""
_ESCAPED = (*_GLM_TAGS, "<tool_response>", "</tool_response>")


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


def calls_in(
    tool_format: str, pieces: Sequence[str], tools: Sequence[Mapping[str, Any]]
) -> tuple[ToolCall, ...]:
    """Return the calls in a turn of texts and ``Mark``s; ``tools`` are JSON schemas."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    if tool_format == "harmony":
        return tuple(_harmony_calls(pieces, schemas))
    texts = _llama3_calls(pieces) if tool_format == "llama3" else _tagged_calls(pieces)
    read = partial(_xml_call, *_XML[tool_format]) if tool_format in _XML else _json_call
    return tuple(text if isinstance(text, ToolCall) else read(text, schemas) for text in texts)


def content_in(tool_format: str, pieces: Sequence[str]) -> str:
    """Return what a turn of texts and ``Mark``s says before its calls.

    With Harmony: its messages to the user, and those of the channel analysis in think tags.
    """
    if tool_format != "harmony":
        first = next((n for n, piece in enumerate(pieces) if isinstance(piece, Mark)), 0)
        return "".join(pieces[:first])
    if not any(isinstance(piece, Mark) for piece in pieces):
        return "".join(pieces)
    return "".join(
        f"<think>{text}</think>" if "analysis" in header else text
        for header, text, _ in _harmony_messages(pieces)
        if not _recipient(header)
    )


def with_errors(calls: Sequence[ToolCall], messages: Sequence[Message]) -> list[Message]:
    """Add the errors of calls that no client saw to the outputs of the others, in their order."""
    outputs = list(takewhile(lambda message: message["role"] == "tool", messages))
    rest = messages[len(outputs) :]
    for place, call in enumerate(calls):
        if call.error and outputs:
            outputs.insert(place, {"role": "tool", "content": f"error: {call.error}"})
    return [*outputs, *rest]


def escaped(text: str) -> str:
    """Return a tool's output in which tags of tool formats are no tags."""
    for tag in _ESCAPED:
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
        calls = calls if isinstance(calls, list) else [calls]
        checked["tool_calls"] = [_checked_call(call) for call in calls]
    return checked


def _is_text_part(part: Any) -> bool:
    is_text = isinstance(part, dict) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


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


def _tagged_calls(pieces: Sequence[str]) -> Iterator[str | ToolCall]:
    """``<tool_call>…</tool_call>``, any number of times between other text."""
    start, end = _TAGS
    text: str | None = None
    for piece in (*pieces, Mark("")):
        is_mark = isinstance(piece, Mark) and piece in (start, end, "")
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


def _harmony_messages(pieces: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield header, text and end of each ``HEADER<|message|>TEXT<|end|>`` of a turn."""
    header, text = "", None
    for piece in (*pieces, Mark("")):
        if not isinstance(piece, Mark) or piece in ("<|channel|>", "<|constrain|>"):
            header, text = (header + piece, None) if text is None else (header, text + piece)
        elif piece == "<|message|>":
            text = ""
        else:
            if text is not None:
                yield header, text, piece
            header, text = "", None


def _recipient(header: str) -> str:
    """The tool that a message is for; empty if it is for the user."""
    match = re.search(r"\bto=(?:functions\.)?([^\s<]+)", header)
    return match[1] if match else ""


def _harmony_calls(pieces: Sequence[str], schemas: Schemas) -> Iterator[ToolCall]:
    """``… to=functions.NAME …<|message|>{json}<|call|>``, or ``<|end|>`` at last."""
    for header, text, end in _harmony_messages(pieces):
        if name := _recipient(header):
            is_whole = end in ("<|call|>", "<|end|>")
            error = ToolCall(name, error="a tool call lacks its <|call|>")
            yield _call(name, text, schemas) if is_whole else error


def _json_call(text: str, schemas: Schemas) -> ToolCall:
    try:
        value = parse_json(text)
    except ValueError as error:
        return ToolCall(error=f"a tool call is {error}")
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return ToolCall(error='a tool call must be {"name": …, "arguments": {…}}')
    return _call(name, value.get("arguments", value.get("parameters")), schemas)


def _xml_call(
    opening: re.Pattern[str], argument: re.Pattern[str], end: str, text: str, schemas: Schemas
) -> ToolCall:
    """A call whose arguments are texts, which the tool's schema types."""
    if (match := opening.match(text)) is None:
        return ToolCall(error="a tool call must begin with the tool's name")
    name, at, arguments = match[1].strip(), match.end(), {}
    properties = (schemas.get(name) or {}).get("properties") or {}
    while match := argument.match(text, at):
        key, at = match[1].strip(), match.end()
        arguments[key] = _typed(match[2], _types(properties.get(key)))
    if (rest := text[at:].strip()) != end:
        rule = f"must end with {end}" if end else "must hold arguments only"
        return ToolCall(name, error=f"a call of {name} {rule}, got {shown_value(rest)}")
    return _call(name, arguments, schemas)


def _types(schema: Any) -> set[str]:
    """The types that a JSON schema names; none if it names none."""
    schema = schema if isinstance(schema, dict) else {}
    named = schema.get("type") or ()
    types = {named} if isinstance(named, str) else {*named}
    return types.union(*map(_types, schema.get("anyOf") or schema.get("oneOf") or ()))


def _typed(text: str, types: set[str]) -> Any:
    """An argument's value: its text if the types name string, else its JSON, if it is any."""
    if "string" in types and not (text == "null" and "null" in types):
        return text
    try:
        return parse_json(_PYTHON.get(text, text))
    except ValueError:
        return text


def _call(name: str, arguments: Any, schemas: Schemas) -> ToolCall:
    if name not in schemas:
        known = ", ".join(schemas)
        return ToolCall(name, error=f"there is no tool {shown_value(name)}, only {known}")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            return ToolCall(name, error=f"the arguments of {name} are {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name, error=f"the arguments of {name} must be an object")
    try:  # clients' parsers take no half surrogate pairs, Infinity or depth 200
        from_json(json.dumps(arguments), allow_inf_nan=False)
    except (ValueError, RecursionError):
        return ToolCall(name, error=f"the arguments of {name} are not strict JSON")
    return ToolCall(name, arguments)
