"""What tests of engines, of what uses them, and of commands have in common."""

import contextlib
import copy
import functools
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from safetensors.torch import load_file, save_file

from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.record import Completion, join
from bapo_megatron.engine.base import CompletionSink
from bapo_megatron.policy.adapters import adapter_table, peft_fields
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.policy.weight_table import hf_shapes
from bapo_megatron.types import FinishReason
from examples.tiny.model import build_tokenizer
from tests.policy.tiny_models import load_reference, make_model


class Kept(CompletionSink):
    def __init__(self) -> None:
        self.parts: list[Completion] = []

    def take(self, part: Completion) -> None:
        self.parts.append(part)

    def completion(self) -> Completion:
        reason = self.parts[-1].finish_reason if self.parts else FinishReason.ABORT
        return join(self.parts, reason)


class MakeConfig(Protocol):
    """The ``make_config`` fixture."""

    def __call__(self, **rollout: Any) -> RunConfig: ...


MAX_POSITIONS = 256
"""Positions of the model."""


def make_model_dir(
    directory: Path, family: str = "qwen2", max_positions: int = MAX_POSITIONS, **sizes: int
) -> Path:
    """Write a random model whose logits are far from uniform, with the tiny tokenizer."""
    tokenizer = build_tokenizer(max_positions)
    make_model(
        family,
        directory,
        vocab_size=len(tokenizer),
        max_position_embeddings=max_positions,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    tokenizer.save_pretrained(directory)
    return directory


def change_weights(model_dir: Path, directory: Path) -> Path:
    """Write the model with other weights, in two files."""
    shutil.copytree(model_dir, directory)
    tensors = load_file(model_dir / "model.safetensors")
    for name in ("model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
        tensors[name] *= 1.5
    (directory / "model.safetensors").unlink()
    files = {}
    for number, names in enumerate((sorted(tensors)[:9], sorted(tensors)[9:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({n: tensors[n] for n in names}, directory / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


LORA = LoraConfig(rank=4, alpha=8.0)


def write_adapter(model_dir: Path, adapter: Path, merged: Path, seed: int) -> tuple[Path, Path]:
    """Write random adapters of all linears, and the model that has them merged in float64."""
    hf = read_hf_config_file(model_dir / "config.json")
    draw = torch.Generator().manual_seed(seed)
    factors = {
        name: 0.1 * torch.randn(shape, generator=draw)
        for weight in adapter_table(hf, LORA)
        for name, shape in hf_shapes(weight, hf).items()
    }
    shutil.copytree(model_dir, merged)
    tensors = load_file(model_dir / "model.safetensors")
    for name, b in factors.items():
        if name.endswith("lora_B.weight"):
            a = factors[name.replace("lora_B", "lora_A")]
            base = name.removeprefix("base_model.model.").replace("lora_B.", "")
            delta = 2.0 * b.double() @ a.double()
            tensors[base] = (tensors[base].double() + delta).float()
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    fields = json.dumps(peft_fields(hf, LORA, model_dir))
    (adapter / "adapter_config.json").write_text(fields)
    return adapter, merged


@functools.cache
def _reference(model_dir: Path) -> Any:
    family = json.loads((model_dir / "config.json").read_text())["model_type"]
    return load_reference(family, model_dir)


def reference_logprobs(
    model_dir: Path,
    prompt: Sequence[int],
    response: Sequence[int] | np.ndarray,
    temperature: float = 1.0,
) -> np.ndarray:
    """[R] log_softmax(logits / T) of a response by transformers."""
    model = _reference(model_dir)
    response_R = torch.as_tensor(response)
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor(prompt), response_R])[None]).logits[0]
    rows_RV = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(dim=-1)
    return rows_RV.gather(1, response_R[:, None])[:, 0].numpy()


def reference_distribution(model_dir: Path, token_ids: Sequence[int]) -> np.ndarray:
    """[N, V] log_softmax(logits) after each token, by transformers."""
    with torch.no_grad():
        logits_NV = _reference(model_dir)(torch.tensor([token_ids])).logits[0]
    return logits_NV.log_softmax(dim=-1).numpy()


@functools.cache
def _exact_reference(model_dir: Path) -> Any:
    return copy.deepcopy(_reference(model_dir)).double()


def exact_distribution(
    model_dir: Path,
    prompt: Sequence[int],
    response: Sequence[int] | np.ndarray,
    temperature: float = 1.0,
) -> np.ndarray:
    """[R, V] log_softmax(logits / T) at the tokens of a response, by transformers in float64."""
    tokens = torch.cat([torch.tensor(prompt), torch.as_tensor(response)])
    with torch.no_grad():
        logits_NV = _exact_reference(model_dir)(tokens[None]).logits[0]
    return (logits_NV[len(prompt) - 1 : -1] / temperature).log_softmax(dim=-1).numpy()


def descendants(pid: int | None = None, mentioning: str = "") -> set[psutil.Process]:
    """What a process (this one, if not given) started, directly or not, by command line."""
    started = set()
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if mentioning in " ".join(process.cmdline()):
                started.add(process)
    return started


def ask(url: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    """Status and text of an answer to GET, or POST with a body; (0, "") if nobody answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, body, headers), timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""
