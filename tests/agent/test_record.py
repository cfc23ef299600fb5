"""Whatever an agent does with its history, what was sampled is what trains, once."""

import copy
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.agent.protocol import Answer, ChatRequest, ResponsesRequest
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.record import (
    Call,
    Completion,
    Conversation,
    Record,
    call_rewards,
    checked_messages,
)
from bapo_megatron.data.staleness import spans_of, token_versions
from bapo_megatron.types import FinishReason, Sample, VersionSpan
from tests.agent.episodes import EOS, TOOL, make_renderer, sequences_of
from tests.fakes.fake_pool import likeliest_of

NUM_CALLS = 10_000
NUMBERS = (7, 2.0, 2.5, -0.0, 1e22, 2**53 + 1, 2**60 + 1)


@pytest.fixture(scope="module")
def renderer(tokenizer_dir: Path) -> ChatRenderer:
    return make_renderer(tokenizer_dir)


class World:
    """Random conversations over one record, and what the engine saw of them."""

    def __init__(self, renderer: ChatRenderer, seed: int, untrained: float = 0.0) -> None:
        self.renderer = renderer
        self.untrained = untrained
        """Share of calls that do not train."""
        self.rng = random.Random(seed)
        self.record = Record()
        self.histories: list[list[dict[str, Any]]] = []
        self.asked: list[list[dict[str, Any]]] = []
        self.seen: list[tuple[list[int], list[int], list[float]]] = []
        """Prompt, sampled tokens and log-probs of each call that trains, as the engine had them."""
        self.num_rewritten = 0
        self.kinds = ["new", "go on", "go on", "go on", "branch", "compact", "rewrite"]

    def ask(self, messages: list[dict[str, Any]]) -> None:
        self.asked.append(copy.deepcopy(messages))
        request = ChatRequest.model_validate({"messages": messages, "tools": [TOOL]})
        is_trained = not self.untrained or self.rng.random() >= self.untrained
        conversation = replace(request.conversation(), is_trained=is_trained)
        call = self.record.begin(conversation, self.renderer)
        self.sample(call)
        message = Answer.of(call, conversation, self.renderer).message
        self.record.note_turn(call, conversation, message)
        if call.finish_reason is FinishReason.STOP:
            self.histories.append([*messages, message])

    def sample(self, call: Call) -> None:
        prompt, version = call.prompt().tolist(), len(self.seen) // 100
        text = f"<think>{self.rng.random()}</think> {self.rng.randrange(100)}"
        if self.rng.random() < 0.4:
            text = f"{self.rng.choice(('', 'So', 'x y '))}{text}\n<think> ?</think>z."
        if self.rng.random() < 0.4:
            arguments = json.dumps({"a": self.rng.choice(NUMBERS), "b": "é"})
            text += f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
        is_cut = self.rng.random() < 0.05
        [ids] = self.renderer.token_ids([text + EOS * (not is_cut)])
        logprobs = np.array([-self.rng.random() for _ in ids], np.float32)
        end = FinishReason.LENGTH if is_cut else FinishReason.STOP
        middle = self.rng.randrange(len(ids))
        parts = (slice(0, middle), FinishReason.ABORT), (slice(middle, None), end)
        for part, reason in parts:
            token_ids = np.array(ids[part], np.int32)
            call.max_tokens = 10_000
            versions = spans_of(np.full(len(token_ids), version))
            call.append(Completion(token_ids, logprobs[part], versions, reason))
        if call.is_trained:
            self.seen.append((prompt, list(ids), logprobs.tolist()))

    def step(self) -> None:
        kind = self.rng.choice(self.kinds)
        if kind == "new" or not self.histories:
            question = {"role": "user", "content": f"question {self.rng.random()}"}
            system = [{"role": "system", "content": "s"}] if self.rng.random() < 0.5 else []
            self.ask([*system, question])
        elif kind == "compact":
            summary = str(self.histories[-1][-1]["content"])[:20]
            self.ask([{"role": "user", "content": f"In short: {summary}"}])
        else:
            far = 1 if kind == "go on" else 30
            history = copy.deepcopy(self.rng.choice(self.histories[-far:]))
            if kind == "rewrite":
                place = self.rng.choice(
                    [n for n, message in enumerate(history) if message["role"] == "assistant"]
                )
                history[place]["content"] = f"rewritten {self.rng.random()}"
                self.num_rewritten += 1
            self.ask([*map(self.as_a_client, history), *self.answers(history[-1])])

    def as_a_client(self, message: dict[str, Any]) -> dict[str, Any]:
        """The same message, as a client sends it back."""
        message = {**message, "annotations": None}
        if message["role"] == "assistant":
            message["content"] = self.without_reasoning(message["content"])
        if message.get("content") == "":
            message["content"] = self.rng.choice((None, "", []))
        for call in message.get("tool_calls", ()):
            as_javascript = self.rng.choice((None, _javascript))
            arguments = json.loads(
                call["function"]["arguments"], parse_int=as_javascript, parse_float=as_javascript
            )
            reordered = dict(reversed(arguments.items()))
            call["function"]["arguments"] = json.dumps(reordered, indent=self.rng.choice((1, None)))
        return message

    def without_reasoning(self, content: str) -> str:
        """A turn as clients send it back: as it was, or with its reasoning dropped or moved."""
        texts = re.split(r"\s*<think>.*?</think>\s*", content)
        thoughts = re.findall(r"<think>.*?</think>", content)
        dropped = self.rng.choice(("", "\n", "\n\n")).join(texts)
        apart = (piece for pair in zip(texts, [*thoughts, ""], strict=True) for piece in pair)
        bare = re.sub(r"<think>.*?</think>", "", content)
        in_front = "".join(thoughts).replace(">", ' signature="s">', 1) + dropped
        return self.rng.choice((content, dropped, "\n\n".join(apart), bare, in_front))

    def answers(self, turn: dict[str, Any]) -> list[dict[str, Any]]:
        calls = turn.get("tool_calls")
        if not calls:
            return [{"role": "user", "content": f"and {self.rng.random()}?"}]
        return [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]


