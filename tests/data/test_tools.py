"""Tool calls in all formats: from tokens to calls, and from outputs to tokens."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.data import DataConfig
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.tools import (
    MARKS,
    Mark,
    ToolCall,
    calls_in,
    checked_message,
    with_errors,
)

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
JSON_CALL = HERMES[
    HERMES.index("{{- '\\n<tool_call>") : HERMES.index("{%- endfor %}{{- '<|im_end|>")
]
VALUE = "(value if value is string else value | tojson)"
XML = HERMES.replace(
    JSON_CALL,
    "{{- '\\n<tool_call>\\n<function=' + call.function.name + '>' }}"
    "{%- for name, value in call.function.arguments.items() %}"
    f"{{{{- '\\n<parameter=' + name + '>\\n' + {VALUE} + '\\n</parameter>' }}}}{{%- endfor %}}"
    "{{- '\\n</function>\\n</tool_call>' }}",
)
"""The structure of Qwen3.5's; Qwen3-Coder's writes True, False and None as Python does."""
GLM = HERMES.replace(
    JSON_CALL,
    "{{- '\\n<tool_call>' + call.function.name + '\\n' }}"
    "{%- for name, value in call.function.arguments.items() %}{{- '<arg_key>' + name "
    f"+ '</arg_key>\\n<arg_value>' + {VALUE} + '</arg_value>\\n' }}}}{{%- endfor %}}"
    "{{- '</tool_call>' }}",
)
"""Calls as GLM-4.5's."""
HARMONY = (
    "{%- if tools %}{{- '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{%- endif %}"
    "{%- set last = namespace(name=none) %}"
    "{%- for message in messages %}{%- if message.tool_calls %}"
    "{%- set last.name = message.tool_calls[0].function.name %}"
    "{{- '<|start|>assistant to=functions.' + last.name }}"
    "{{- '<|channel|>commentary json<|message|>' }}"
    "{{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if last.name is none %}{{ raise_exception('no call') }}{%- endif %}"
    "{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- message.content | tojson + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
"""The structure of gpt-oss's."""
ADDED = {
    "hermes": (["<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>"]),
    "llama3": (
        [
            *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        ],
        [],
    ),
    "qwen3_coder": (["<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>"]),
    "glm45": (["<|im_start|>", "<|im_end|>"], list(MARKS["glm45"])),
    "harmony": (list(MARKS["harmony"]), []),
}
TEMPLATES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "qwen3_coder": XML,
    "glm45": GLM,
    "harmony": HARMONY,
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
        ([OPEN, ONE.replace('"1"', "1e999"), CLOSE], ["the arguments of python are not strict"]),
    ],
)
def test_hermes_calls_stand_between_tags(pieces: Sequence[str], calls: Sequence[Any]) -> None:
    check(calls_in("hermes", pieces, [SCHEMA]), calls)


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
    check(calls_in("llama3", pieces, [SCHEMA]), calls)


XML_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Any.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "number": {"type": "number"},
                "flag": {"type": ["boolean", "null"]},
                "things": {"type": "array"},
                "any": {"type": None},
                "nested": {"$ref": "#/$defs/Nested"},
            },
        },
    },
}


