"""Renders questions by a chat template, and tokenises each text once."""

import contextlib
import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import batched
from pathlib import Path
from typing import Any

import jinja2

from bapo_megatron.config.data import DataConfig
from bapo_megatron.config.rollout import TOOL_FORMATS, RolloutConfig
from bapo_megatron.data.tools import MARKS, Mark, Message, ToolCall, calls_in, content_in, escaped
from bapo_megatron.runtime.calls import decode_json, shown_value
from bapo_megatron.runtime.names import shown

Tools = Sequence[Mapping[str, Any]] | None
"""JSON schemas of tools; None: those of ``rollout``."""
_TEXTS_PER_CALL = 1000
_MARK = re.compile(r"<[|｜][^\s<>|｜]{1,40}[|｜]>|<start_of_turn>|\[INST\]")
"""Marks of templates: ``<|im_start|>``, ``<｜User｜>``, Gemma's, Llama 2's and Mistral's."""
_ENDS_OF_CALLS = {"llama3": "<|eom_id|>", "harmony": "<|call|>"}
_HARMONY = ("<|start|>", "<|channel|>")
_ANSWER = "4ecb5f"
"""A message that no template writes by itself."""
_CALL = ToolCall("probe_81d0c3", {"text": "a 'b'", "number": 2})
_TYPES = {"text": "string", "number": "integer"}
_PROPERTIES = {name: {"type": kind, "description": name} for name, kind in _TYPES.items()}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES}
_FUNCTION = {"name": _CALL.name, "description": "A probe.", "parameters": _PARAMETERS}
_TOOL = {"type": "function", "function": _FUNCTION}
"""A call that every template should render, and its tool."""
_UNSAMPLED = (
    *("eos_token_id", "bos_token_id", "pad_token_id", "max_length", "max_new_tokens"),
    *("transformers_version", "cache_implementation"),
)
"""Fields of generation_config.json, besides flags, that change no distribution."""


def load_tokenizer(model_path: Path, chat_template: Path | None = None) -> Any:
    """Load the tokenizer of a local Hugging Face model directory.

    The Jinja file ``chat_template``, if given, replaces the tokenizer's own template.

    Raises:
        ValueError: The directory holds no tokenizer, or there is no chat template.
        OSError: The template's file cannot be read.
    """
    # It takes seconds to import, and reading prompts does not need it.
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerFast

    files = {path.name for path in model_path.iterdir()} if model_path.is_dir() else set()
    if "tiktoken.model" in files and "tokenizer.json" not in files:
        raise ValueError(
            f"{model_path}: has tiktoken.model but no tokenizer.json, so its tokens follow from "
            "code beside it, which is not run; save the tokenizer as tokenizer.json there"
        )
    model_type = str(_fields(model_path / "config.json").get("model_type", "llama"))
    # Kimi K2's is one that transformers does not know, so that AutoTokenizer finds no class.
    loader = AutoTokenizer if model_type in CONFIG_MAPPING else PreTrainedTokenizerFast
    try:
        tokenizer = loader.from_pretrained(model_path, local_files_only=True)
        if not tokenizer("1")["input_ids"]:
            raise ValueError("it finds no token in the text '1'")
    except Exception as error:
        raise ValueError(
            f"{model_path}: no usable tokenizer ({shown(error)}); save the model's tokenizer there"
        ) from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"data.chat_template: '{chat_template}' is not UTF-8; correct it"
            ) from error
    template = tokenizer.chat_template
    if not isinstance(template, str | dict) or not template:
        raise ValueError(
            f"{model_path}: the tokenizer has no chat template; put a chat_template.jinja beside "
            "tokenizer_config.json, or set data.chat_template"
        )
    return tokenizer


def _fields(path: Path) -> dict[str, Any]:
    """The fields of a model's JSON file; none where it is unreadable, as those who need it say."""
    with contextlib.suppress(OSError, ValueError):
        return decode_json(dict[str, Any], path.read_bytes())
    return {}


