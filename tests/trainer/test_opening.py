"""What a run refuses, and what it writes, before anything is started."""

import shlex
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bapo_megatron.config.load import ConfigError, dump_yaml, load_config
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.sglang.kind import SglangKind
from bapo_megatron.errors import RolloutError
from bapo_megatron.trainer import check, opening
from bapo_megatron.trainer.opening import open_run, open_source, write_config
from bapo_megatron.trainer.stopping import Stopping
from tests.config.files import run_config
from tests.launch import REPOSITORY


@pytest.fixture
def on_node(monkeypatch: pytest.MonkeyPatch):
    """Checks the section ``rollout`` on a node with GPUs, ranks of the trainer, or neither."""

    def check_gpus(num_gpus: int, num_ranks: int, **rollout: Any) -> None:
        for module in ("trainer.check", "engine.sglang.settings"):
            monkeypatch.setattr(f"bapo_megatron.{module}.count_gpus", lambda: num_gpus)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
        check._check_gpus(RolloutConfig.model_validate(rollout))

    return check_gpus


@pytest.mark.parametrize(("num_ranks", "first_gpu"), [(8, 0), (4, 2), (4, 3)])
def test_servers_on_the_gpus_of_ranks_are_refused(
    on_node: Any, num_ranks: int, first_gpu: int
) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.server\.first_gpu: .* least {num_ranks},"):
        on_node(8, num_ranks, server={"first_gpu": first_gpu})


def test_servers_on_other_gpus_or_other_machines_pass(on_node: Any) -> None:
    on_node(8, 4, server={"first_gpu": 4, "count": 4})
    on_node(8, 8, colocated=True, server={"count": 8})
    on_node(8, 8, servers=["http://a:1"])
    on_node(8, 8, engine="local")
    on_node(0, 2)


def _node_commands(page: str, heading: str) -> list[tuple[int, list[str]]]:
    """Ranks and arguments of the commands for 8 GPUs under a heading that start a trainer."""
    text = (REPOSITORY / "docs" / page).read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = section.replace("\\\n", " ").split("```")[1::2]
    lines = [line for block in blocks for line in block.splitlines() if "single_node.sh" in line]
    commands = []
    for line in lines:
        variables, _, arguments = line.partition("examples/single_node.sh ")
        num_ranks = int(variables.partition("NPROC=")[2].strip() or 8)
        commands.append((num_ranks, shlex.split(arguments)))
    return commands


COMMANDS = {
    "launch.md": _node_commands("launch.md", "One node"),
    "gpu.md": _node_commands("gpu.md", "The first node of 8"),
}


def test_the_docs_have_commands_for_one_node() -> None:
    assert {page: len(commands) for page, commands in COMMANDS.items()} == {
        "launch.md": 3,  # divided, colocated, other servers
        "gpu.md": 2,  # divided, colocated
    }


@pytest.mark.parametrize(
    ("num_ranks", "arguments"), [command for commands in COMMANDS.values() for command in commands]
)
def test_the_commands_for_one_node_in_the_docs_are_accepted(
    on_node: Any, monkeypatch: pytest.MonkeyPatch, num_ranks: int, arguments: list[str]
) -> None:
    path, *overrides = arguments
    config = load_config(REPOSITORY / path, overrides)
    on_node(8, num_ranks, **config.rollout.model_dump())
    monkeypatch.setattr("bapo_megatron.engine.sglang.settings.check_model_dir", lambda path: {})
    SglangKind().check(config)
    assert num_ranks % config.parallel.tensor == 0


@pytest.mark.parametrize(
    ("installed", "project", "key"),
    [
        ({"apex"}, "", "apex"),
        ({"apex", "amp_C"}, "", None),
        (set(), "p", "log.wandb_project"),
        ({"wandb"}, "p", None),
        (set(), "", None),
    ],
)
def test_packages_are_there_and_are_what_megatron_takes_them_for(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], project: str, key: str | None
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
    if key is None:
        check._check_packages(project)
        return
    with pytest.raises(ConfigError, match=f"^{key}: "):
        check._check_packages(project)


def config_of(run_dir: Path, **changes: Any) -> RunConfig:
    return run_config(run_dir, **{"eval": {"sets": [{"path": "one.jsonl"}]}, **changes})


def test_a_resumed_run_keeps_earlier_settings_and_says_which_keys_differ(tmp_path, capsys) -> None:
    first = config_of(tmp_path)
    again = config_of(tmp_path, resume=True)
    longer = config_of(tmp_path, resume=True, train={"steps": 300})
    other_set = config_of(
        tmp_path, resume=True, train={"steps": 300}, eval={"sets": [{"path": "two.jsonl"}]}
    )
    path = tmp_path / "config.yaml"

    write_config(first)
    write_config(again)
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]
    assert capsys.readouterr().err == ""
    write_config(longer)
    kept = tmp_path / "config.1.yaml"
    assert capsys.readouterr().err.endswith(f" ({kept}): train.steps\n")
    write_config(other_set)
    assert capsys.readouterr().err.endswith(f" ({tmp_path}/config.2.yaml): eval.sets.0.path\n")

    files = [path, kept, tmp_path / "config.2.yaml"]
    assert [load_config(file) for file in files] == [other_set, again, longer]


def test_keys_that_an_earlier_version_did_not_have_are_no_other_settings(tmp_path, capsys) -> None:
    config = config_of(tmp_path, resume=True)
    older = dump_yaml(config)
    assert "  async_steps: 0\n" in older
    (tmp_path / "config.yaml").write_text(older.replace("  async_steps: 0\n", ""))
    write_config(config)
    assert capsys.readouterr().err == ""
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("rollout", "reason"),
    [
        ({"engine": "sglang"}, "sglang has not been measured with unmerged adapters"),
        (
            {"engine": "local", "local": {"sampling_bits": 8}},
            "rollout.local.sampling_bits: 8 rounds whole weights",
        ),
        ({"engine": "local"}, ""),
        ({"engine": "sglang", "weight_sync": {"adapters": "merged"}}, ""),
    ],
)
def test_a_run_says_why_its_adapters_are_merged_unless_it_asks_for_that(
    rollout: dict[str, Any],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(opening, "CollectorClient", Mock())
    config = run_config(tmp_path, rollout=rollout, model={"path": "m", "lora": {"rank": 4}})
    open_source(config, Mock(), Mock(), Stopping(config.train))
    text = f"weight syncs send merged weights: {reason} (rollout.weight_sync.adapters)\n"
    assert capsys.readouterr().err == (text if reason else "")


def test_an_earlier_configuration_that_is_damaged_is_refused(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("name: [")
    with pytest.raises(ConfigError, match=r"config\.yaml:2: not valid YAML"):
        write_config(config_of(tmp_path, resume=True))


def test_lines_and_the_last_error_of_a_run_are_in_its_console_log(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(opening, "check_training", lambda *_, **__: None)
    dumps = {"dumps": tmp_path / "dumps"}
    config = config_of(tmp_path / "run", replay=dumps)
    with pytest.raises(RolloutError), open_run(config, Stopping(config.train)):
        raise RolloutError("no server left")
    # Not the refusal to begin in it again.
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with (
        pytest.raises(ValueError, match="already holds a run"),
        open_run(config, Stopping(config.train)),
    ):
        pass
    text = (tmp_path / "run" / "console.log").read_text()
    lines = text.splitlines()
    assert lines[0].endswith(" the run has no server: eval.sets are not evaluated")
    assert lines[1].endswith(" no server left")
    assert lines[-1].endswith("RolloutError: no server left")
    assert "already holds" not in text
