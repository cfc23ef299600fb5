"""The pages agree with the code: links, architecture, changelog and names of metrics."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from typing import TYPE_CHECKING

import pytest

from bapo_megatron import __version__
from tests.docs.metric_names import LISTED, unlisted
from tests.docs.pages import PAGES, anchors, blocks, links, name_of
from tests.launch import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
CHANGELOG = (REPOSITORY / "docs" / "changelog.md").read_text()
_NAME = re.compile(r"[a-z0-9_/]+")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(REPOSITORY), f"{link}: outside the repository"
        if anchor:
            assert target.suffix == ".md", f"{link}: only pages have anchors"
            assert anchor in anchors(target), f"{link}: no such heading"


def test_links_and_anchors_are_found_as_they_are_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# What c_low is, and `why`\n## Twice\n## Twice\n"
        "[a](b.md#c) `[no](link)` ![d\ne](<f g.png>) [h](i.png)\n"
        "```text\n# not a heading\n[no](link)\n```\n"
    )
    assert links(page) == ["b.md#c", "i.png"]
    assert anchors(page) == {"what-c_low-is-and-why", "twice", "twice-1"}


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    pending = [REPOSITORY / "README.md"]
    while pending:
        page = pending.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.is_dir():
                pending += target.glob("*.md")
            elif target.suffix == ".md" and target.exists():
                pending.append(target)
    assert set(PAGES) <= reached


def test_the_layers_of_the_page_are_those_that_import_linter_checks() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    [contract] = [
        contract
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and "containers" not in contract
    ]
    checked = [
        set(layer.replace("bapo_megatron.", "").split(" | ")) for layer in contract["layers"]
    ]
    [shown] = [block for block in blocks(ARCHITECTURE) if block.code.startswith("cli\n")]
    assert [set(line.split(" | ")) for line in shown.code.splitlines()] == checked


def test_the_tree_has_every_package_and_module() -> None:
    section = ARCHITECTURE.read_text().split("\n## The tree\n")[1].split("\n### ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    package = REPOSITORY / "bapo_megatron"
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    modules = {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    assert sorted(listed) == sorted(folders | modules)


def test_versions_are_listed_from_the_newest_with_what_is_unreleased_on_top() -> None:
    first, *versions = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)
    assert first == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions)
    numbers = [tuple(map(int, version.split("."))) for version in versions]
    assert numbers == sorted(set(numbers), reverse=True)
    assert versions[0] == __version__


def test_changes_are_of_three_kinds() -> None:
    assert set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE)) <= {
        "Breaking",
        "Added",
        "Changed",
    }


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