def _javascript(text: str) -> float:
    """A number as JSON.parse and JSON.stringify make it: shortest digits, zeros after them."""
    value = float(text)
    return int(Decimal(repr(value))) if value.is_integer() else value


def positions_of(
    sequences: Sequence[Sample],
) -> dict[tuple[int, ...], tuple[list[float], list[int]]]:
    """Each trained turn by all tokens up to its end; fails if a token trains twice."""
    turns: dict[tuple[int, ...], tuple[list[float], list[int]]] = {}
    for sequence in sequences:
        response = sequence.response_token_ids.tolist()
        edges = [0, *(edge for start, n in sequence.written for edge in (start, start + n))]
        edges.append(len(response))
        place, versions = 0, token_versions(sequence.versions)
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            tokens = (*sequence.prompt.token_ids.tolist(), *response[:end])
            assert tokens not in turns
            count = end - start
            turns[tokens] = (
                sequence.behaviour_logprobs[place : place + count].tolist(),
                versions[place : place + count].tolist(),
            )
            place += count
        assert place == len(sequence.behaviour_logprobs)
    return turns


def check(world: World) -> None:
    sequences = sequences_of(world.record)
    turns = positions_of(sequences)
    assert len(turns) == len(world.seen)
    for number, (prompt, tokens, logprobs) in enumerate(world.seen):
        trained, versions = turns[*prompt, *tokens]
        assert trained == logprobs
        assert versions == [number // 100] * len(tokens)
    sampled = sum(len(tokens) for _, tokens, _ in world.seen)
    assert sampled == sum(sequence.num_sampled for sequence in sequences)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ten_thousand_random_calls_train_exactly_what_was_sampled(renderer: ChatRenderer) -> None:
    num_calls, num_forks, num_rewritten = 0, 0, 0
    for seed in range(NUM_CALLS // 50):
        world = World(renderer, seed)
        for _ in range(50):
            world.step()
        check(world)
        num_calls += len(world.record.calls)
        num_forks += sum(call.is_fork for call in world.record.calls)
        num_rewritten += world.num_rewritten
    assert num_calls == NUM_CALLS
    # Nothing that clients usually do forks; what they rewrite does.
    assert num_rewritten * 0.9 < num_forks < num_rewritten * 1.3


def test_marked_calls_do_not_train_and_all_others_do(renderer: ChatRenderer) -> None:
    for seed in range(20):
        world = World(renderer, seed, untrained=0.4)
        for _ in range(40):
            world.step()
        assert 8 < len(world.seen) < 36
        check(world)


def test_an_untrained_turn_is_prompt_of_the_turn_that_continues_it(renderer: ChatRenderer) -> None:
    world = World(renderer, 0)
    world.sample = lambda call: _say(world, call)  # type: ignore[method-assign]

    def ask(share: float, *texts: str) -> None:
        world.untrained = share
        before = world.histories[-1] if len(texts) > 1 else []
        world.ask([*before, {"role": "user", "content": texts[-1]}])

    for share, *texts in ((0, "q"), (1, "...", "a probe"), (0, "...", "on"), (1, "...", "a judge")):
        ask(share, *texts)
    ask(1, "of another root")
    [sequence] = sequences_of(world.record)
    probe = "\n<|im_start|>user\na probe<|im_end|>\n<|im_start|>assistant\nt1<|im_end|>"
    more = f"{probe}\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\nt2<|im_end|>"
    assert renderer.decode(sequence.response_token_ids.tolist()) == f"t0<|im_end|>{more}"
    assert renderer.decode(sequence.sampled_token_ids.tolist()) == "t0<|im_end|>t2<|im_end|>"
    assert (len(sequence.written), sequence.num_sampled) == (1, len(sequence.behaviour_logprobs))
    # The probe was asked after the restart's first call alone, so the latter's mark decides.
    world.record.restart()
    again = world.record.begin(
        Conversation([{"role": "user", "content": "q"}], [TOOL], False), renderer
    )
    assert (again.is_trained, again.is_finished) == (False, False)


def test_rewards_of_calls_are_found_by_the_ids_of_their_responses() -> None:
    by_id = {"chatcmpl-ab.0": 1, "resp_cd.1": -0.5, "msg_u12.0": 0}
    assert call_rewards({"call_rewards": by_id}) == {"ab.0": 1.0, "cd.1": -0.5, "u12.0": 0.0}
    assert call_rewards(["call_rewards"]) == call_rewards({"score": 1}) == {}
    for rewards in ([1.0], {"chatcmpl-ab.0": "high"}, {"chatcmpl-ab.0": float("nan")}):
        with pytest.raises(
            ValueError, match=r"^call_rewards must map ids of responses to numbers: "
        ):
            call_rewards({"call_rewards": rewards})


@pytest.mark.parametrize(
    "num_worlds", [20, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.exhaustive])]
)
def test_no_client_that_moves_reasoning_or_rewrites_numbers_forks(
    renderer: ChatRenderer, num_worlds: int
) -> None:
    for seed in range(num_worlds):
        world = World(renderer, seed)
        world.kinds.remove("rewrite")
        for _ in range(20):
            world.step()
        check(world)
        assert not any(call.is_fork for call in world.record.calls)


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        ("2.0", "2", True),
        ("[9007199254740993]", "[9007199254740992]", True),
        ("1e400", "null", True),
        ("1" + "0" * 400, "null", True),
        ("-0.0", "0", True),
        ("2.5", "2", False),
        ("1", "true", False),
        ('"2.0"', '"2"', False),
    ],
)
def test_arguments_are_equal_if_their_doubles_are(first: str, second: str, is_equal: bool) -> None:
    keys = []
    for value in (first, second):
        function = {"name": "add", "arguments": f'{{"a": {value}}}'}
        turn = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
        keys.append(Conversation(checked_messages([turn])).keys())
    assert (keys[0] == keys[1]) is is_equal


