"""Demonstrations as the policy's tokens, with the mask of what it would have written."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_megatron.config.data import DataConfig
from bapo_megatron.config.demonstrations import DemonstrationsConfig, DemonstrationSetConfig
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.demonstrations import (
    DemonstrationRenderer,
    DemonstrationReport,
    read_demonstrations,
)
from bapo_megatron.data.record import Completion, Conversation, Record, checked_messages
from bapo_megatron.data.rows import DataError
from bapo_megatron.types import FinishReason, PromptTokens, VersionSpan
from tests.conftest import CHAT_TEMPLATE
from tests.data.rows import rendered, write_jsonl
from tests.data.test_chat import GLM, QWEN3, QWEN25
from tests.data.test_tools import ADDED, HERMES, SCHEMA, TEMPLATES

R1 = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|assistant|>' + message.content.split('</think>')[-1] + '<|im_end|>' }}"
    "{% else %}{{ '<|' + message.role + '|>' + message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}"
    "{% if thinks is false %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
"""The structure of DeepSeek-R1's: the prompt opens reasoning, which no turn has."""
DEEPSEEK = QWEN3.replace("message.content.split('</think>')[0].split('<think>')[-1]", "''").replace(
    "{%- set reasoning = '' %}", "{%- set reasoning = message.reasoning_content or '' %}"
)
"""Reasoning in a field, left out before the last question."""
PLAIN = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
ROLES = ["<|user|>", "<|assistant|>", "<|observation|>"]
TWO = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
THOUGHTS = ("<think>\nHm.\n</think>\n\n", "<think>\nYes!\n</think>\n\n")
CALL = {"type": "function", "function": {"name": "python", "arguments": {"code": "1"}}}
TOOLS = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "It is 1."},
]
Make = Callable[..., DemonstrationRenderer]


def with_thoughts(messages: list[dict[str, Any]], *thoughts: str) -> list[dict[str, Any]]:
    """The conversation with reasoning inside the contents of its turns."""
    left = iter(thoughts)
    return [
        {**message, "content": next(left) + message["content"]}
        if message["role"] == "assistant"
        else message
        for message in messages
    ]


def with_fields(messages: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The conversation with reasoning in a field of its turns."""
    return [m | ({name: "Hm."} if m["role"] == "assistant" else {}) for m in messages]


@pytest.fixture
def make(tokenizer_dir: Path, tmp_path: Path) -> Make:
    """Makes a renderer with a template and special tokens."""

    def make(
        template: str = CHAT_TEMPLATE,
        special: list[str] | tuple[()] = (),
        plain: list[str] | tuple[()] = (),
        rollout: RolloutConfig | None = None,
        data: dict[str, Any] | None = None,
        **options: Any,
    ) -> DemonstrationRenderer:
        (tmp_path / "x.jinja").write_text(template)
        tokenizer = load_tokenizer(tokenizer_dir, tmp_path / "x.jinja")
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer.add_tokens(list(plain))
        chat = ChatRenderer(tokenizer, DataConfig(**(data or {})), rollout)
        return DemonstrationRenderer(chat, DemonstrationsConfig(**options))

    return make


def marked(renderer: DemonstrationRenderer, parts: Any) -> str:
    """A demonstration's text, with « and » around what trains."""
    token_ids, is_trained = renderer.joined(parts)
    assert (token_ids.dtype, is_trained.dtype) == (np.int32, bool)
    text = ""
    for trains, tokens in groupby(zip(token_ids, is_trained, strict=True), lambda pair: pair[1]):
        piece = renderer._chat.decode([int(token) for token, _ in tokens])
        text += f"«{piece}»" if trains else piece
    return text


NEXT = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "special", "messages", "wanted"),
    [
        (CHAT_TEMPLATE, (), TWO, f"«It is 2.<|im_end|>»{NEXT}«Yes.<|im_end|>»"),
        (QWEN25, (), TWO[:2], "«<think>\n\n</think>\n\nIt is 2.<|im_end|>»"),
        # A template that leaves earlier reasoning out: the policy has written it.
        *(
            (
                template,
                (),
                messages,
                f"«{THOUGHTS[0]}It is 2.<|im_end|>»{NEXT}«{second}Yes.<|im_end|>»",
            )
            for template, messages, second in (
                (QWEN3, with_thoughts(TWO, *THOUGHTS), THOUGHTS[1]),
                (DEEPSEEK, with_fields(TWO, "reasoning_content"), THOUGHTS[0]),
                (DEEPSEEK, with_fields(TWO, "thinking"), THOUGHTS[0]),
            )
        ),
        # A template that opens reasoning in the prompt.
        (
            R1,
            ROLES,
            with_thoughts(TWO, *THOUGHTS),
            "«Hm.\n</think>\n\nIt is 2.<|im_end|>»<|user|>Sure?<|assistant|><think>\n"
            "«Yes!\n</think>\n\nYes.<|im_end|>»",
        ),
        # A template whose next role ends a turn.
        (GLM, ROLES, TWO, "«\nIt is 2.<|user|>»\nSure?<|assistant|>«\nYes.<|user|>»"),
        # A template that ends no turn: the engine's end token does.
        (PLAIN, (), TWO, "«It is 2.<|im_end|>»\nuser: Sure?\nassistant: «Yes.<|im_end|>»"),
    ],
)
def test_what_the_assistant_writes_trains_up_to_its_end_token(
    make: Make, template: str, special: list[str], messages: list[dict[str, Any]], wanted: str
) -> None:
    renderer = make(template, special)

    assert marked(renderer, renderer.turns(messages)) == renderer._chat.text(messages[:1]) + wanted


