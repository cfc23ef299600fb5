"""Models of every family, and their conversions; tests do not change them."""

import pytest

from tests.policy.convert_models import COMPANIONS, run_convert
from tests.policy.tiny_models import FAMILIES, Models, make_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two layers; DeepSeek's as Moonlight has them."""
    root, kinds = tmp_path_factory.mktemp("models"), {"deepseek_v3": "moonlight"}
    return {name: make_model(kinds.get(name, name), root / name) for name in FAMILIES}


@pytest.fixture(scope="session")
def deep_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Four layers, two chunks on each of two stages, and files that hold no weights."""
    root = tmp_path_factory.mktemp("deep_models")
    for family in FAMILIES:
        make_model(family, root / family, num_hidden_layers=4)
        for name, text in COMPANIONS.items():
            (root / family / name).write_text(text)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="session")
def converted(deep_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The deep models as Megatron checkpoints."""
    root = tmp_path_factory.mktemp("converted")
    for family, model in deep_models.items():
        run_convert(model, root / family)
    return {family: root / family for family in deep_models}
