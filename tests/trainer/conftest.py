"""A tiny random model, dumps made from it, and the configuration that replays them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from bapo_megatron.tiny.tokenizer import build_tokenizer
from tests.policy.tiny_models import make_model
from tests.trainer.dumps import write_dumps

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of four layers with the tiny tokenizer; its logits are far from uniform."""
    directory = tmp_path_factory.mktemp("random_model")
    tokenizer = build_tokenizer()
    make_model(
        "qwen2",
        directory,
        num_hidden_layers=4,
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def mixed_dumps(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Path:
    """Six steps of dumps with right and wrong samples in every group."""
    return write_dumps(tmp_path_factory.mktemp("mixed"), random_model, steps=6)


@pytest.fixture(scope="session")
def replay_config(
    tmp_path_factory: pytest.TempPathFactory, random_model: Path, mixed_dumps: Path
) -> Path:
    """Five steps of two updates in float32 from ``mixed_dumps``."""
    path = tmp_path_factory.mktemp("config") / "replay.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "replay",
                "run_dir": str(path.parent / "run"),
                "replay": str(mixed_dumps),
                "model": {"path": str(random_model), "dtype": "float32"},
                "algorithm": {"updates_per_batch": 2, "bapo": {"target": 0.38}},
                "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_updates": 2},
                "train": {"steps": 5, "max_tokens_per_micro_batch": 128},
                "log": {"tensorboard": False},
            }
        )
    )
    return path
