"""docs/architecture.md shows the import rules and the tree as they are."""

from __future__ import annotations

import re
import tomllib

from tests.docs.pages import blocks
from tests.launch import REPOSITORY

PAGE = REPOSITORY / "docs" / "architecture.md"


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
    [shown] = [block for block in blocks(PAGE) if block.code.startswith("cli\n")]
    assert [set(line.split(" | ")) for line in shown.code.splitlines()] == checked


def test_the_tree_has_every_package_and_module() -> None:
    section = PAGE.read_text().split("\n## The tree\n")[1].split("\n### ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    package = REPOSITORY / "bapo_megatron"
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    modules = {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    assert sorted(listed) == sorted(folders | modules)
