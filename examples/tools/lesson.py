r"""Makes the demo's tiny model, taught the format of a tool call, and sums that need the tool.

    python -m examples.tools.lesson runs/demo-tool-tiny --seed 0

The lesson is supervised, on sums of two numbers of one to four digits without a carry. One answer
in seven calls the tool, and all others are the box at once::

    <|user|>[python]523+41=?<|assistant|><tool_call>{"name": "python", "arguments": {"code":
    "523+41"}}</tool_call><eos><|user|><tool_response>564
    </tool_response><|assistant|>\boxed{564}<eos>

A fifth of the prompts lack ``[python]``, as all do without tools: no answer to them calls it. The
sums of train.jsonl and heldout.jsonl have three digits and at least one carry, which the lesson
never shows: in its head the model is wrong. So what is left to learn is to call at all.
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch.nn.functional import cross_entropy

from bapo_megatron.runtime.files import atomic_directory
from bapo_megatron.telemetry.console import ProgressLine
from examples.tiny.make import (
    IGNORED_LABEL,
    Pair,
    WarmupSettings,
    learning_rate,
    pad_batch,
)
from examples.tiny.model import build_model, build_tokenizer, save_model

CALL_SHARE = 1 / 7
NUM_TRAIN, NUM_HELDOUT, NUM_DEMONSTRATIONS = 2048, 256, 1024
_CALL, _CALL_END = '{"name": "python", "arguments": {"code": "', '"}}</tool_call>'
_WORDS = ("<tool_call>", '{"name": "python", "arguments": {"code": "', '"}}', "</tool_call>")
_DIGITS_WITHOUT_CARRY = [(a, b) for a in range(10) for b in range(10 - a)]
_RESPONSE_WORDS = ("<tool_response>", "</tool_response>")
"""One token each, as the demo's words are."""
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{{ message['content'] }}{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ eos_token }}"
    "{% else %}<|user|>{% if loop.first and tools %}[{{ tools[0].function.name }}]{% endif %}"
    "{% if message['role'] == 'tool' %}<tool_response>{{ message['content'] }}</tool_response>"
    "{% else %}{{ message['content'] }}{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def trivial_sum(rng: random.Random) -> str:
    """Return a sum of two numbers of one to four digits, without a carry."""
    places = [rng.choice(_DIGITS_WITHOUT_CARRY) for _ in range(rng.randint(1, 4))]
    first, second = (int("".join(map(str, digits))) for digits in zip(*places, strict=True))
    return f"{first}+{second}"


def hard_sums(seed: int) -> list[str]:
    """Return distinct sums of two numbers of three digits with at least one carry."""
    rng, sums = random.Random(f"sums-{seed}"), dict[str, None]()
    while len(sums) < NUM_TRAIN + NUM_HELDOUT:
        a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
        if any(int(x) + int(y) > 9 for x, y in zip(str(a), str(b), strict=True)):
            sums[f"{a}+{b}"] = None
    return list(sums)


def _value(text: str) -> int:
    return sum(map(int, text.split("+")))


def demonstration(text: str) -> dict[str, Any]:
    """Return the transcript of a call for a sum, as messages."""
    function = {"name": "python", "arguments": {"code": text}}
    call = {"type": "function", "function": function}
    return {
        "messages": [
            {"role": "user", "content": f"{text}=?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": f"{_value(text)}\n"},
            {"role": "assistant", "content": f"\\boxed{{{_value(text)}}}"},
        ]
    }


def _pairs(tokenizer: Any, rng: random.Random, call_share: float) -> Iterator[Pair]:
    """The policy's turns in one transcript after another."""

    def ids(text: str) -> list[int]:
        token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids

    while True:
        text = trivial_sum(rng)
        box = ids(f"\\boxed{{{_value(text)}}}<eos>")
        if rng.random() < 0.2:
            yield ids(f"<bos><|user|>{text}=?<|assistant|>"), box
            continue
        prompt = f"<bos><|user|>[python]{text}=?<|assistant|>"
        yield ids(prompt), ids("<tool_call>") if rng.random() < call_share else box
        if not call_share:
            continue
        prompt += "<tool_call>"
        call = f"{_CALL}{text}{_CALL_END}<eos>"
        yield ids(prompt), ids(call)
        prompt += f"{call}<|user|><tool_response>{_value(text)}\n</tool_response><|assistant|>"
        yield ids(prompt), box


def teach(
    model: Any, tokenizer: Any, settings: WarmupSettings, seed: int, call_share: float = CALL_SHARE
) -> float:
    """Train ``model`` in place; return the cross entropy of the last step, in nats per token."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.peak_lr, betas=(0.9, 0.98), weight_decay=0.0
    )
    pairs = _pairs(tokenizer, random.Random(f"lesson-{seed}"), call_share)
    loss = torch.zeros(())
    torch.set_num_threads(1)  # the weights depend on it
    model.train()
    with ProgressLine() as progress:
        for step in range(settings.num_steps):
            batch = list(itertools.islice(pairs, settings.batch_size))
            input_ids_BS, labels_BS = pad_batch(batch, tokenizer.pad_token_id)
            logits_BSV = model(input_ids_BS[:, :-1], use_cache=False).logits
            loss = cross_entropy(
                logits_BSV.flatten(0, 1), labels_BS[:, 1:].flatten(), ignore_index=IGNORED_LABEL
            )
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, settings)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(f"lesson: step {step + 1}/{settings.num_steps}, loss {loss.item():.3f}")
    model.eval()
    return loss.item()


def make(
    folder: Path, seed: int, settings: WarmupSettings, call_share: float = CALL_SHARE
) -> float:
    """Write model/ and the data to ``folder``; return the loss of ``teach``."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(word, normalized=False) for word in (*_WORDS, *_RESPONSE_WORDS)]
    )
    tokenizer.chat_template = _TEMPLATE
    model = build_model(tokenizer, seed)
    loss = teach(model, tokenizer, settings, seed, call_share)
    sums = hard_sums(seed)
    with atomic_directory(folder) as temporary:
        for name, part in (("train", sums[NUM_HELDOUT:]), ("heldout", sums[:NUM_HELDOUT])):
            rows = [json.dumps({"prompt": f"{s}=?", "answer": str(_value(s))}) + "\n" for s in part]
            (temporary / f"{name}.jsonl").write_text("".join(rows))
        rng = random.Random(f"demonstrations-{seed}")
        shown = [demonstration(trivial_sum(rng)) for _ in range(NUM_DEMONSTRATIONS)]
        (temporary / "demonstrations.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in shown)
        )
        (temporary / "model").mkdir()
        save_model(model, tokenizer, temporary / "model")
    return loss


def main() -> None:
    """Make ``DIR``, unless it exists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--no-calls", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.dir / "model").exists():
        settings = WarmupSettings(num_steps=arguments.steps)
        call_share = 0.0 if arguments.no_calls else CALL_SHARE
        loss = make(arguments.dir, arguments.seed, settings, call_share)
        print(f"taught {arguments.dir / 'model'}, final loss {loss:.3f}")


if __name__ == "__main__":
    main()
