"""A tiny random model, one real server for all tests of a session, and a configuration for both."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bapo_megatron.config.megatron import ModelConfig
from bapo_megatron.config.rollout import ServerConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.rollout.sglang_server import SglangServer
from bapo_megatron.tiny.tokenizer import build_tokenizer
from tests.fakes.fake_weight_server import FakeWeightServer
from tests.policy.tiny_models import make_model
from tests.rollout.helpers import KEYS, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from tests.rollout.helpers import MakeConfig

LONGEST = 256
SERVER = {"max_total_tokens": 8192, "mem_fraction": 0.3}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 whose logits are far from uniform, with the tiny tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(LONGEST)
    make_model(
        "qwen2",
        directory,
        vocab_size=len(tokenizer),
        max_position_embeddings=LONGEST,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """The real server; tests leave no request behind, but may change its weights."""
    server = SglangServer(
        ModelConfig(path=model_dir, dtype="float32"),
        ServerConfig.model_validate(SERVER),
        run_dir=tmp_path_factory.mktemp("server"),
        seed=0,
        device="cpu",
        keys=KEYS,
    )
    with running(server):
        yield server


@pytest.fixture
def make_config(model_dir: Path, tmp_path: Path) -> MakeConfig:
    """Builds a configuration in ``tmp_path``; arguments change its rollout section."""
    prompts = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(4) for b in range(4)]
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))

    def make(**rollout: Any) -> RunConfig:
        return RunConfig.model_validate(
            {
                "name": "test",
                "run_dir": tmp_path / "run",
                "model": {"path": model_dir, "dtype": "float32"},
                "data": {"train": {"path": train}, "max_prompt_tokens": 32},
                "rollout": {
                    "groups_per_step": 3,
                    "samples_per_group": 2,
                    "max_response_tokens": 40,
                    "server": SERVER,
                    **rollout,
                },
                "reward": {"workers": 1},
                "eval": {
                    "sets": [{"path": train, "name": "sums"}],
                    "max_prompts": 5,
                    "samples_per_prompt": 2,
                    "max_response_tokens": 12,
                },
            }
        )

    return make


@pytest.fixture
def servers() -> Iterator[list[FakeWeightServer]]:
    """Two fake servers that take weights."""
    with FakeWeightServer() as first, FakeWeightServer() as second:
        yield [first, second]
