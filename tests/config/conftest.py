"""Configurations that tests break: a base to inherit from, and a runnable one."""

import json
from pathlib import Path

import pytest

from bapo_megatron.config.check import check_config
from bapo_megatron.config.load import load_config
from tests.config.files import BASE


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A current directory with configs/base.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/base.yaml").write_text(BASE)
    return Path("configs")


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Checks a runnable configuration with overrides, in a directory with its files."""
    monkeypatch.chdir(tmp_path)
    model = Path("model")
    model.mkdir()
    hf_config = {"num_attention_heads": 6, "num_hidden_layers": 6, "max_position_embeddings": 600}
    (model / "config.json").write_text(json.dumps(hf_config))
    (model / "model.safetensors").touch()
    (model / "tokenizer_config.json").touch()
    Path("train.jsonl").touch()
    Path("empty").mkdir()
    Path("dumps").mkdir()
    for step in (1, 2, 4):
        Path(f"dumps/step_{step:06d}.parquet").touch()
    Path("run.yaml").write_text(
        "name: x\n"
        "run_dir: runs/x\n"
        "model: {path: model}\n"
        "data: {train: {path: train.jsonl}, max_prompt_tokens: 100}\n"
        "rollout: {max_response_tokens: 400, groups_per_step: 12}\n"
        "eval: {max_response_tokens: 400, sets: [{path: train.jsonl}]}\n"
    )

    def run(*overrides: str, world_size: int = 1) -> None:
        check_config(load_config(Path("run.yaml"), overrides), world_size)

    return run