@pytest.mark.parametrize(
    ("turn", "other", "is_equal"),
    [
        ("a <think>b</think>\nc", "a\n\nc", True),
        ("b</think> c", "c", True),
        ("b</think>c<think>d</think>e", "c e", True),
        ("a<think>b</think>c", "c", False),
        ("a<think>b", "a", False),
        ("a b", "ab", True),
    ],
)
def test_reasoning_anywhere_in_a_turn_is_left_out(turn: str, other: str, is_equal: bool) -> None:
    keys = [
        Conversation([{"role": "assistant", "content": text}]).keys(spaced=False)
        for text in (turn, other)
    ]
    assert (keys[0] == keys[1]) is is_equal


def _token(token_id: int, logprob: float, version: int, reason: FinishReason) -> Completion:
    ids, logprobs = np.array([token_id], np.int32), np.array([logprob], np.float32)
    return Completion(ids, logprobs, (VersionSpan(version, 1),), reason)


def test_after_a_restart_equal_calls_are_the_recorded_ones(renderer: ChatRenderer) -> None:
    world = World(renderer, 5)
    for _ in range(40):
        world.step()
    begun = world.record.begin(Conversation([{"role": "user", "content": "last"}]), renderer)
    begun.max_tokens = 9
    begun.append(_token(5, -0.1, 0, FinishReason.ABORT))
    record = world.record.copy()
    record.restart()
    assert record.num_tokens == world.record.num_tokens

    for messages, (prompt, tokens, logprobs) in zip(world.asked, world.seen, strict=True):
        conversation = ChatRequest.model_validate(
            {"messages": messages, "tools": [TOOL]}
        ).conversation()
        call = record.begin(conversation, renderer)
        assert call.is_finished
        assert (call.prompt().tolist(), call.turn.token_ids.tolist()) == (prompt, tokens)
        assert call.turn.logprobs.tolist() == logprobs
        record.note_turn(call, conversation, Answer.of(call, conversation, renderer).message)
    again = record.begin(Conversation([{"role": "user", "content": "last"}]), renderer)
    assert (again.turn.token_ids.tolist(), again.max_tokens, again.is_finished) == ([5], 9, False)
    again.append(_token(6, -0.2, 3, FinishReason.STOP))
    assert begun.turn.token_ids.tolist() == [5]
    assert record.earlier == {}
    record.close()
    assert record.num_divergences == 0
    assert len(record.calls) == 41