CALLS = {
    "hermes": (
        '\n<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>',
        "<|im_end|>",
    ),
    "llama3": ('<|python_tag|>{"name": "python", "parameters": {"code": "1"}}', "<|eom_id|>"),
    "qwen3_coder": (
        "\n<tool_call>\n<function=python>\n<parameter=code>\n1\n</parameter>\n</function>\n"
        "</tool_call>",
        "<|im_end|>",
    ),
    "glm45": (
        "\n<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "<|im_end|>",
    ),
    "harmony": (
        ' to=functions.python<|channel|>commentary json<|message|>{"code": "1"}',
        "<|call|>",
    ),
}
"""A call, and the token that ends its turn."""


@pytest.mark.parametrize("tool_format", TEMPLATES)
@pytest.mark.parametrize("trains_calls", [True, False])
def test_calls_train_unless_they_are_masked_and_outputs_of_tools_never_do(
    make: Make, tool_format: str, trains_calls: bool
) -> None:
    special, plain = ADDED[tool_format]
    renderer = make(TEMPLATES[tool_format], special, plain, train_tool_calls=trains_calls)

    text = marked(renderer, renderer.turns(TOOLS, [SCHEMA]))

    call, end = CALLS[tool_format]
    if trains_calls:
        assert f"«{call}{end}»" in text
    else:  # an end token of calls alone is part of the call
        is_of_calls = end in ("<|eom_id|>", "<|call|>")
        assert (f"{call}{end}" if is_of_calls else f"{call}«{end}»") in text
    assert text.count("«") == (1 if not trains_calls and end in ("<|eom_id|>", "<|call|>") else 2)
    assert "It is 1." in text[text.rindex("«") :]
    output = text[text.index(end) :].partition("«")[0]
    assert "1" in output
    assert "assistant" in output


@pytest.mark.parametrize("template", [QWEN3, HERMES])
def test_tokens_and_mask_are_those_of_an_agent_s_record(make: Make, template: str) -> None:
    messages = with_thoughts(TWO, *THOUGHTS) if template is QWEN3 else TOOLS
    rollout = RolloutConfig(agent="some:where", agent_sandbox=None, tool_format="none")
    renderer = make(template, rollout=rollout)
    tools = [SCHEMA] if template is HERMES else []
    chat, record = renderer._chat, Record()
    turns = [message for message in messages if message["role"] == "assistant"]
    texts = [f"{turn['content']}<|im_end|>" for turn in turns]
    if template is HERMES:
        texts[0] = f"{CALLS['hermes'][0]}<|im_end|>"
    for turn, text in zip(turns, texts, strict=True):
        place = messages.index(turn)
        conversation = Conversation(checked_messages(messages[:place]), tools)
        call = record.begin(conversation, chat)
        [ids] = chat.token_ids([text])
        call.max_tokens = len(ids) + 1
        logprobs, versions = np.zeros(len(ids), np.float32), (VersionSpan(0, len(ids)),)
        call.append(Completion(np.array(ids, np.int32), logprobs, versions, FinishReason.STOP))
        record.note_turn(call, conversation, turn)
    prompt = PromptTokens("p:0", np.empty(0, np.int32))
    sample = record.sample(0, 0, prompt, FinishReason.STOP)
    assert not sample.branches

    token_ids, is_trained = renderer.joined(renderer.turns(messages, tools))

    first = len(sample.prompt.token_ids)
    assert token_ids[:first].tolist() == sample.prompt.token_ids.tolist()
    assert token_ids[first:].tolist() == sample.response_token_ids.tolist()
    assert is_trained.tolist() == [False] * first + sample.loss_mask.tolist()