@pytest.mark.parametrize(
    ("tool_format", "text", "call"),
    [
        ("qwen3_coder", "<function=f></function>", ToolCall("f", {})),
        ("qwen3_coder", "<function=f><parameter=text>7</parameter></function>", {"text": "7"}),
        (
            "qwen3_coder",
            "\n<function=f>\n<parameter=flag>\nTrue\n</parameter>\n"
            "<parameter=number>\n1e2\n</parameter>\n</function>\n",
            {"flag": True, "number": 100.0},
        ),
        ("qwen3_coder", "<function=f><parameter=number>x</parameter></function>", {"number": "x"}),
        (
            "qwen3_coder",
            "<function=f><parameter=text>7</function>",
            "a call of f must end with </f",
        ),
        (
            "qwen3_coder",
            "<function=f><parameter=text>7</parameter>",
            "a call of f must end with </f",
        ),
        ("qwen3_coder", "<function=f><parameter=any>7</parameter></function>", {"any": 7}),
        ("qwen3_coder", '{"name": "f"}', "a tool call must begin with "),
        ("qwen3_coder", "<function=g></function>", "there is no tool 'g', only f"),
        ("glm45", "f", {}),
        ("glm45", "f<arg_key>text</arg_key><arg_value> 7\n</arg_value>", {"text": " 7\n"}),
        ("glm45", "\nf\n<arg_key>other</arg_key>\n<arg_value>[7]</arg_value>\n", {"other": [7]}),
        ("glm45", "f\n<arg_key>text</arg_key>\n", "a call of f must hold arguments only, got"),
        ("glm45", "<arg_key>text</arg_key>", "a tool call must begin with "),
        ("glm45", "g", "there is no tool 'g', only f"),
    ],
)
def test_arguments_in_tags_are_typed_by_the_schema(tool_format: str, text: str, call: Any) -> None:
    want = ToolCall("f", call) if isinstance(call, dict) else call
    check(calls_in(tool_format, [OPEN, text, CLOSE], [XML_TOOL]), [want])


def test_a_long_call_of_unfinished_arguments_is_an_error() -> None:
    for tool_format, part in (("qwen3_coder", "<parameter=a>"), ("glm45", "<arg_key>a</arg_key>")):
        body = ("<function=f>" if tool_format == "qwen3_coder" else "f") + part * 100_000
        [call] = calls_in(tool_format, [OPEN, body, CLOSE], [XML_TOOL])
        assert call.error


VALUES: list[dict[str, Any]] = [
    {},
    {"text": ""},
    {"text": "\n a <b> & 'c' \"d\" \\ </p>\n\n", "number": -2.5, "flag": True},
    {"text": "null", "maybe": None, "flag": None, "things": [1, "a", None, {"b": []}]},
    {"text": "12", "maybe": "12", "number": 12, "nested": {"a": "<x>", "ü": False}},
]


@pytest.mark.parametrize("arguments", VALUES)
@pytest.mark.parametrize("tool_format", list(TEMPLATES))
def test_a_call_that_the_template_renders_is_read_as_it_was(
    make_renderer: MakeRenderer, tool_format: str, arguments: dict[str, Any]
) -> None:
    renderer = make_renderer(TEMPLATES[tool_format], tool_format, ADDED[tool_format])
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    count = 1 if tool_format in ("llama3", "harmony") else 2
    asked = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call] * count}]
    text = renderer._apply(asked, generation_prompt=False, tools=[XML_TOOL])
    prompt = renderer._apply([QUESTION], generation_prompt=True, tools=[XML_TOOL])
    turn = tokens(renderer, text.removeprefix(prompt))
    assert renderer.calls(turn, [XML_TOOL]) == (ToolCall("f", arguments),) * count
    assert renderer.content(turn, has_calls=True).strip() == ""


