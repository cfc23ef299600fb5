"""Tool calls in both formats: from tokens to calls, and from outputs to tokens."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.data import DataConfig
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.tools import Mark, ToolCall, calls_in, checked_message

HERMES = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
    "{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""The structure of Qwen2.5's."""
LLAMA3 = (
    "{{- '<|begin_of_text|>' }}"
    "{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython' }}"
    "{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
    "{{- '<|eot_id|>' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}"
    "{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}"
    '{{- \'<|python_tag|>{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{- (call.arguments | tojson) + '}<|eom_id|>' }}"
    "{%- else %}{{- message.content + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
"""The structure of Llama 3.1's."""
ADDED = {
    "hermes": (["<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>"]),
    "llama3": (
        [
            *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        ],
        [],
    ),
}
SCHEMA = {
    "type": "function",
    "function": {"name": "python", "parameters": {"type": "object", "properties": {}}},
}
OPEN, CLOSE, TAG = Mark("<tool_call>"), Mark("</tool_call>"), Mark("<|python_tag|>")
QUESTION = {"role": "user", "content": "?"}
MakeRenderer = Callable[..., ChatRenderer]


@pytest.fixture
def make_renderer(tokenizer_dir: Path, tmp_path: Path) -> MakeRenderer:
    """Makes a renderer with one tool, and with special and plain tokens that are added."""

    def make(
        template: str, tool_format: str = "hermes", added: tuple[list[str], list[str]] = ([], [])
    ) -> ChatRenderer:
        (tmp_path / "x.jinja").write_text(template)
        tokenizer = load_tokenizer(tokenizer_dir, tmp_path / "x.jinja")
        tokenizer.add_special_tokens({"additional_special_tokens": added[0]})
        tokenizer.add_tokens(added[1])
        config = RolloutConfig(tool_format=tool_format, tools=(SCHEMA,))
        return ChatRenderer(tokenizer, DataConfig(), config)

    return make


@pytest.fixture(params=["hermes", "llama3"])
def renderer(request: pytest.FixtureRequest, make_renderer: MakeRenderer) -> ChatRenderer:
    template = HERMES if request.param == "hermes" else LLAMA3
    return make_renderer(template, request.param, ADDED[request.param])


def tokens(renderer: ChatRenderer, text: str) -> tuple[int, ...]:
    [token_ids] = renderer.token_ids([text])
    return token_ids


ONE = '{"name": "python", "arguments": {"code": "1"}}'
RUN = ToolCall("python", {"code": "1"})


@pytest.mark.parametrize(
    ("pieces", "calls"),
    [
        (["no call"], []),
        (["x", OPEN, f"\n{ONE}\n", CLOSE, "y", OPEN, ONE, CLOSE], [RUN, RUN]),
        ([OPEN, '{"name": "python", "arguments": "{\\"code\\": \\"1\\"}"}', CLOSE], [RUN]),
        ([OPEN, ONE], ["a tool call lacks its </tool_call>"]),
        ([ONE, CLOSE], ["a tool call lacks its <tool_call>"]),
        ([OPEN, OPEN, ONE, CLOSE], ["a tool call lacks its </tool_call>", RUN]),
        ([OPEN, "{", CLOSE], ["a tool call is not valid JSON"]),
        ([OPEN, "[" * 100_000, CLOSE], ["a tool call is not valid JSON (nested too deeply)"]),
        ([OPEN, "[1]", CLOSE], ['a tool call must be {"name": …, "arguments": {…}}']),
        ([OPEN, '{"name": "rm"}', CLOSE], ["there is no tool 'rm', only python"]),
        ([OPEN, '{"name": "python"}', CLOSE], ["the arguments of python must be an object"]),
    ],
)
def test_hermes_calls_stand_between_tags(pieces: Sequence[str], calls: Sequence[Any]) -> None:
    check(calls_in("hermes", pieces, ["python"]), calls)


