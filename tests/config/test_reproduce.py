"""Every command of docs/reproduce.md is what its row says, and could start."""

import re
import shlex
from itertools import product
from pathlib import Path

import pytest

from bapo_megatron.config.check import check_config
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.settings import differing, flat_settings
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.tools.planning.plan import PlanOptions, make_plan
from tests.config.shipped import FOLDER, hf_config, hf_config_file, write_inputs
from tests.launch import REPOSITORY

TEXT = (REPOSITORY / "docs" / "reproduce.md").read_text()
COMMANDS = [
    tuple(shlex.split(command))
    for line in TEXT.splitlines()
    if line.startswith("|")
    for command in re.findall(r"`[^`]*?(configs/[^`]+)`", line)
]
EVALUATIONS = [command for command in COMMANDS if "eval-aime" in command[0]]
RUNS = [command for command in COMMANDS if "eval-aime" not in command[0]]

GRPO, HIGHER, START, CORNER = (0.8, 1.2), (0.8, 1.28), (0.6, 1.2), (0.9, 3.0)
TABLES: dict[str, tuple[int, tuple[float, float] | None, float | None, int | None]] = {
    "r1-0-grpo": (1, GRPO, None, None),
    "r1-2x-grpo": (2, GRPO, None, None),
    "r1-4x-grpo": (4, GRPO, None, None),
    "r1-8x-grpo": (8, GRPO, None, None),
    "r1-4x-upper1.5": (4, (0.8, 1.5), None, None),
    "r1-4x-lower0.5": (4, (0.5, 1.2), None, None),
    "r1-4x-bapo": (4, None, None, None),
    "r1-2x-bapo": (2, None, None, None),
    "r1-2x-clip-higher": (2, HIGHER, None, None),
    "r1-4x-clip-higher": (4, HIGHER, None, None),
    "r1-budget4k-grpo": (1, GRPO, None, 4096),
    "r1-budget4k-bapo": (1, None, None, 4096),
    "r1-budget2k-grpo": (1, GRPO, None, 2048),
    "r1-budget2k-bapo": (1, None, None, 2048),
    "r1-4x-start": (4, START, None, None),
    "r1-4x-corner": (4, CORNER, None, None),
    "r1-4x-share0.5": (4, None, None, None),
    "r1-4x-ratio0.5": (4, None, None, None),
    "r1-4x-recipe": (4, None, 3.0, None),
    "llama-bapo": (4, None, None, None),
    "llama-grpo": (4, GRPO, None, None),
    "llama-corner": (4, (0.9, 2.0), None, None),
}
"""Runs of 64 prompts an update: updates per batch, fixed bounds, dual clip, budget of a round."""


def config_of(command: tuple[str, ...], *more: str) -> RunConfig:
    file, *overrides = command
    return load_config(FOLDER.parent / file, [*overrides, *more])


COMMAND_OF = {config_of(command).name: command for command in RUNS}
CONFIGS = {name: config_of(command) for name, command in COMMAND_OF.items()}
ADDED = (
    ("rollout.max_response_tokens=31744", "parallel.context=2"),
    ("algorithm.epochs=2",),
    ("train.dump_tokens=20",),
)
"""What the text says to add."""


def test_the_table_has_every_curve_once() -> None:
    assert len(RUNS) == len(CONFIGS)
    longer = {"bp-math-7b-64k-grpo", "bp-math-7b-64k", "bp-math-32b-64k-grpo", "bp-math-32b-64k"}
    assert CONFIGS.keys() == TABLES.keys() | longer


@pytest.mark.parametrize("name", TABLES)
def test_a_run_is_what_its_row_says(name: str) -> None:
    updates, bounds, dual_clip, budget = TABLES[name]
    config = CONFIGS[name]
    algorithm = config.algorithm
    fixed = (algorithm.fixed.low, algorithm.fixed.high)
    assert algorithm.objective == ("clip" if bounds else "bapo")
    assert bounds in (None, fixed)
    assert algorithm.dual_clip == dual_clip
    assert algorithm.updates_per_batch == updates
    assert config.rollout.partial_tokens == budget
    responses = config.rollout.groups_per_step * config.rollout.samples_per_group
    assert responses == updates * 1024
    (line,) = [line for line in TEXT.splitlines() if f"name={name} " in f"{line.replace('`', ' ')}"]
    cells = [cell.strip() for cell in line.split("|")]
    if len(cells) == 6:  # tables with the responses per step
        assert cells[3] == f"{responses:,}"


