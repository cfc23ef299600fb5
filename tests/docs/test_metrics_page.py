"""docs/metrics.md lists what the code reports, and nothing else."""

from __future__ import annotations

import ast
import functools
import re

from tests.docs.metric_names import LISTED, unlisted
from tests.launch import REPOSITORY

_NAME = re.compile(r"[a-z0-9_/]+")


@functools.cache
def names_in_the_code() -> tuple[set[str], list[re.Pattern[str]]]:
    """Texts and fields that may be names or parts of names, and what f-strings make of them."""
    names: set[str] = set()
    formats: set[str] = set()
    for path in (REPOSITORY / "bapo_megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)) if _NAME.fullmatch(text):
                    names.add(text)
                case ast.AnnAssign(target=ast.Name(id=field)):  # fields become names of metrics
                    names.add(field)
                case ast.JoinedStr(values=parts):
                    texts = [p.value if isinstance(p, ast.Constant) else "(.+)" for p in parts]
                    own = "".join(text for text in texts if text != "(.+)")
                    if _NAME.fullmatch(own) and own.strip("/_"):
                        formats.add("".join(texts))
    return names, [re.compile(text) for text in sorted(formats)]


def is_made(name: str, depth: int = 3) -> bool:
    """Whether the code has this name, or an f-string that makes it from names that it has."""
    names, formats = names_in_the_code()
    if name in names or re.fullmatch(r"(\w+/)*<\w+>(_s|/<\w+>)?", name):
        return True
    if depth == 0:
        return False
    if below := re.fullmatch(r"<\w+>/(.+)", name):  # of a data set or a function
        return is_made(below[1], depth - 1)
    matches = (pattern.fullmatch(name) for pattern in formats)
    return any(all(is_made(p, depth - 1) for p in match.groups()) for match in matches if match)


def test_a_name_is_listed_once() -> None:
    assert len(LISTED) == len(set(LISTED))
    assert len(LISTED) > 120


def test_every_whole_name_in_the_code_is_listed() -> None:
    spaces = {name.partition("/")[0] for name in LISTED}
    names, _ = names_in_the_code()
    whole = {name for name in names if re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+[a-z0-9]", name)}
    found = {text for text in whole if text.partition("/")[0] in spaces}
    assert len(found) > 60
    assert unlisted(found) == set()


def test_every_listed_name_is_made_by_the_code() -> None:
    assert [name for name in LISTED if not is_made(name)] == []
    # Each part of these is in the code, but nothing joins them.
    for name in ("rollout/no_such_metric", "train/packing_max", "train/tokens", "time/rollout"):
        assert not is_made(name)


def test_a_name_that_is_not_listed_is_found() -> None:
    made = ("reward/mean", "eval/aime24/pass_at_8", "ranks/training_s_max", "reward/math/found")
    assert unlisted([*made, "train/loss", "rollout/tokens"]) == {"train/loss", "rollout/tokens"}
