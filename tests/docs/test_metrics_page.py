"""docs/metrics.md lists what the code reports, and nothing else."""

from __future__ import annotations

import ast
import re

from tests.docs.metric_names import LISTED, unlisted
from tests.launch import REPOSITORY

NODES = [
    node
    for path in (REPOSITORY / "bapo_megatron").rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
]
TEXTS = {node.value for node in NODES if isinstance(node, ast.Constant)}
TEXTS = {text for text in TEXTS if isinstance(text, str)}
WORDS = {word for text in TEXTS for word in re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)*", text)}
WORDS |= {  # names of fields, which become names of metrics
    node.target.id
    for node in NODES
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
}
FORMATTED = [
    re.compile(
        "".join(re.escape(p.value) if isinstance(p, ast.Constant) else "(.+)" for p in parts)
    )
    for parts in (node.values for node in NODES if isinstance(node, ast.JoinedStr))
    if any(isinstance(p, ast.Constant) and re.search(r"[a-z/]", p.value) for p in parts)
]
"""What f-strings may give that are not interpolations alone."""


def is_made(name: str, depth: int = 3) -> bool:
    """Whether the code has this name, or puts it together from words that it has."""
    if name in WORDS or name in TEXTS or re.fullmatch(r"(\w+/)*<\w+>(_s|/<\w+>)?", name):
        return True
    matches = (pattern.fullmatch(name) for pattern in FORMATTED)
    return depth > 0 and any(
        all(is_made(part, depth - 1) for part in match.groups()) for match in matches if match
    )


def test_a_name_is_listed_once() -> None:
    assert len(LISTED) == len(set(LISTED))
    assert len(LISTED) > 120


def test_every_whole_name_in_the_code_is_listed() -> None:
    spaces = {name.partition("/")[0] for name in LISTED}
    whole = {text for text in TEXTS if re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+[a-z0-9]", text)}
    found = {text for text in whole if text.partition("/")[0] in spaces}
    assert len(found) > 60
    assert unlisted(found) == set()


def test_every_listed_name_is_made_by_the_code() -> None:
    assert [name for name in LISTED if not is_made(name)] == []
    assert not is_made("rollout/no_such_metric")


def test_a_name_that_is_not_listed_is_found() -> None:
    made = ("reward/mean", "eval/aime24/pass_at_8", "ranks/training_s_max", "reward/math/found")
    assert unlisted([*made, "train/loss", "rollout/tokens"]) == {"train/loss", "rollout/tokens"}
