"""Models of every family, their oracles and conversions; tests do not change them."""

from pathlib import Path

import pytest

from tests.policy.convert_models import COMPANIONS, run_convert
from tests.policy.oracle import Oracle
from tests.policy.tiny_models import Lazy, Models, make_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two layers."""
    root = tmp_path_factory.mktemp("models")
    return Lazy(lambda name: make_model(name, root / name))


@pytest.fixture(scope="session")
def deep_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Four layers, two chunks on each of two stages, and files that hold no weights."""
    root = tmp_path_factory.mktemp("deep_models")

    def make(name: str) -> Path:
        # Longer than any sequence.
        make_model(name, root / name, num_hidden_layers=4, max_position_embeddings=512)
        for companion, text in COMPANIONS.items():
            (root / name / companion).write_text(text)
        return root / name

    return Lazy(make)


@pytest.fixture(scope="session")
def oracles(deep_models: Models) -> dict[str, Oracle]:
    """What transformers computes with the deep models."""
    return Lazy(lambda name: Oracle.of(name, deep_models[name]))


@pytest.fixture(scope="session")
def converted(deep_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The deep models as Megatron checkpoints."""
    root = tmp_path_factory.mktemp("converted")

    def make(name: str) -> Path:
        run_convert(deep_models[name], root / name)
        return root / name

    return Lazy(make)