class ChatRenderer:
    """Turns questions into the text and the token ids of the engine's prompts."""

    def __init__(
        self, tokenizer: Any, data: DataConfig, tools: RolloutConfig | None = None
    ) -> None:
        """Keep the tokenizer and what ``data`` puts around each question.

        The template also gets the schemas of ``tools``.

        Raises:
            ValueError: The template is not valid Jinja, does not know an argument, or writes tool
                calls in another format.
        """
        self._schemas = tools.tool_schemas if tools is not None else []
        self.tool_format = tools.tool_format if tools is not None else "none"
        """How the policy writes tool calls."""
        self.separates_reasoning = tools is not None and tools.agent_reasoning == "separate"
        """Whether agents get reasoning beside the content."""
        self._has_agent = tools is not None and tools.agent is not None
        self._tokenizer, self._template = tokenizer, str(tokenizer.chat_template)
        self._rendered_shapes: set[tuple[Any, ...]] = set()
        self._data = data
        added_tokens = tokenizer.added_tokens_decoder
        self._special = tuple(token.content for token in added_tokens.values() if token.special)
        self._added_contents = {token_id: token.content for token_id, token in added_tokens.items()}
        self._added = {content: token_id for token_id, content in self._added_contents.items()}
        self._is_harmony = all(mark in self._special for mark in _HARMONY)
        # Arguments that would be ignored silently, such as misspelt ones, are refused.
        reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
        self._arguments = data.chat_template_arguments
        for name in self._arguments:
            if name in reserved:
                raise ValueError(
                    f"data.chat_template_arguments: must not hold '{name}', which the program sets "
                    "itself; leave it out"
                )
            if not re.search(rf"\b{re.escape(name)}\b", self._template):
                raise ValueError(
                    "data.chat_template_arguments: must be variables of the chat template, which "
                    f"does not mention '{name}'; correct the name, or leave it out"
                )
        try:
            self._apply([{"role": "user", "content": "1 + 1?"}], generation_prompt=True)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"data.chat_template: must be a valid Jinja template, got line {error.lineno}: "
                f"{error.message}; correct it"
            ) from error
        except Exception:  # noqa: BLE001 - what ``text`` raises for each question
            pass
        if self.tool_format != "none":
            self._check_tool_format()

    @property
    def vocab_size(self) -> int:
        """One more than the tokenizer's largest id."""
        return len(self._tokenizer)

    def text(self, question: str | Sequence[Message], tools: Tools = None) -> str:
        """Render a question's conversation, with tools of its own, up to the assistant's turn.

        Raises:
            ValueError: The question has a system message and ``system_prompt`` is set as well, it
                has tools that cannot be rendered, or the template refuses or leaves out a message.
        """
        if self._has_agent:  # which asks with tools of its own
            tools = None  # those of ``rollout``
        return self.prompt(self.messages(question), tools)

    def prompt(self, messages: list[Message], tools: Tools = None) -> str:
        """Render messages up to the assistant's turn; ``ValueError`` for tools that it lacks."""
        text = self.render(messages, tools=tools or None)
        has_others = bool(self._schemas) and not self._has_agent
        if tools and (has_others or text == self.render(messages, tools=())):
            reason = "rollout has others" if has_others else "the chat template shows none"
            raise ValueError(f"has tools of its own, but {reason}; remove the column tools")
        return text

    def conversation_after(
        self, question: str | Sequence[Message], messages: Sequence[Message]
    ) -> list[Message]:
        """Return a question's conversation and what follows it, as sampling would render them."""
        said = [*self.messages(question), *map(self._spoken, messages)]
        return self._plain(said) if self._has_agent else said

    def messages(self, question: str | Sequence[Message]) -> list[Message]:
        """Return a question's conversation with the system prompt and suffix of ``data``.

        Raises:
            ValueError: The question has a system message and ``system_prompt`` is set as well.
        """
        if isinstance(question, str):
            question = [{"role": "user", "content": question}]
        *before, last = map(self._spoken, question)
        messages = [*before, {**last, "content": last["content"] + self._data.prompt_suffix}]
        if self._data.system_prompt:
            if messages[0]["role"] == "system":
                raise ValueError("has a system message of its own; set data.system_prompt to ''")
            messages.insert(0, {"role": "system", "content": self._data.system_prompt})
        return messages

    def added_columns(self, question: str | Sequence[Message]) -> dict[str, Any]:
        """Return what a prompt's row gets: ``messages``, its conversation, for an agent."""
        return {"messages": self.messages(question)} if self._has_agent else {}

    def conversation(self, messages: Sequence[Message], tools: Tools = None) -> tuple[int, ...]:
        """Return the tokens of messages from the first to the assistant's next turn.

        Special tokens that the messages spell out are left out. ``tools`` replace the renderer's.

        Raises:
            ValueError: The template refuses the messages.
        """
        [token_ids] = self.token_ids([self.render(self._plain(messages), tools=tools)])
        return token_ids

    def ended(self, text: str, *, has_calls: bool = False) -> str:
        """Return a turn as the template renders it, up to the token that ends it.

        Where the template leaves the end to what follows (GLM-4.5's ``<|user|>``), or to the
        engine, that token is added.
        """
        end = self._end_of_turn.strip()
        if end and end in text:
            return text[: text.rindex(end) + len(end)]
        text = text.rstrip()
        if text.endswith(self._special):
            return text
        follower = {"role": "tool" if has_calls else "user", "content": "?"}
        after = self._after_answer([follower], generation_prompt=True).lstrip()
        follows = next((token for token in self._special if after.startswith(token)), "")
        return text + (end or follows or self._tokenizer.eos_token)

    def token_places(self, text: str) -> list[tuple[int, int]]:
        """Return where in a text each of its tokens begins and ends, [L]."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["offset_mapping"])

    def template_mark(self, question: str | Sequence[Message]) -> str:
        """Return the first mark of a chat template, any model's, in a question; empty without one.

        Such a question has probably been rendered already.
        """
        contents = [question] if isinstance(question, str) else [m["content"] for m in question]
        return next((mark[0] for text in contents if (mark := _MARK.search(text))), "")

    def token_ids(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Tokenise rendered conversations.

        The template writes every special token itself, so tokenisation adds none.
        """
        ids: list[tuple[int, ...]] = []
        for chunk in batched(texts, _TEXTS_PER_CALL):
            encoded = self._tokenizer(list(chunk), add_special_tokens=False, verbose=False)
            ids += map(tuple, encoded["input_ids"])
        return ids

    def decode(self, token_ids: Sequence[int], *, skips_special: bool = False) -> str:
        """Decode tokens to their exact text, or to that without special tokens."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skips_special, clean_up_tokenization_spaces=False
        )
        return text

    def calls(
        self, token_ids: Sequence[int], tools: Tools = None, tool_format: str = ""
    ) -> tuple[ToolCall, ...]:
        """Return the tool calls in a turn of the policy; none without tools."""
        tool_format = tool_format or self.tool_format
        if tool_format == "none":
            return ()
        schemas = self._schemas if tools is None else tools
        return calls_in(tool_format, self._pieces(tool_format, token_ids), schemas)

    def content(self, token_ids: Sequence[int], *, has_calls: bool) -> str:
        """Return what a turn says besides its calls; without calls, all of its text.

        With Harmony (gpt-oss): its messages to the user, and analysis as ``<think>…</think>``.
        """
        if not (has_calls or self._is_harmony):
            return self.decode(token_ids, skips_special=True)
        tool_format = "harmony" if self._is_harmony else self.tool_format
        return content_in(tool_format, self._pieces(tool_format, token_ids))

    def _pieces(self, tool_format: str, token_ids: Sequence[int]) -> list[str]:
        """Cut a turn at the marks of a tool format."""
        marks = MARKS[tool_format]
        by_id = {self._added[mark]: Mark(mark) for mark in marks if mark in self._added}
        spelt = [mark for mark in marks if mark not in self._added]
        cut = re.compile(f"({'|'.join(map(re.escape, spelt)) or '(?!)'})")
        pieces: list[str] = []
        start = 0
        for place, token_id in enumerate((*token_ids, -1)):
            if token_id in by_id or token_id == -1:
                text = self.decode(token_ids[start:place], skips_special=True)
                pieces += [Mark(part) if part in spelt else part for part in cut.split(text)]
                pieces += [by_id[token_id]] if token_id in by_id else []
                start = place + 1
        return pieces

    def continuation(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        after: Sequence[int] = (),
        has_end: bool = True,
    ) -> tuple[int, ...]:
        """Return the tokens that lead from the assistant's turn through messages to its next one.

        With ``has_end`` the policy has sampled the token that ends its turn, the last of ``after``,
        and they begin after it; otherwise they begin with it. If that token is the next message's
        role (GLM-4.5's ``<|user|>``), it is not repeated. Earlier turns are not rendered again: a
        fixed two-message conversation replaces them. Special tokens that the messages spell out are
        left out, since a message may quote the policy.

        Raises:
            ValueError: The template refuses the messages, or leaves one out.
        """
        messages = self._plain(messages)
        if self._is_harmony:  # outputs name the tool
            [*_, call] = self.calls(after, tools, "harmony") or [_CALL]
            messages.insert(0, _call_message(call.name, {"text": _ANSWER}))
        text = self._after_answer(messages, generation_prompt=True, tools=tools)
        if self._is_harmony:  # whatever ended the turn, a message begins here
            text = text.partition(_ANSWER)[2]
            text = ("" if has_end else "<|end|>") + text[text.index(_HARMONY[0]) :]
        elif has_end:
            text = text.removeprefix(self._end_of_turn)
        role = self._added_contents.get(after[-1]) if len(after) else None
        if role is not None and text.lstrip().startswith(role):
            text = text.lstrip().removeprefix(role)
        [token_ids] = self.token_ids([text])
        return token_ids

    def warnings(self) -> list[str]:
        """Return what a user should know of the files beside the model's weights, a line each."""
        path = Path(self._tokenizer.name_or_path) / "generation_config.json"
        unused = [
            f"{name} {shown_value(value)}"
            for name, value in _fields(path).items()
            if name not in _UNSAMPLED and value and (value != 1 or name == "top_k")
        ]
        line = (
            f"{path}: {', '.join(unused)}: not applied; training samples from the plain policy at "
            "rollout.temperature, and evaluations with eval.temperature, top_p and top_k"
        )
        return [*self._end_token_warnings(), *([line] if unused else [])]

    def _end_token_warnings(self) -> list[str]:
        """A line if responses would not end, or not always, where the template ends a turn.

        Engines stop at the end tokens of config.json, generation_config.json and the tokenizer.
        """
        folder, named = Path(self._tokenizer.name_or_path), set[int]()
        for name in ("config.json", "generation_config.json"):
            ids = _fields(folder / name).get("eos_token_id")
            named |= {i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)}
        question = [{"role": "user", "content": "?"}]
        try:
            after = self._end_of_turn or self._after_answer(question, generation_prompt=False)
            after = "<|return|>" if self._is_harmony else after.lstrip()
            [[turn_end, *_]] = self.token_ids([after])
        except ValueError:  # what ``text`` raises for each question, or no end at all
            return []
        if turn_end not in self._added.values():
            return []
        end, marker = self._tokenizer.eos_token_id, self.decode([turn_end])
        call_end = self._added.get(_ENDS_OF_CALLS.get(self.tool_format, ""), end)
        for what, token in (("a tool call", call_end), ("a turn", turn_end)):
            if token not in named | {end}:
                return [
                    f"{folder}: the chat template ends {what} with '{self.decode([token])}' "
                    f"({token}), which is not an end token of config.json, generation_config.json "
                    "or the tokenizer, so responses go on after it; add it to eos_token_id of "
                    "generation_config.json"
                ]
        if end not in {turn_end, *named}:
            return [
                f"{folder}: the tokenizer's end token '{self._tokenizer.eos_token}' ({end}) is "
                f"neither the chat template's '{marker}' ({turn_end}) nor one of config.json or "
                "generation_config.json; it ends responses too: correct eos_token in "
                "tokenizer_config.json unless that is meant"
            ]
        return []

    def _check_tool_format(self) -> None:
        """Refuse a format that does not read the template's own rendering of a call."""
        asked: list[Message] = [
            {"role": "user", "content": _ANSWER},
            _call_message(_CALL.name, dict(_CALL.arguments)),
        ]
        try:
            text = self.render(asked, generation_prompt=False, tools=[_TOOL])
            prompt = self.render(asked[:1], tools=[_TOOL])
        except ValueError as error:
            raise ValueError(
                f"rollout.tool_format: a conversation with a tool call {error}; set "
                "data.chat_template to one that renders it"
            ) from error
        turn = text.rpartition(_ANSWER)[2].removeprefix(prompt.rpartition(_ANSWER)[2])
        [token_ids] = self.token_ids([turn])
        formats = TOOL_FORMATS[1:]
        fitting = [name for name in formats if self.calls(token_ids, [_TOOL], name) == (_CALL,)]
        if self.tool_format not in fitting:
            remedy = f"set it to {fitting[0]}" if fitting else f"none of {', '.join(formats)} does"
            raise ValueError(
                f"rollout.tool_format: must read the calls that the chat template writes, got "
                f"{self.tool_format} for {shown_value(turn.strip())}; {remedy}"
            )
        if _CALL.name not in prompt:
            raise ValueError(
                "rollout.tool_format: must be none with a chat template that does not show tools, "
                f"got {self.tool_format}; set data.chat_template to one that does"
            )

    @cached_property
    def _end_of_turn(self) -> str:
        """The template's end of an assistant's message, special token included."""
        rest = self._after_answer([], generation_prompt=False)
        start = rest.lstrip()
        special = next((token for token in self._special if start.startswith(token)), "")
        return rest[: rest.find(special) + len(special)]

    def _after_answer(
        self, messages: Sequence[Message], *, generation_prompt: bool, tools: Tools = None
    ) -> str:
        """The template's text after an assistant's message that these messages follow."""
        opening = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        text = self.render([*opening, *messages], generation_prompt=generation_prompt, tools=tools)
        return text.partition(_ANSWER)[2]

    def _plain(self, messages: Sequence[Message]) -> list[Message]:
        """Messages that spell out neither special tokens nor, in outputs, tags of tool formats."""
        messages = [self._without_tags(self._spoken(message)) for message in messages]
        return [self._without_special(message) for message in messages]

    def _spoken(self, message: Message) -> Message:
        """The message in a role that the template knows; most know no developer, and drop it."""
        is_system = message["role"] == "developer" and "developer" not in self._template
        return {**message, "role": "system"} if is_system else message

    def _without_tags(self, message: Message) -> Message:
        is_output = self.tool_format != "none" and message["role"] in ("tool", "ipython")
        return {**message, "content": escaped(message["content"])} if is_output else message

    def _without_special(self, value: Any) -> Any:
        """Remove special tokens from all texts in a value."""
        if isinstance(value, dict):
            return {name: self._without_special(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [self._without_special(entry) for entry in value]
        if not isinstance(value, str):
            return value
        # Repeatedly: removing one may spell another.
        while special := next((token for token in self._special if token in value), None):
            value = value.replace(special, "")
        return value

    def render(
        self, messages: list[Message], *, generation_prompt: bool = True, tools: Tools = None
    ) -> str:
        """Render messages as they are; ``ValueError`` if the template refuses or drops one."""
        try:
            lost = self._roles_left_out(messages, tools)
            text = self._apply(messages, generation_prompt=generation_prompt, tools=tools)
        except Exception as error:
            reason = str(error) if isinstance(error, jinja2.TemplateError) else shown(error)
            raise ValueError(f"is refused by the chat template ({reason})") from error
        if lost:
            roles = ", ".join(dict.fromkeys(f"role {role}" for role in lost))
            raise ValueError(f"has messages that the chat template leaves out ({roles})")
        return text

    def _roles_left_out(self, messages: Sequence[Message], tools: Tools) -> list[str]:
        """The roles of messages, or of calls, that the template would drop without a word.

        Each sequence of roles is rendered once with a mark in every message.
        """
        shape = tuple((message["role"], bool(message.get("tool_calls"))) for message in messages)
        if shape in self._rendered_shapes:
            return []
        marks = [f"{_ANSWER}-{place}-" for place in range(len(messages))]
        marked = list(map(_marked, messages, marks))
        text = self._apply(marked, generation_prompt=True, tools=tools)
        lost = [m["role"] for m, mark in zip(messages, marks, strict=True) if mark not in text]
        if not lost:
            self._rendered_shapes.add(shape)
        return lost

    def _apply(
        self, messages: list[Message], *, generation_prompt: bool, tools: Tools = None
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=list(self._schemas if tools is None else tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self._arguments,
        )
        return text


def _marked(message: Message, mark: str) -> Message:
    """The message with a mark as its content, or as the name of its calls."""
    if not (calls := message.get("tool_calls")):
        return {**message, "content": mark}
    calls = [{**call, "function": {**call["function"], "name": mark}} for call in calls]
    return {**message, "tool_calls": calls}


def _call_message(name: str, arguments: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
