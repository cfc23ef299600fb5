"""What the tests of conversion share."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.policy.convert import Conversion, convert

COMPANIONS = {
    "generation_config.json": '{"temperature": 0.6}',
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": '{"model_max_length": 64}',
    "chat_template.jinja": "{{ messages }}",
}


def run_convert(source: Path, target: Path, **options: Any) -> Conversion:
    """Convert with the command's defaults, without progress."""
    defaults = {"max_file_bytes": 5 * 10**9, "report": lambda done, total: None}
    return convert(source, target, **{**defaults, **options})


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


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def copy_with(
    model: Path, target: Path, change: Callable[[dict[str, Tensor]], Any] = lambda _: None
) -> Path:
    """A copy of a model whose tensors were changed."""
    shutil.copytree(model, target)
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def adapter_pairs(adapter: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each linear, by the name of its weight."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    return {
        name.removeprefix("base_model.model.").replace(".lora_A", ""): (
            a,
            tensors[name.replace(".lora_A", ".lora_B")],
        )
        for name, a in tensors.items()
        if ".lora_A." in name
    }


def merge_adapter(tensors: dict[str, Tensor], adapter: Path, scale: float) -> None:
    """Turn W into W + scale · B A, in float64."""
    for name, (a, b) in adapter_pairs(adapter).items():
        tensors[name] = tensors[name].double() + scale * b.double() @ a.double()
