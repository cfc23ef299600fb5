"""Configuration files, and what loading them says."""

import json
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.load import ConfigError, load_config
from bapo_megatron.config.schema import RunConfig

BASE = "name: demo\nrun_dir: runs/demo\nmodel: {path: models/tiny}\n"


def write(folder: Path, text: str, name: str = "a.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write_runnable() -> Path:
    """Write run.yaml, which passes all checks, and the files that it names, here."""
    hf_config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "max_position_embeddings": 600,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
    }
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(hf_config))
    for name in ("model/model.safetensors", "model/tokenizer_config.json", "train.jsonl"):
        Path(name).touch()
    Path("run.yaml").write_text(
        "name: x\n"
        "run_dir: runs/x\n"
        "model: {path: model}\n"
        "data: {train: {path: train.jsonl}, max_prompt_tokens: 100}\n"
        "rollout: {max_response_tokens: 400, groups_per_step: 12}\n"
        "eval: {max_response_tokens: 400, sets: [{path: train.jsonl}]}\n"
    )
    return Path("run.yaml")


def run_config(run_dir: Path, **changes: Any) -> RunConfig:
    """A run named ``sums``, of files that need not exist; ``changes`` are whole sections."""
    settings: dict[str, Any] = {
        "name": "sums",
        "run_dir": run_dir,
        "model": {"path": "model"},
        "data": {"train": {"path": "train.jsonl"}},
    }
    return RunConfig.model_validate(settings | changes)