def test_what_an_agent_does_not_repeat_is_dropped_and_counted(renderer: ChatRenderer) -> None:
    record = Record()
    for question in ("a", "b"):
        call = record.begin(Conversation([{"role": "user", "content": question}]), renderer)
        call.append(_token(7, 0, 0, FinishReason.STOP))
    later = record.copy()
    later.restart()
    assert later.begin(Conversation([{"role": "user", "content": "b"}]), renderer).is_finished
    assert not later.begin(Conversation([{"role": "user", "content": "c"}]), renderer).is_finished
    later.close()
    assert later.num_divergences == 1
    assert [call.turn.token_ids.tolist() for call in later.calls] == [[7]]
    assert [call.num_tokens for call in record.calls] == [1, 1]


def test_sequences_come_in_call_order_and_train_no_turn_twice(
    renderer: ChatRenderer,
) -> None:
    world = World(renderer, 0)
    world.sample = lambda call: _say(world, call)  # type: ignore[method-assign]
    world.ask([{"role": "user", "content": "q"}])
    first = world.histories[-1]
    world.ask([*first, {"role": "user", "content": "left"}])
    world.ask([{"role": "user", "content": "other"}])
    world.ask([*first, {"role": "user", "content": "right"}])
    texts = [
        (
            renderer.decode(sequence.prompt.token_ids.tolist()).count("assistant"),
            renderer.decode(sequence.response_token_ids.tolist()),
        )
        for sequence in sequences_of(world.record)
    ]
    left = "t0<|im_end|>\n<|im_start|>user\nleft<|im_end|>\n<|im_start|>assistant\nt1<|im_end|>"
    assert texts == [(1, left), (1, "t2<|im_end|>"), (2, "t3<|im_end|>")]


