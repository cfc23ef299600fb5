"""Models for the tests of conversion, and what those tests share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.policy.convert import Conversion, convert
from tests.policy.tiny_models import FAMILIES, make_model

COMPANIONS = {
    "generation_config.json": '{"temperature": 0.6}',
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": '{"model_max_length": 64}',
    "chat_template.jinja": "{{ messages }}",
}
NUM_LAYERS = 4  # two chunks on each of two stages


def make_models(root: Path) -> dict[str, Path]:
    """One model of each family, with files that hold no weights."""
    for family in FAMILIES:
        make_model(family, root / family, num_hidden_layers=NUM_LAYERS)
        for name, text in COMPANIONS.items():
            (root / family / name).write_text(text)
    return {family: root / family for family in FAMILIES}


def convert_models(models: dict[str, Path], root: Path) -> dict[str, Path]:
    """The models as Megatron checkpoints."""
    for name, model in models.items():
        run_convert(model, root / name)
    return {name: root / name for name in models}


def run_convert(source: Path, target: Path, **options: Any) -> Conversion:
    """Convert with the command's defaults, without progress."""
    given = {"max_file_bytes": 5 * 10**9, "report": lambda done, total: None, **options}
    return convert(source, target, **given)


def error_of(source: Path, target: Path, **options: Any) -> str:
    """The one line of a conversion that leaves nothing behind."""
    with pytest.raises(ValueError, match=r".") as raised:
        run_convert(source, target, **options)
    assert "\n" not in str(raised.value)
    assert not target.exists()
    assert not list(target.parent.glob(".*.tmp"))
    return str(raised.value)


def weights(model: Path) -> dict[str, Tensor]:
    """All tensors of a model directory."""
    files = sorted(model.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def copy_with(model: Path, target: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy of a model whose tensors were changed."""
    shutil.copytree(model, target)
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