PARAMETERS = ONE.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("pieces", "calls"),
    [
        (["no call"], []),
        (["{} is empty"], []),
        (["Let me see.", TAG, PARAMETERS], [RUN]),
        ([TAG, f"{PARAMETERS}; {ONE}\n"], [RUN, RUN]),
        ([f" {PARAMETERS} "], [RUN]),
        ([TAG, ""], ["a tool call is not valid JSON"]),
        ([TAG, "print(1)"], ["a tool call is not valid JSON"]),
        ([TAG, PARAMETERS, TAG, "x"], [RUN, "a tool call is not valid JSON"]),
        ([TAG, f"{PARAMETERS} and"], [RUN, "a tool call is not valid JSON"]),
    ],
)
def test_llama3_calls_follow_the_tag(pieces: Sequence[str], calls: Sequence[Any]) -> None:
    check(calls_in("llama3", pieces, ["python"]), calls)


def check(calls: Sequence[ToolCall], wanted: Sequence[Any]) -> None:
    assert len(calls) == len(wanted)
    for call, want in zip(calls, wanted, strict=True):
        if isinstance(want, ToolCall):
            assert call == want
        else:
            assert call.error.startswith(want)


def test_a_mark_is_a_token_where_the_tokenizer_has_one(renderer: ChatRenderer) -> None:
    is_hermes = renderer.tool_format == "hermes"
    text = f"<tool_call>{ONE}</tool_call>" if is_hermes else f"<|python_tag|>{ONE}"
    assert renderer.calls(tokens(renderer, text)) == (RUN,)
    spelt = [token for letter in text for token in tokens(renderer, letter)]
    assert renderer.decode(spelt) == text
    assert renderer.calls(spelt) == ()


def test_tags_are_text_where_the_tokenizer_has_no_token(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer(HERMES)
    text = f"So <tool_call>{ONE}</tool_call> and <tool_call>"
    check(renderer.calls(tokens(renderer, text)), [RUN, "a tool call lacks its </tool_call>"])


XML = HERMES.replace(
    '\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + '}\\n",
    "\\n<function=' + call.function.name + '>' }}"
    "{%- for name, value in call.function.arguments.items() %}"
    "{{- '\\n<parameter=' + name + '>\\n' ~ value ~ '\\n</parameter>' }}{%- endfor %}"
    "{{- '\\n</function>\\n",
)
"""The structure of Qwen3.5's."""
NO_CALLS = HERMES.replace("message.tool_calls or []", "[]")
NO_TOOLS = HERMES.replace("tool | tojson", "'a tool'")


@pytest.mark.parametrize(
    ("template", "tool_format", "problem"),
    [
        (
            HERMES,
            "llama3",
            r"must read the calls .* got llama3 for '<tool_call>.* set it to hermes$",
        ),
        (LLAMA3, "hermes", r"got hermes for '<\|python_tag\|>.*; set it to llama3$"),
        (XML, "hermes", r"<function=probe_.*; none of hermes, llama3 does$"),
        (XML, "llama3", r"<function=probe_.*; none of hermes, llama3 does$"),
        (NO_CALLS, "hermes", r"with a tool call has messages that the chat template leaves out"),
        (NO_TOOLS, "hermes", "must be none with a chat template that does not show tools"),
        (
            "{% if messages[1] %}{{ raise_exception('one turn') }}{% endif %}{{ tools }}" + HERMES,
            "hermes",
            r"a conversation with a tool call is refused by the chat template \(one turn\); set",
        ),
    ],
)
def test_a_format_that_the_template_does_not_write_is_refused(
    make_renderer: MakeRenderer, template: str, tool_format: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=rf"^rollout\.tool_format: .*{problem}"):
        make_renderer(template, tool_format, (ADDED["llama3"][0], []))


@pytest.mark.parametrize("opening", ["<think>\\n", "<think>\\n\\n</think>\\n\\n"])
def test_a_generation_prompt_that_no_earlier_turn_has_hides_no_call(
    make_renderer: MakeRenderer, opening: str
) -> None:
    before, end = "assistant\\n", "' }}{%- endif %}"
    template = HERMES.replace(before + end, before + opening + end)
    assert opening in template
    renderer = make_renderer(template)
    assert renderer.calls(tokens(renderer, f"<tool_call>{ONE}</tool_call>")) == (RUN,)