def test_a_turn_that_is_one_call_of_llama3_says_nothing(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer(LLAMA3, "llama3", ADDED["llama3"])
    turn = tokens(renderer, PARAMETERS)
    assert renderer.calls(turn) == (RUN,)
    assert renderer.content(turn, has_calls=True) == ""
    assert renderer.content(turn, has_calls=False) == PARAMETERS


@pytest.fixture
def harmony(make_renderer: MakeRenderer) -> ChatRenderer:
    return make_renderer(HARMONY, "harmony", ADDED["harmony"])


THOUGHT = "<|channel|>analysis<|message|>to=functions.f?<|end|>"


@pytest.mark.parametrize(
    ("turn", "content", "calls"),
    [
        (f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>2<|return|>", "2", []),
        (
            f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>I run it.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.python <|constrain|>json"
            '<|message|>{"code": "1"}<|call|>',
            "I run it.",
            [RUN],
        ),
        (' to=functions.python<|channel|>analysis json<|message|>{"code": "1"}<|call|>', "", [RUN]),
        (
            "<|channel|>commentary to=functions.rm<|message|>{}<|call|>",
            "",
            ["there is no tool 'rm'"],
        ),
        (
            "<|channel|>commentary to=functions.python<|message|>1<|call|>",
            "",
            ["the arguments of p"],
        ),
        (
            "<|channel|>commentary to=functions.python<|message|>{",
            "",
            ["a tool call lacks its <|c"],
        ),
        ("no channel", "no channel", []),
    ],
)
def test_harmony_names_the_tool_in_a_message_s_header(
    harmony: ChatRenderer, turn: str, content: str, calls: Sequence[Any]
) -> None:
    check(harmony.calls(tokens(harmony, turn)), calls)
    thought = "<think>to=functions.f?</think>" if THOUGHT in turn else ""
    assert harmony.content(tokens(harmony, turn), has_calls=bool(calls)) == thought + content


@pytest.mark.parametrize("end", ["<|call|>", "<|return|>", "<|end|>"])
def test_harmony_s_next_message_follows_whatever_ended_the_turn(
    harmony: ChatRenderer, end: str
) -> None:
    turn = tokens(harmony, f" to=functions.python<|channel|>commentary json<|message|>{{}}{end}")
    written = harmony.continuation([{"role": "tool", "content": "4"}], after=turn)
    output = '<|start|>functions.python to=assistant<|channel|>commentary<|message|>"4"<|end|>'
    assert harmony.decode(written) == f"{output}<|start|>assistant"
    turn = tokens(harmony, f"<|channel|>final<|message|>4{end}")
    written = harmony.continuation([QUESTION], after=turn)
    assert harmony.decode(written) == "<|start|>user<|message|>?<|end|><|start|>assistant"


def test_errors_stand_where_their_calls_were() -> None:
    outputs = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    wrong = {"role": "tool", "content": "error: no"}
    calls = [ToolCall(error="no"), RUN, ToolCall(error="no"), RUN, ToolCall(error="no")]
    messages = with_errors(calls, [*outputs, QUESTION])
    assert messages == [wrong, outputs[0], wrong, outputs[1], wrong, QUESTION]
    assert with_errors([ToolCall(error="no")], [QUESTION]) == [QUESTION]


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


NO_CALLS = HERMES.replace("message.tool_calls or []", "[]")
OTHER = HERMES.replace(JSON_CALL, "{{- 'call ' + call.function.name }}")
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
        (XML, "hermes", r"<function=probe_.*; set it to qwen3_coder$"),
        (HERMES, "qwen3_coder", r"got qwen3_coder for '<tool_call>.* set it to hermes$"),
        (GLM, "qwen3_coder", r"<arg_key>.*; set it to glm45$"),
        (HARMONY, "hermes", r"to=functions.probe_.*; set it to harmony$"),
        (
            OTHER,
            "hermes",
            r"call probe_.*; none of hermes, llama3, qwen3_coder, glm45, harmony does$",
        ),
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
        make_renderer(template, tool_format, (ADDED["llama3"][0] + ADDED["harmony"][0], []))


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
    with pytest.raises(
        ValueError, match=r"tool_format must be one of hermes, llama3, .* with tools"
    ):
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
    *("<arg_key>", "</arg_value>", "<|start|>", "<|message|>", "<|call|>"),
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


@pytest.mark.parametrize("tool_format", list(TEMPLATES))
def test_outputs_of_any_text_hold_no_mark(make_renderer: MakeRenderer, tool_format: str) -> None:
    renderer = make_renderer(TEMPLATES[tool_format], tool_format, ADDED[tool_format])
    special, plain = ADDED[tool_format]
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
    assert renderer.content(turn, has_calls=True) == "I ask."