def test_targets_are_those_that_were_published() -> None:
    targets = {
        name: (CONFIGS[name].algorithm.bapo.measure, CONFIGS[name].algorithm.bapo.target)
        for name in ("r1-4x-bapo", "r1-4x-share0.5", "r1-4x-ratio0.5", "r1-4x-recipe", "llama-bapo")
    }
    assert targets == {
        "r1-4x-bapo": ("share", 0.4),
        "r1-4x-share0.5": ("share", 0.5),
        "r1-4x-ratio0.5": ("ratio", 0.5),
        "r1-4x-recipe": ("ratio", 1.0),
        "llama-bapo": ("share", 0.45),
    }


def test_ranges_are_those_that_were_published() -> None:
    ranges = {
        name: [(side.start, side.max, side.step) for side in (bapo.lower, bapo.upper)]
        for name in ("bp-math-7b-64k", "r1-4x-recipe")
        for bapo in [CONFIGS[name].algorithm.bapo]
    }
    assert ranges == {
        "bp-math-7b-64k": [(0.6, 0.9, 0.02), (1.2, 3.0, 0.05)],
        "r1-4x-recipe": [(0.6, 0.8, 0.05), (1.2, 2.0, 0.05)],
    }
    assert CONFIGS["bp-math-7b-64k"].algorithm.bapo.order == "upper_first"
    assert CONFIGS["r1-4x-recipe"].algorithm.bapo.order == "lower_first"


@pytest.mark.parametrize(
    ("bapo", "control"),
    [
        ("bp-math-7b-64k", "bp-math-7b-64k-grpo"),
        ("bp-math-32b-64k", "bp-math-32b-64k-grpo"),
        *((f"r1-{n}x-bapo", f"r1-{n}x-{arm}") for n in (2, 4) for arm in ("grpo", "clip-higher")),
        *(("r1-4x-bapo", f"r1-4x-{arm}") for arm in ("start", "corner")),
        *((f"r1-budget{n}k-bapo", f"r1-budget{n}k-grpo") for n in (2, 4)),
        *(("llama-bapo", f"llama-{arm}") for arm in ("grpo", "corner")),
    ],
)
def test_a_control_differs_from_its_run_in_the_clip_rule_alone(bapo: str, control: str) -> None:
    allowed = {"name", "run_dir", "algorithm.objective", "algorithm.fixed.low"}
    allowed |= {"algorithm.fixed.high", "algorithm.dual_clip", "train.steps"}
    one, other = (flat_settings(CONFIGS[name]) for name in (bapo, control))
    assert {*differing(one, other)} <= allowed


@pytest.mark.parametrize(
    ("name", "more"),
    [*((name, ()) for name in CONFIGS), *product(("r1-2x-bapo", "r1-4x-grpo"), ADDED)],
)
def test_a_run_of_the_table_fits_and_passes_the_checks_at_its_start(
    name: str, more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(override in TEXT for override in more)
    monkeypatch.chdir(tmp_path)
    config = config_of(COMMAND_OF[name], *more)
    write_inputs(config)
    hf = read_hf_config_file(hf_config_file(config))
    plan = make_plan(config, hf, PlanOptions(gpu_memory_gb=80))
    assert (plan.fits, plan.notes) == (True, [])
    parallel = config.parallel
    check_config(config, parallel.tensor * parallel.pipeline * parallel.context)


@pytest.mark.parametrize("command", EVALUATIONS)
def test_an_evaluation_of_the_tables_loads(command: tuple[str, ...]) -> None:
    config = config_of(command)
    assert config.eval.samples_per_prompt == 16
    longest = config.data.max_prompt_tokens + config.eval.max_response_tokens
    assert longest <= hf_config(config)["max_position_embeddings"]
