"""Which packages, and which layouts of servers and ranks on the GPUs of a node, are refused."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.load import ConfigError, load_config
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.sglang.kind import Kind as SglangKind
from bapo_megatron.trainer.check import _check_gpus, _check_packages

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def on_node(monkeypatch: pytest.MonkeyPatch):
    """Checks the section ``rollout`` on a node with GPUs, ranks of the trainer, or neither."""

    def check(num_gpus: int, num_ranks: int, **rollout: Any) -> None:
        for module in ("trainer.check", "engine.sglang.kind"):
            monkeypatch.setattr(f"bapo_megatron.{module}.count_gpus", lambda: num_gpus)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
        _check_gpus(RolloutConfig.model_validate(rollout))

    return check


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "server", "remedies"),
    [
        (
            8,
            8,
            {},
            "divide the node (NPROC=4 … rollout.server.first_gpu=4 rollout.server.count=4), or "
            "share the GPUs (rollout.colocated=true rollout.weight_sync.method=tensor "
            "rollout.server.count=8)",
        ),
        (
            8,
            4,
            {"first_gpu": 2, "tensor": 2},
            "divide the node (NPROC=4 … rollout.server.first_gpu=4 rollout.server.count=2), or "
            "share the GPUs (rollout.colocated=true rollout.weight_sync.method=tensor "
            "rollout.server.count=4)",
        ),
        (
            1,
            1,
            {},
            "share the GPUs (rollout.colocated=true rollout.weight_sync.method=tensor "
            "rollout.server.count=1)",
        ),
    ],
)
def test_servers_on_the_gpus_of_ranks_are_refused_with_what_to_do(
    on_node: Any, num_gpus: int, num_ranks: int, server: dict[str, Any], remedies: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        on_node(num_gpus, num_ranks, server=server)
    assert str(caught.value) == (
        f"rollout.server.first_gpu: must be at least {num_ranks}, the number of ranks on this "
        f"node, got {server.get('first_gpu', 0)}: a server and a rank would fill one GPU, and NCCL "
        f"has no group of both; {remedies}"
    )


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
    found = []
    for line in lines:
        variables, _, arguments = line.partition("examples/single_node.sh ")
        num_ranks = int(variables.partition("NPROC=")[2].strip() or 8)
        found.append((num_ranks, shlex.split(arguments)))
    return found


COMMANDS = {
    "launch.md": _node_commands("launch.md", "One node"),
    "gpu.md": _node_commands("gpu.md", "The first node of 8"),
}


def test_the_docs_have_commands_for_one_node() -> None:
    assert {page: len(commands) for page, commands in COMMANDS.items()} == {
        "launch.md": 3,  # divided, colocated, other servers
        "gpu.md": 4,  # the same, the last one twice
    }


@pytest.mark.parametrize(
    ("num_ranks", "arguments"), [each for commands in COMMANDS.values() for each in commands]
)
def test_the_commands_for_one_node_in_the_docs_are_accepted(
    on_node: Any, monkeypatch: pytest.MonkeyPatch, num_ranks: int, arguments: list[str]
) -> None:
    path, *overrides = arguments
    config = load_config(REPOSITORY / path, overrides)
    on_node(8, num_ranks, **config.rollout.model_dump())
    monkeypatch.setattr("bapo_megatron.engine.sglang.kind.check_model", lambda model: {})
    SglangKind().check(config)
    assert num_ranks % config.parallel.tensor == 0


@pytest.mark.parametrize("has_kernels", [False, True])
def test_an_apex_without_nvidias_kernels_is_refused(
    monkeypatch: pytest.MonkeyPatch, has_kernels: bool
) -> None:
    installed = {"apex", "amp_C"} if has_kernels else {"apex"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
    if has_kernels:
        _check_packages("")
        return
    with pytest.raises(ConfigError, match=r"^apex: the installed package is not NVIDIA's"):
        _check_packages("")


def test_a_project_at_wandb_needs_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _check_packages("")
    with pytest.raises(ConfigError, match=r"log\.wandb_project: is 'p' but wandb is not installed"):
        _check_packages("p")