def _say(world: World, call: Call) -> None:
    [ids] = world.renderer.token_ids([f"t{len(world.seen)}{EOS}"])
    call.max_tokens = 99
    token_ids = np.array(ids, np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    call.append(Completion(token_ids, logprobs, spans_of(np.zeros(len(ids))), FinishReason.STOP))
    world.seen.append((call.prompt().tolist(), list(ids), logprobs.tolist()))


def test_a_turn_that_was_cut_off_is_not_extended(renderer: ChatRenderer) -> None:
    record, question = Record(), {"role": "user", "content": "q"}
    call = record.begin(Conversation([question]), renderer)
    call.append(_token(65, 0, 0, FinishReason.LENGTH))
    conversation = Conversation([question])
    message = Answer.of(call, conversation, renderer).message
    record.note_turn(call, conversation, message)
    later = record.begin(Conversation([question, message, question]), renderer)
    assert (later.parent, later.is_fork) == (None, True)


def test_items_of_responses_are_the_messages_of_chat_completions() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I add."}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1.0}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    chat = ChatRequest.model_validate({"messages": messages}).conversation()
    responses = ResponsesRequest.model_validate(
        {"input": items, "instructions": "s"}
    ).conversation()
    assert chat.keys() == responses.keys()
    assert Counter(chat.keys()).most_common(1)[0][1] == 1


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("ab END cd", ["END"], "ab END"),
        ("ab END cd", ["D c", "b E"], "ab E"),
        ("aé\U0001f600é", ["\U0001f600"], "aé\U0001f600"),
        ("ab<|im_end|>", ["<|im_end|>", "b<"], "ab<|im_end|>"),  # not a text that clients see
        ("ab<|im_end|>", ["ab"], "ab"),
        ("ab", [], "ab"),
    ],
)
def test_a_turn_ends_at_the_token_that_completes_a_stop_string_however_it_comes(
    renderer: ChatRenderer, text: str, stop: list[str], expected: str
) -> None:
    def decode(token_ids: Sequence[int]) -> str:
        return renderer.decode(token_ids, skips_special=True)

    [[*ids], [*expected_ids]] = renderer.token_ids([text, expected])
    logprobs = -np.arange(len(ids), dtype=np.float32)
    routes = np.arange(100, dtype=np.int16)[:, None]
    for size in range(1, len(ids) + 1):
        call = Call("", None, np.array([5, 6], np.int32), max_tokens=99, stop=stop)
        for start in range(0, len(ids), size):
            end = start + size
            part = Completion(
                np.array(ids[start:end], np.int32),
                logprobs[start:end],
                spans_of([3] * (start < 2) + [4] * (len(ids[start:end]) - (start < 2))),
                FinishReason.ABORT if end < len(ids) else FinishReason.STOP,
                routes[max(0, start + 1) : min(end, len(ids)) + 1] if start else routes[: end + 1],
                likeliest_of(np.array(ids[start:end], np.int32), 2),
            )
            call.append(call.until_stop(part, decode))
            if call.is_finished:
                break
        num_tokens = len(expected_ids)
        assert call.turn.token_ids.tolist() == expected_ids
        assert call.turn.logprobs.tolist() == logprobs[:num_tokens].tolist()
        assert len(token_versions(call.turn.versions)) == num_tokens
        assert call.turn.routes is not None
        assert len(call.turn.routes) == 2 + num_tokens - 1
        top_ids = likeliest_of(call.turn.token_ids, 2)["sampler_top_ids"]
        assert call.turn.columns["sampler_top_ids"].tolist() == top_ids.tolist()
        is_cut = expected != text
        assert call.finish_reason == ("stop_string" if is_cut else "stop")
