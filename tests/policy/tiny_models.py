"""Tiny random models by transformers, packed batches, and transformers' own logits and gradients.

Shape legend: N = packed tokens, V = vocabulary, S = tokens of one sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.data.micro_batch import TOKEN_FIELDS, shard_context
from bapo_megatron.policy.families import FAMILIES
from bapo_megatron.types import MicroBatch
from tests.policy.families import MODEL_TYPES, SIZES, TINY, VOCAB_SIZE

Models = dict[str, Path]
"""Directories of models, or of checkpoints, by family."""
Ranks = list[dict[str, Any]]
"""What ranks return, in their order."""

Batches = tuple[tuple[tuple[int, ...], ...], ...]
"""Token ids of the sequences of micro-batches."""
SEQUENCES: Batches = (((7, 3), (5,), (11, 9, 40)), ((96, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9), (50, 51)))
"""Token ids of the sequences of each micro-batch: different lengths, one of a single token."""


class Lazy[T](dict[str, T]):
    """Values that are made where they are first looked up."""

    def __init__(self, make: Callable[[str], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> T:
        self[name] = self._make(name)
        return self[name]


def make_model(family: str, directory: Path, **changes: Any) -> Path:
    """Write a random model in float32; norms and biases are random too."""
    torch.manual_seed([*TINY].index(family))
    model = model_class(family)(_config(family, changes)).float()
    _randomize(model)
    return _save(model, directory)


def _save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    return directory


def _randomize(model: Any) -> None:
    with torch.no_grad():
        biases = (b for b in model.named_buffers() if b[0].endswith("e_score_correction_bias"))
        for name, parameter in (*model.named_parameters(), *biases):
            if parameter.dim() == 1 or name.endswith("proj_bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(3.0)  # or states would forget within few tokens


_QWEN_TOWER = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", _QWEN_TOWER),
    "qwen3_5_moe": ("qwen3_5_moe_text", _QWEN_TOWER),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8},
    ),
}
"""The tiny language model beside a vision tower, and fields of the tower."""


def make_vision_model(family: str, directory: Path, **changes: Any) -> Path:
    """As published, for Qwen with a tensor of a head for multi-token prediction."""
    (text, tower), kind = VISION[family], model_class(family)
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 512} | changes
    tower = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4} | tower
    others = {"mm_tokens_per_image": 4} if family == "gemma3" else {}
    torch.manual_seed(0)
    text_config = _config(text, sizes)
    model = kind(kind.config_class(text_config=text_config, vision_config=tower, **others)).float()
    _randomize(model)
    _save(model, directory)
    if family != "gemma3":
        file = directory / "model.safetensors"
        save_file({**load_file(file), "mtp.fc.weight": torch.randn(32, 64)}, file, {"format": "pt"})
    return directory


def load_reference(family: str, directory: Path) -> Any:
    """The model as transformers reads it."""
    return model_class(family).from_pretrained(directory, dtype=torch.float32)


def model_class(family: str) -> Any:
    """Its class of transformers."""
    import transformers

    return getattr(transformers, FAMILIES[MODEL_TYPES.get(family, family)].architecture)


def _config(family: str, changes: dict[str, Any]) -> Any:
    sizes = {**SIZES, **TINY[family], **changes}
    present = {name: value for name, value in sizes.items() if value != "absent"}
    return model_class(family).config_class(**present)


def routers_of(model: Any) -> dict[int, Any]:
    """Routers by the number of their layer."""
    return {
        number: module
        for number, layer in enumerate(model.model.layers)
        for module in layer.modules()
        if type(module).__name__.lower().endswith("topkrouter")
    }


@contextmanager
def recorded_routers(model: Any) -> Iterator[dict[int, list[tuple[Tensor, ...]]]]:
    """What routers return meanwhile by layer: logits, weights and experts, of each pass."""
    routers = routers_of(model)
    outputs: dict[int, list[tuple[Tensor, ...]]] = {number: [] for number in routers}
    hooks = [
        router.register_forward_hook(lambda _, __, output, of=outputs[number]: of.append(output))
        for number, router in routers.items()
    ]
    yield outputs
    for hook in hooks:
        hook.remove()


@dataclass(frozen=True)
class Problem:
    """A micro-batch with the weights of its loss: Σ (logits² · coefficient) over the vocabulary."""

    micro_batch: MicroBatch
    coefficient_NV: Tensor

    def part(self, rank: int, size: int) -> Problem:
        """What one context-parallel rank holds of it."""
        if size == 1:
            return self
        parts = shard_context(_with_rows(self.micro_batch), rank, size)
        return Problem(parts, self.coefficient_NV[parts.target_T])

    def loss(self, logits_NV: Tensor, vocab_start: int = 0) -> Tensor:
        """This rank's columns' share of the loss; padding columns have none."""
        columns = min(logits_NV.shape[1], VOCAB_SIZE - vocab_start)
        coefficient = self.coefficient_NV[:, vocab_start : vocab_start + columns]
        return (logits_NV[:, :columns].float().square() * coefficient).sum()


def make_problems(
    seed: int = 0,
    pad_to_multiple: int = 2,
    sequence_multiple: int = 1,
    batches: Sequence[Sequence[Sequence[int]]] = SEQUENCES,
) -> list[Problem]:
    """One per entry of ``batches``; with the seed, tokens are shifted and coefficients drawn.

    Padding, of each sequence and at the end, has coefficient 0: it changes no gradient.
    """
    problems = []
    for number, sequences in enumerate(batches):
        generator = torch.Generator().manual_seed(10 * seed + number)
        padded, coefficients = [], []
        for sequence in sequences:
            shifted = [(token + seed) % VOCAB_SIZE for token in sequence]
            padding = [0] * (-len(shifted) % sequence_multiple)
            padded.append([*shifted, *padding])
            drawn = torch.randn(len(shifted), VOCAB_SIZE, generator=generator) / 100
            coefficients += [drawn, torch.zeros(len(padding), VOCAB_SIZE)]
        at_end = -sum(map(len, padded)) % pad_to_multiple
        if at_end:
            padded.append([0] * at_end)
            coefficients.append(torch.zeros(at_end, VOCAB_SIZE))
        problems.append(Problem(_pack(padded), torch.cat(coefficients)))
    return problems


def reference_logits(model: Any, problem: Problem) -> Tensor:
    """[N, V], one sequence at a time, so that nothing is packed."""
    lengths = problem.micro_batch.cu_seqlens.diff().tolist()
    sequences = problem.micro_batch.token_ids_N.split(lengths)
    return torch.cat([model(input_ids=ids_S[None]).logits[0] for ids_S in sequences])


def reference_gradients(model: Any, problems: list[Problem]) -> dict[str, Tensor]:
    """Gradients of the sum of all problems' losses, by name."""
    model.zero_grad()
    for problem in problems:
        problem.loss(reference_logits(model, problem)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return per_expert(gradients, model)


MINIMAX_NAMES = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""What files of MiniMax-M2 call parts of names."""


def per_expert(tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Tensors as files name them: transformers keeps the experts of a layer together.

    So do the files of gpt-oss, whose experts have biases.
    """
    if model.config.model_type == "gpt_oss":
        return tensors
    if model.config.model_type == "nemotron_h":
        tensors = {name.replace("model.", "backbone.", 1): t for name, t in tensors.items()}
    named = dict(one for name, fused in tensors.items() for one in _parts(name, fused))
    if model.config.model_type != "minimax_m2":
        return named
    parts = {name: [MINIMAX_NAMES.get(part, part) for part in name.split(".")] for name in named}
    return {".".join(parts[name]): tensor for name, tensor in named.items()}


def _parts(name: str, fused: Tensor) -> Iterator[tuple[str, Tensor]]:
    layer, experts, kind = name.rpartition(".experts.")
    if not experts:
        yield name, fused
        return
    for number, expert in enumerate(fused):
        if kind == "gate_up_proj":
            gate, up = expert.chunk(2)
            yield f"{layer}.experts.{number}.gate_proj.weight", gate
            yield f"{layer}.experts.{number}.up_proj.weight", up
        else:
            yield f"{layer}.experts.{number}.{kind}.weight", expert


def set_config_field(directory: Path, **values: Any) -> None:
    """Change fields of a model's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _with_rows(batch: MicroBatch) -> MicroBatch:
    """Take every row for a response token; its place in the whole is its target."""
    rows = torch.arange(batch.num_tokens)
    kept = dict.fromkeys(TOKEN_FIELDS, rows)
    return replace(batch, **kept)


def _pack(sequences: list[list[int]]) -> MicroBatch:
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    used = {
        "token_ids_N": torch.tensor([token for sequence in sequences for token in sequence]),
        "position_ids_N": torch.cat([torch.arange(length) for length in lengths]),
        "cu_seqlens": torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        "rows_T": torch.arange(int(lengths.sum())),
    }
    # What else belongs to response tokens is not the policy's business.
    names = [f.name for f in fields(MicroBatch) if f.name not in ("columns", "routes")]
    return MicroBatch(**{name: used.get(name, torch.empty(0)) for name in names})
