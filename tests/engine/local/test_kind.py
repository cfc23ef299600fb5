"""What the engine cannot do is refused by name, before anything is loaded."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.teacher import as_policy
from bapo_megatron.engine.load import load_kind
from bapo_megatron.errors import RolloutError
from tests.engine.sglang.servers import server_config
from tests.launch import REPOSITORY


def test_what_it_can_do_is_accepted(model_dir: Path, tmp_path: Path) -> None:
    for rollout in ({}, {"weight_sync": {"in_flight": "retract", "method": "disk"}}):
        load_kind("local").check(server_config(model_dir, tmp_path, engine="local", **rollout))


@pytest.mark.parametrize(
    ("rollout", "key", "value"),
    [
        ({"servers": ["http://a:1"]}, "servers", r".*http://a:1"),
        ({"servers_file": "/a"}, "servers_file", "/a"),
        ({"min_servers": 2}, "min_servers", "2"),
        ({"colocated": True}, "colocated", "true"),
        ({"server": {"count": 2}}, "server.count", "2"),
        ({"server": {"tensor": 4}}, "server.tensor", "4"),
        ({"weight_sync": {"in_flight": "in_place"}}, "weight_sync.in_flight", "in_place"),
        ({"weight_sync": {"method": "tensor"}}, "weight_sync.method", "tensor"),
        ({"weight_sync": {"backend": "nccl"}}, "weight_sync.backend", "nccl"),
    ],
)
def test_what_it_cannot_do_is_refused(
    model_dir: Path, tmp_path: Path, rollout: dict[str, Any], key: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.{key}: must be .*, got {value}"):
        load_kind("local").check(server_config(model_dir, tmp_path, engine="local", **rollout))


def test_only_its_policy_is_rounded(model_dir: Path, tmp_path: Path) -> None:
    bits = {"local": {"sampling_bits": 8}}
    with pytest.raises(ValueError, match=r"sampling_bits must be null with engine: sglang, got 8"):
        server_config(model_dir, tmp_path, engine="sglang", **bits)
    config = server_config(model_dir, tmp_path, engine="local", **bits)
    assert as_policy(config).rollout.local.sampling_bits is None


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mamba2"},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "chunked_attention"]},
    ],
)
def test_models_with_another_cache_are_refused(
    model_dir: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**fields, **change}))
    with pytest.raises(ConfigError, match=r"^model\.path: .*use_sliding_window.*full_attention"):
        load_kind("local").check(server_config(other, tmp_path, engine="local"))


def test_it_serves_nobody(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.engine: must have servers"):
        load_kind("local").serve(server_config(model_dir, tmp_path, engine="local"), print)


def test_a_model_that_lacks_a_weight_is_not_made_up(model_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    tensors = load_file(other / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    config = server_config(other, tmp_path, engine="local")
    backend = load_kind("local").open(config, "cpu", awaits_weights=False)
    with pytest.raises(RolloutError, match=r"^model\.path: .* lacks model\.norm\.weight"):
        asyncio.run(backend.connect("local"))


def test_importing_it_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, bapo_megatron.engine.local.kind;"
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
