"""A tiny random model, one real server for all tests of a session, and a configuration for both."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bapo_megatron.config.schema import RunConfig
from tests.rollout.helpers import SERVER, make_model_dir, make_server, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from bapo_megatron.engine.sglang.server import SglangServer
    from tests.rollout.helpers import MakeConfig


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 whose logits are far from uniform, with the tiny tokenizer."""
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """The real server; tests leave no request behind, but may change its weights."""
    with running(make_server(model_dir, tmp_path_factory.mktemp("server"))) as server:
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