def test_tools_need_a_format_and_names() -> None:
    with pytest.raises(ValueError, match="tool_format must be one of hermes, llama3 with tools"):
        RolloutConfig(tools=(SCHEMA,))
    with pytest.raises(ValueError, match="and none without, got hermes and 0 tools"):
        RolloutConfig(tool_format="hermes")
    with pytest.raises(ValueError, match="must be JSON schemas"):
        RolloutConfig(tool_format="hermes", tools=({"name": "python"},))


def test_messages_of_openai_s_form_become_those_of_templates() -> None:
    function = {"name": "python", "arguments": '{"code": "1"}'}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    assert checked_message(message) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "python", "arguments": {"code": "1"}},
            }
        ],
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = {"role": "tool", "content": parts, "tool_call_id": "c1"}
    assert checked_message(answer) == {"role": "tool", "content": "ab", "tool_call_id": "c1"}
    legacy = {"role": "assistant", "content": None, "function_call": function}
    assert checked_message(legacy)["tool_calls"][0]["function"]["arguments"] == {"code": "1"}
    thought = {"role": "assistant", "content": "2", "reasoning_content": "1 + 1", "weight": 0}
    assert checked_message(thought) == {k: thought[k] for k in thought if k != "weight"}
    with pytest.raises(ValueError, match="must hold messages of text alone, got one with images"):
        checked_message({"role": "user", "content": "?", "images": ["a.png"], "tools": None})
    for wrong in ({"role": "user"}, {"role": "user", "content": [{"type": "image"}]}, "x"):
        with pytest.raises(ValueError, match="must hold messages with role and content"):
            checked_message(wrong)
    with pytest.raises(ValueError, match="must hold tool_calls with a name"):
        checked_message({**message, "tool_calls": [{"function": {}}]})


PIECES = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|im_end|>"),
    *("<|python_tag|>", "<|eot_id|>", "<|eom_id|>", "{", "}", '"', "\\", "\n", ";", " "),
    *("é", "数", "a", "print(1)", "<|im_<|im_end|>end|>"),
)
TEXTS = ["", *PIECES, *(first + second for first in PIECES for second in PIECES)]
"""Whatever could be taken for part of the format."""


def test_calls_of_any_text_are_read_as_they_were_written(renderer: ChatRenderer) -> None:
    # JSON cannot escape tags, which end a call of hermes wherever they are.
    codes = [text.replace("<", "‹") for text in TEXTS]
    if renderer.tool_format == "hermes":
        values = [json.dumps({"name": "python", "arguments": {"code": code}}) for code in codes]
        calls = [f"<tool_call>\n{value}\n</tool_call>" for value in values]
        turn = "So:\n" + "\n".join(calls) + "<|im_end|>"
    else:
        calls = [json.dumps({"name": "python", "parameters": {"code": code}}) for code in codes]
        turn = "<|python_tag|>" + "; ".join(calls) + "<|eom_id|>"
    read = renderer.calls(tokens(renderer, turn))
    assert [call.arguments["code"] for call in read] == codes


def test_outputs_of_any_text_hold_no_mark(renderer: ChatRenderer) -> None:
    special, plain = ADDED[renderer.tool_format]
    marks = {tokens(renderer, mark)[0] for mark in (*special, *plain)}

    def marks_in(outputs: Sequence[str]) -> list[int]:
        messages = [{"role": "tool", "content": output} for output in outputs]
        return [token for token in renderer.continuation(messages) if token in marks]

    assert marks_in(TEXTS) == marks_in([""] * len(TEXTS))


def test_a_conversation_with_tools_is_rendered_by_the_template_and_spells_no_special_token(
    make_renderer: MakeRenderer,
) -> None:
    renderer = make_renderer(HERMES, added=ADDED["hermes"])
    tool = {"type": "function", "function": {"name": "other"}}
    messages = [QUESTION, {"role": "user", "content": "a<|im_end|>b"}]
    text = renderer.decode(renderer.conversation(messages, [tool]))
    assert text == (
        '<|im_start|>system\n# Tools\n<tools>\n{"type": "function", "function": {"name": "other"}}'
        "\n</tools><|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert renderer.conversation(messages, []) != renderer.conversation(messages)
    turn = tokens(renderer, 'I ask.<tool_call>{"name": "other", "arguments": {}}</tool_call>')
    assert renderer.calls(turn, [tool]) == (ToolCall("other", {}),)
    assert renderer.text_before_calls(turn) == "I ask."
