"""The pages agree with the code: links, architecture, changelog and names of metrics."""

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

from bapo_megatron import __version__
from bapo_megatron.telemetry.metrics import OLD_METRIC_NAMES
from tests.docs.metric_names import LISTED, unlisted
from tests.docs.pages import CURRENT, PAGES, anchors, blocks, links, name_of, prose
from tests.launch import REPOSITORY

ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
CHANGELOG = (REPOSITORY / "docs" / "changelog.md").read_text()
FILES = [
    str(path)
    for folder in ("bapo_megatron", "csrc", "examples", "requirements", "tests")
    for path in (REPOSITORY / folder).rglob("*.*")
]
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
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_empty_line_divides_a_table(page: Path) -> None:
    """The rows below it would be shown as text."""
    rows_without_a_head = re.findall(r"\|\n\n(\|.+\|)\n(?!\|[-:| ]+\|\n)", page.read_text())
    assert rows_without_a_head == []


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_files_of_the_code_that_a_page_names_exist(page: Path) -> None:
    for name in re.findall(r"`([\w/]+\.(?:py|cpp|cu|cuh|h|sh|js))`", prose(page)):
        is_of_a_reader = name.startswith("my_")
        assert is_of_a_reader or any(path.endswith(f"/{name}") for path in FILES), name


def test_the_layers_of_the_page_are_those_that_import_linter_checks() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    [contract] = [
        contract
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and "containers" not in contract
    ]
    checked = [layer.replace("bapo_megatron.", "") for layer in contract["layers"]]
    [shown] = [block for block in blocks(ARCHITECTURE) if block.code.startswith("cli\n")]
    assert shown.code.splitlines() == checked


def test_the_tree_has_every_package_and_module() -> None:
    section = ARCHITECTURE.read_text().split("\n## The tree\n")[1].split("\n### ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    package = REPOSITORY / "bapo_megatron"
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    modules = {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    assert sorted(listed) == sorted(folders | modules)


def test_the_changelog_lists_versions_from_the_newest_and_five_kinds_of_changes() -> None:
    """The changelog may be ahead of the package, whose version changes with a release."""
    headings = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert headings in (released, ["Unreleased", *released])
    versions = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+)( - \d+ \w+ \d{4})?", it) for it in released]
    numbers = [tuple(map(int, version.groups()[:3])) for version in versions if version]
    assert len(numbers) == len(released)
    assert numbers == sorted(set(numbers), reverse=True)
    assert __version__ in {".".join(map(str, number)) for number in numbers}
    kinds = set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE))
    assert kinds == {"Upgrading", "Added", "Changed", "Fixed", "Removed"}


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
                    fixed = "".join(text for text in texts if text != "(.+)")
                    if _NAME.fullmatch(fixed) and fixed.strip("/_"):
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


def test_every_whole_name_in_the_code_is_listed_once() -> None:
    assert len(LISTED) == len(set(LISTED)) > 120
    spaces = {name.partition("/")[0] for name in LISTED}
    names, _ = names_in_the_code()
    whole = {name for name in names if re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+[a-z0-9]", name)}
    named = {text for text in whole if text.partition("/")[0] in spaces}
    assert unlisted(named - OLD_METRIC_NAMES.keys()) == set()


def test_every_listed_name_is_made_by_the_code() -> None:
    assert [name for name in LISTED if not is_made(name)] == []
    for name in ("rollout/no_such_metric", "train/packing_max", "train/tokens", "time/rollout"):
        assert not is_made(name)