def test_turns_of_weight_0_do_not_train(make: Make) -> None:
    messages = [TWO[0], {**TWO[1], "weight": 0}, *TWO[2:]]
    renderer = make()
    assert marked(renderer, renderer.turns(messages)).count("«") == 1


@pytest.mark.parametrize(
    ("template", "special", "arguments", "response", "wanted"),
    [
        (CHAT_TEMPLATE, (), {}, "So 2.", "So 2.<|im_end|>"),
        (CHAT_TEMPLATE, (), {}, "So 2.<|im_end|>\n", "So 2.<|im_end|>"),
        (QWEN3, (), {}, "<think>a</think>2", "<think>a</think>2<|im_end|>"),
        (R1, ROLES, {}, "<think>\na</think>2", "a</think>2<|im_end|>"),
        (R1, ROLES, {}, "a</think>2", "a</think>2<|im_end|>"),
        (R1, ROLES, {"thinks": False}, "2", "2<|im_end|>"),
    ],
)
def test_a_response_is_taken_verbatim_and_ended(
    make: Make,
    template: str,
    special: list[str],
    arguments: dict[str, Any],
    response: str,
    wanted: str,
) -> None:
    renderer = make(template, special, data={"chat_template_arguments": arguments})
    text = marked(renderer, renderer.response(TWO[:1], response))
    assert text == f"{renderer._chat.text(TWO[:1])}«{wanted}»"


def test_prompts_that_close_reasoning_are_followed_by_what_the_template_has_besides(
    make: Make,
) -> None:
    renderer = make(R1, ROLES, data={"chat_template_arguments": {"thinks": False}})
    assert marked(renderer, renderer.turns(TWO)).startswith(
        "<|user|>1+1?<|assistant|><think>\n\n</think>\n\n«It is 2.<|im_end|>»<|user|>Sure?"
    )


def test_system_prompt_and_suffix_are_those_of_the_run_s_prompts(make: Make) -> None:
    renderer = make(data={"system_prompt": "Think.", "prompt_suffix": " Box it."})
    assert marked(renderer, renderer.turns(TWO)) == (
        "<|im_start|>system\nThink.<|im_end|>\n"
        f"{rendered('1+1? Box it.')}«It is 2.<|im_end|>»{NEXT}«Yes.<|im_end|>»"
    )


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (CHAT_TEMPLATE, TWO[:1], "must begin with a question, .* end with a turn"),
        (CHAT_TEMPLATE, TWO[1:], "must begin with a question"),
        (CHAT_TEMPLATE, [*TWO[:2], TWO[3]], "have a message between two turns"),
        (CHAT_TEMPLATE, with_fields(TWO, "reasoning"), "leaves out 'Hm.'; remove it"),
        (R1, TWO, r"does not begin with its prompt, which ends in '.*<think>.*; give reasoning"),
        (CHAT_TEMPLATE, TOOLS, r"leaves out \(role assistant\)"),
        (
            R1.replace(
                "<think>\\n' }}", "' + ('<think>\\n' if messages[-1].role == 'user' else '') }}"
            ),
            with_thoughts([*TWO[:2], {"role": "tool", "content": "2"}, TWO[3]], *THOUGHTS),
            "has reasoning in a turn whose prompt does not open it",
        ),
        (CHAT_TEMPLATE, [{**m, "weight": 0} for m in TWO], "has no token to train"),
        ("{{ messages[-1].content }}", TWO, r"leaves out \(role user"),
    ],
)
def test_what_the_template_cannot_say_is_refused(
    make: Make, template: str, messages: list[dict[str, Any]], problem: str
) -> None:
    renderer = make(template)
    with pytest.raises(ValueError, match=problem) as caught:
        renderer.joined(renderer.turns(messages))
    assert "\n" not in str(caught.value)


def read(
    renderer: DemonstrationRenderer, path: Path, *, skips_bad: bool = False, **columns: str
) -> tuple[list[Any], DemonstrationReport]:
    report = DemonstrationReport()
    dataset = DemonstrationSetConfig(path=path, **columns)
    return list(read_demonstrations(dataset, renderer, report, skips_bad=skips_bad)), report


