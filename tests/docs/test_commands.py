"""What the pages show can be typed: every block is run, or says what it needs, and is parsed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bapo_megatron.cli import COMMANDS
from bapo_megatron.config.describe import describe_keys
from bapo_megatron.config.load import load_config, parse_section
from bapo_megatron.tools.sweep.file import SweepConfig
from tests.config.shipped import FRAGMENTS
from tests.docs.pages import CURRENT, PAGES, Block, blocks, name_of, prose, spans
from tests.docs.shell import Typed, options_of, parse, typed_commands
from tests.launch import REPOSITORY
from tests.tools.report.made_runs import make_run

pytestmark = pytest.mark.exhaustive

NEEDS = {f"needs {what}" for what in ("GPUs", "a cluster", "a finished demo", "minutes")}
NEEDS |= {"needs the network", "needs podman"}
LANGUAGES = {"sh", "text", "python", "yaml", "json", "diff"}
BLOCKS = [block for page in PAGES for block in blocks(page)]
TYPED = [typed for page in CURRENT for typed in typed_commands(page)]
CHEAP = [block for block in BLOCKS if block.language == "sh" and not block.title]
SECTIONS = {key.name.partition(".")[0] for key in describe_keys() if "." in key.name}
KEYS = {key.name.replace("[]", "") for key in describe_keys()}


def test_every_block_names_its_language_and_every_script_what_it_needs() -> None:
    assert [block.place for block in BLOCKS if block.language not in LANGUAGES] == []
    assert {block.title for block in BLOCKS if block.language == "sh"} == NEEDS | {""}
    assert [block.place for block in BLOCKS if block.title and block.language != "sh"] == []
    assert len(TYPED) > 30


@pytest.mark.slow
@pytest.mark.parametrize("block", CHEAP, ids=lambda block: block.place)
def test_a_block_without_needs_runs(block: Block, tmp_path: Path) -> None:
    for name in ("configs", "tests"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    for name in ("demo", "bapo-0", "grpo-0"):
        if name.partition("-")[0] in block.code:
            make_run(tmp_path / "runs" / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    path = f"{Path(sys.executable).parent}:{tmp_path / 'bin'}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("typed", TYPED, ids=lambda typed: f"{typed[0]}: {' '.join(typed[1])}")
def test_a_command_takes_its_arguments_and_its_configuration_its_overrides(typed: Typed) -> None:
    given = parse(typed.arguments)
    config, overrides = given.get("config"), list(given.get("overrides") or ())
    if config is None:
        return
    path = Path("configs/demo.yaml") if str(config) == "CONFIG" else Path(config)
    if not path.is_relative_to("configs"):
        is_of_a_reader = path.name.startswith("my") or path.name == "run.yaml"  # as init writes it
        assert is_of_a_reader, f"no such file: {path}"
        return
    given_keys = {override.partition("=")[0] for override in overrides}
    missing = [
        setting
        for setting in FRAGMENTS.get(path.stem, ())
        if setting.partition("=")[0] not in given_keys
    ]
    load_config(REPOSITORY / path, [*missing, *overrides])


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "yaml"], ids=lambda block: block.place
)
def test_a_configuration_of_a_page_loads(block: Block, tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    (tmp_path / "page").mkdir()
    file = tmp_path / "page" / "page.yaml"
    settings = yaml.safe_load(block.code)
    if "variants" in settings:
        sweep = parse_section(SweepConfig, settings, str(file))
        for overrides in sweep.variants.values():
            load_config(file.parent / sweep.config, [*sweep.overrides, *overrides])
        return
    inherited = settings.get("inherit", "demo.yaml")
    file.write_text(yaml.safe_dump(settings | {"inherit": f"../configs/{inherited}"}))
    load_config(file)


def test_the_readme_lists_every_command() -> None:
    listed = re.findall(r"^\| `([a-z-]+)[^`]*` \|", (REPOSITORY / "README.md").read_text(), re.M)
    assert set(listed) == set(COMMANDS)


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_options_and_keys_in_the_text_exist(page: Path) -> None:
    for span in spans(page):
        name, *rest = span.replace("[", " ").replace("]", " ").split() or [""]
        if name in COMMANDS:
            for option in (word for word in rest if re.fullmatch(r"--[a-z-]+", word)):
                assert option in options_of(name), f"`{span}`: no such option"
        if key := re.match(r"([a-z_]+\.[a-z_.]+[a-z_])(=|$|: )", span):
            assert is_key(key[1]) or not looks_like_a_key(key[1]), f"`{span}`: no such key"


def is_key(name: str) -> bool:
    """Whether this is a key, a section, or an option that the objective declares."""
    return any(f"{key}.".startswith(f"{name}.") for key in KEYS) or name.startswith(
        "algorithm.objective_options."
    )


def looks_like_a_key(name: str) -> bool:
    """Whether this begins with a section, and is neither a file's name nor a module's."""
    section, second, *_ = name.split(".")
    is_file = second in ("py", "md", "json", "yaml", "parquet")
    module = REPOSITORY / "bapo_megatron" / section / f"{second}.py"
    return section in SECTIONS and not is_file and not module.exists()


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_make_has_the_targets_that_a_page_names(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.M)
    shown = [block.code for block in blocks(page) if block.language == "sh"]
    for text in (*shown, *spans(page)):
        for target in re.findall(r"^make ([a-z-]+)", text, re.M):
            assert target in targets, f"make {target}"


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_modules_of_a_page_exist_and_know_their_options(page: Path) -> None:
    text = prose(page) + "".join(block.code for block in blocks(page))
    for module, rest in re.findall(r"python -m ((?:tests|examples)\.[\w.]+)([^\n`]*)", text):
        path = REPOSITORY.joinpath(*module.split("."))
        source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        for option in re.findall(r"--[a-z][a-z-]+", rest):
            assert f'"{option}"' in source, f"{module}: no {option}"
