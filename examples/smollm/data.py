"""Sums, differences, products and one-sentence word problems in English, drawn with a seed.

python -m examples.smollm.data runs/smollm2

Every prompt is a chat whose first turn shows the form of an answer. Held-out questions do not
occur in training.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

NUM_TRAIN, NUM_HELDOUT = 480, 300
EXAMPLE = (("What is 2 + 3?", "2 + 3 = 5. The answer is 5."),)
"""The chat's turns before the question."""
_NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo")
_THINGS = ("apples", "books", "coins", "eggs", "pencils", "stamps", "shells", "tickets")

Question = tuple[str, int]


def _sum(rng: random.Random) -> Question:
    a, b = rng.randint(2, 20), rng.randint(2, 20)
    return f"What is {a} + {b}?", a + b


def _difference(rng: random.Random) -> Question:
    b, a = sorted((rng.randint(2, 20), rng.randint(2, 20)))
    return f"What is {a} - {b}?", a - b


def _product(rng: random.Random) -> Question:
    a, b = rng.randint(2, 13), rng.randint(2, 13)
    return f"What is {a} * {b}?", a * b


def _gain(rng: random.Random) -> Question:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have?", a + b


def _loss(rng: random.Random) -> Question:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    b, a = sorted((rng.randint(2, 12), rng.randint(2, 12)))
    return f"{name} has {a} {thing} and gives away {b}. How many {thing} are left?", a - b


def _boxes(rng: random.Random) -> Question:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return f"{name} fills {a} boxes with {b} {thing} each. How many {thing} is that?", a * b


KINDS: tuple[Callable[[random.Random], Question], ...] = (
    *(_sum, _difference, _product),
    *(_gain, _loss, _boxes),
)


def draw(seed: int, num_train: int, num_heldout: int) -> tuple[list[Question], list[Question]]:
    """Draw distinct questions, the kinds in turn: for training and held out."""
    rng, questions = random.Random(seed), {}
    while len(questions) < num_train + num_heldout:
        text, answer = KINDS[len(questions) % len(KINDS)](rng)
        questions.setdefault(text, answer)
    drawn = list(questions.items())
    return drawn[num_heldout:], drawn[:num_heldout]


def to_row(question: Question) -> str:
    """A line of JSON: the chat, the answer, and which data set it is."""
    text, answer = question
    chat = [
        {"role": role, "content": content}
        for turn in EXAMPLE
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    row = {"prompt": [*chat, {"role": "user", "content": text}], "answer": str(answer)}
    return json.dumps(row) + "\n"


def main() -> None:
    """Write ``DIR/train.jsonl`` and ``DIR/heldout.jsonl``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train, heldout = draw(options.seed, NUM_TRAIN, NUM_HELDOUT)
    options.dir.mkdir(parents=True, exist_ok=True)
    (options.dir / "train.jsonl").write_text("".join(map(to_row, train)))
    (options.dir / "heldout.jsonl").write_text("".join(map(to_row, heldout)))


if __name__ == "__main__":
    main()
