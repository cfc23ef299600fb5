"""Builds a site from docs/: pages generated from the code, and links to files outside docs/.

Keys, commands and the API come from the package that is imported, so they cannot be stale. A file
of the repository that a page links to becomes a page under ``source/``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from mkdocs.structure.files import File, Files

from bapo_megatron.cli import COMMANDS, app
from bapo_megatron.config.describe import describe_keys

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
API = {
    "Objectives": "algorithm.objective",
    "Advantages": "algorithm.advantage",
    "Rewards": "reward.base",
    "Environments": "environment.base",
    "Engines": "engine.base",
    "Finding an engine": "engine.load",
    "Model families": "policy.architecture",
    "Reading a config.json": "policy.families.config_json",
    "Layers of a family": "policy.families.layers",
    "Records": "types",
}
"""Modules under bapo_megatron/ that docs/extending.md builds on."""
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "csrc/README.md")
LANGUAGES = {".py": "python", ".sh": "sh", ".sbatch": "sh", ".yaml": "yaml", ".cff": "yaml"}
BOOSTS = {"benchmarks/": 0.1, "source/": 0.1, "study/": 0.1, "reference/": 0.5, "changelog": 0.1}
"""How much less the search weighs a page whose path begins so than a guide."""
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^\s)#]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and those of the files outside docs/ that pages link to."""
    generated = {
        "reference/configuration.md": configuration_page(),
        "reference/commands.md": commands_page(),
        "reference/api.md": api_page(),
        "benchmarks/README.md": benchmarks_page(),
    }
    for name in PAGES:
        generated[f"source/{name}"] = (ROOT / name).read_text()
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    texts |= {name: (ROOT / name).read_text() for name in PAGES}
    for page, text in texts.items():
        for link in _LINK.findall(text):
            target = _in_repository(page, link)
            if (ROOT / target).is_file() and not target.startswith("docs/"):
                generated.setdefault(_source_uri(target), _code_page(target))
    for uri, content in generated.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links to folders and to files outside docs/ lead to their pages; weigh the page."""
    uri = page.file.src_uri
    for beginning, boost in BOOSTS.items():
        if uri.startswith(beginning):
            page.meta["search"] = {"boost": boost, **page.meta.get("search", {})}
    is_source = uri.startswith("source/")
    place = uri.removeprefix("source/") if is_source else f"docs/{uri}"

    def changed(match: re.Match[str]) -> str:
        target = _in_repository(place, match[0])
        if target.startswith("docs"):
            found = target.removeprefix("docs").removeprefix("/")
            found = posixpath.join(found, "README.md") if (ROOT / target).is_dir() else found
        elif (ROOT / target).is_file():
            found = _source_uri(target)
        else:
            return match[0]
        return posixpath.relpath(found, posixpath.dirname(uri) or ".")

    return _LINK.sub(changed, markdown)


def _in_repository(page: str, link: str) -> str:
    """The path in the repository that a link of a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _source_uri(path: str) -> str:
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _code_page(path: str) -> str:
    language = LANGUAGES.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n{text}\n````\n"


def configuration_page() -> str:
    """Every key of a configuration, by section."""
    sections: dict[str, list[str]] = {}
    for key in describe_keys():
        section = key.name.partition(".")[0] if "." in key.name else "The run"
        cells = (f"`{key.name}`", _escaped(key.type), f"`{key.default}`", _text(key.description))
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        sections.setdefault(section.removesuffix("[]"), []).append(f"| {row} |")
    parts = ["# Configuration keys\n\n`[]` stands for each element of a list.\n"]
    for section, rows in sections.items():
        head = "| key | type | default | meaning |\n|---|---|---|---|\n"
        parts.append(f"## {section}\n\n{head}" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def commands_page() -> str:
    """Every command with its arguments and options."""
    parts = [
        "# Commands\n\nAll start with `python -m bapo_megatron` or `bapo-megatron`. `KEY=VALUE` is "
        "a [key of the configuration](configuration.md) and its value.\n"
    ]
    group: Any = typer.main.get_command(app)
    for name in COMMANDS:
        context = group.context_class(group, info_name="bapo-megatron")
        _, command, _ = group.resolve_command(context, [name])
        parts += _describe(command, [name])
    return "\n".join(parts)


def _describe(command: Any, path: list[str]) -> list[str]:
    """The parts of a page about a command and, below it, its subcommands."""
    if subcommands := getattr(command, "commands", None):
        return [
            part for name in subcommands for part in _describe(subcommands[name], [*path, name])
        ]
    context = command.context_class(command, info_name=" ".join(path))
    usage = " ".join([*path, *command.collect_usage_pieces(context)])
    parts = [f"## {' '.join(path)}\n", f"```text\n{usage}\n```\n", _text(command.help or "") + "\n"]
    rows = []
    for parameter in command.get_params(context):
        if "--help" not in parameter.opts:
            name, meaning = parameter.get_help_record(context)
            if parameter.param_type_name == "argument":
                name = name.partition(" <")[0]
            cells = (f"`{name.strip()}`", _text(meaning))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if rows:
        parts.append("| argument | meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
    return parts


def api_page() -> str:
    """The docstrings of what docs/extending.md builds on."""
    parts = [
        "# API of the extension points\n\n[Extending](../extending.md) shows each in use. What is "
        "not listed here may change without notice.\n"
    ]
    for title, module in API.items():
        options = "    options: {show_root_heading: false, heading_level: 3}"
        parts.append(
            f"## {title}\n\n`bapo_megatron.{module}`\n\n::: bapo_megatron.{module}\n{options}\n"
        )
    return "\n".join(parts)


def benchmarks_page() -> str:
    """The measurements, by title."""
    rows = [
        f"- [{page.read_text().splitlines()[0].removeprefix('# ')}]({page.name})"
        for page in sorted((ROOT / "docs" / "benchmarks").glob("*_20*.md"))
    ]
    head = "# Benchmarks\n\nEach names its command, machine and commit.\n\n"
    return head + "\n".join(rows) + "\n"


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;")


def _text(text: str) -> str:
    """A docstring as Markdown on one line, with links to the pages that it names."""
    line = " ".join(text.split()).replace("``", "`")
    return re.sub(r"\bdocs/(\w+\.md)", lambda match: _titled(match[1]), _escaped(line))


def _titled(name: str) -> str:
    """A link to a page of docs/ that reads as its title."""
    title = (ROOT / "docs" / name).read_text().splitlines()[0].removeprefix("# ")
    return f"[{title}](../{name})"