def test_rows_of_every_kind_are_read(make: Make, tmp_path: Path) -> None:
    renderer = make(HERMES)
    rows = [
        {"messages": TWO, "weight": 0.5},
        {"messages": TOOLS, "tools": [SCHEMA]},
        {"prompt": "1+1?", "response": "It is 2."},
        {"prompt": TWO[:3], "response": "Yes."},
        {"token_ids": [1, 2, 3], "is_trained": [False, True, False]},
    ]
    path = write_jsonl(tmp_path / "x.jsonl", *rows)
    demonstrations, report = read(renderer, path)

    assert [one.key for one in demonstrations] == [f"x.jsonl:{n}" for n in range(5)]
    assert [one.weight for one in demonstrations] == [0.5, 1, 1, 1, 1]
    texts = [
        renderer._chat.decode(one.token_ids[one.is_trained].tolist()) for one in demonstrations[:4]
    ]
    call = f"{CALLS['hermes'][0]}<|im_end|>It is 1.<|im_end|>"
    single = "It is 2.<|im_end|>"
    assert texts == [f"{single}Yes.<|im_end|>", call, single, "Yes.<|im_end|>"]
    exact = demonstrations[4]
    assert exact.token_ids.tolist() == [1, 2, 3]
    assert exact.is_trained.tolist() == [False, True, False]
    num_tokens = sum(np.count_nonzero(one.is_trained) for one in demonstrations)
    assert report.summary() == f"5 of 5 demonstrations, {num_tokens} tokens train"

    # Arrow fills structs with null.
    pq.write_table(
        pa.Table.from_pylist([{"said": m} for m in (TWO, TOOLS)]), tmp_path / "x.parquet"
    )
    again, _ = read(renderer, tmp_path / "x.parquet", messages_column="said")
    assert again[0].token_ids.tolist() == demonstrations[0].token_ids.tolist()
    assert [renderer._chat.decode(one.token_ids[one.is_trained].tolist()) for one in again] == [
        f"{single}Yes.<|im_end|>",
        call,
    ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": "x"}, "column 'messages' "),
        ({"prompt": "1?"}, "column 'response' must be a response, got null"),
        ({"response": "1"}, "column 'prompt' must be a text or a list"),
        ({"messages": TWO, "weight": -1}, "column 'weight' must be a number, at least 0, got -1"),
        (
            {"messages": TWO, "tools": [SCHEMA]},
            "column 'messages' has tools of its own, but the chat template",
        ),
        ({"messages": [TWO[0], {**TWO[1], "weight": 0.5}]}, "column 'messages' must hold weights"),
        ({"messages": TWO, "images": ["x"]}, "column 'images' is not in the prompt"),
        *(
            (row, "column 'token_ids' must be ids below 259, as many as column 'is_trained' has")
            for row in (
                {"token_ids": [1, 2], "is_trained": [True]},
                {"token_ids": [1, 2]},
                {"token_ids": 7, "is_trained": True},
                {"token_ids": [], "is_trained": []},
                {"token_ids": [1, 999], "is_trained": [False, True]},
                {"token_ids": [-1, 1], "is_trained": [False, True]},
                {"token_ids": [1, 2.5], "is_trained": [False, True]},
            )
        ),
    ],
)
def test_a_bad_row_is_named_or_counted(
    make: Make, tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", {"messages": TWO}, row)
    with pytest.raises(DataError, match=f"^{path}:2: {problem}"):
        read(make(), path)

    demonstrations, report = read(make(), path, skips_bad=True)

    assert (len(demonstrations), report.num_rows, report.num_bad) == (1, 2, 1)
    assert f"; 1 bad rows left out (data.on_bad_row), first: {path}:2: " in report.summary()


@pytest.mark.parametrize(("truncation", "lengths"), [("drop", [3]), ("truncate", [3, 4])])
def test_long_demonstrations_are_dropped_or_cut_and_counted(
    make: Make, tmp_path: Path, truncation: str, lengths: list[int]
) -> None:
    masks = ([0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1])  # nothing of the last one is left
    rows = [
        {"token_ids": list(range(len(mask))), "is_trained": list(map(bool, mask))} for mask in masks
    ]
    renderer = make(max_tokens=4, truncation=truncation)

    demonstrations, report = read(renderer, write_jsonl(tmp_path / "x.jsonl", *rows))

    assert [len(one.token_ids) for one in demonstrations] == lengths
    assert (report.num_too_long, report.num_kept) == (2, len(lengths))
    assert report.num_trained == (2 if truncation == "drop" else 5)
    assert "; 2 exceed demonstrations.max_tokens" in report.summary()


def test_a_tokenizer_that_puts_a_space_before_every_text_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatRenderer, "decode", lambda self, ids: "1 1")
    with pytest.raises(ValueError, match=r"^model\.path: .* got '1 1'"):
        make()
