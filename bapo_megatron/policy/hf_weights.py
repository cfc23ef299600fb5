"""Hugging Face weights ↔ Megatron parameters: one table for loading, export and weight sync.

A Megatron parameter is one Hugging Face tensor, or several fused into one. Tensor-parallel ranks
hold equal parts of it along ``axis``:

- ``qkv``: rows are interleaved by key/value group: the queries of group 0, its key, its value, then
  group 1, …; equal parts of these rows are whole groups.
- ``gate_up``: each rank holds its part of gate, then its part of up.
- ``interleaved``: as ``gate_up``; one Hugging Face tensor, a row of gate, its row of up, and so on.
- ``sections``: as ``gate_up``, of any number of parts.
- ``vocab``: rows of zeros pad the vocabulary, so that it divides equally.

A Hugging Face tensor of several sections has them one after the other, or interleaved by blocks:
``qkv`` by head, ``sections_by_head`` by the key heads of a gated delta net.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, product
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bapo_megatron.policy.architecture import HfConfig, Weight
from bapo_megatron.policy.families import FAMILIES
from bapo_megatron.policy.hf_config import padded_vocab_size
from bapo_megatron.policy.weight_table import (
    EMBEDDING,
    OUTPUT,
    hf_names,
    hf_shapes,
    section_rows,
    stored_shapes,
    weight_table,
)
from bapo_megatron.runtime.calls import decode_json
from bapo_megatron.runtime.distributed import ProcessGroups

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_NAMES_IN_ERROR = 5
TIED_ROWS = 4096
"""Rows of tied weights that are compared at a time."""
SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def to_shard(weight: Weight, tensors: Sequence[Any], hf: HfConfig, rank: int, size: int) -> Tensor:
    """Return the part of a Megatron parameter that one tensor-parallel rank holds.

    ``tensors`` are the Hugging Face tensors, or safetensors' slices of them: only the rank's rows
    or columns are asked for.
    """
    num_blocks, parts = _num_blocks(weight, hf), list[Tensor]()
    shapes = hf_shapes(weight, hf).values()
    for tensor, shape, rows in zip(tensors, shapes, section_rows(weight, hf), strict=True):
        if len(rows) > 1 and num_blocks == 1:
            ends = zip(accumulate(rows, initial=0), rows, strict=False)
            parts += [tensor[s + rank * n // size : s + (rank + 1) * n // size] for s, n in ends]
        else:
            part = tensor[_part_of_rank(weight, shape, rank, size)]
            parts += _separate(part, [n // size for n in rows], num_blocks // size)
    if weight.form == "vocab":
        padding = padded_vocab_size(hf.vocab_size, size) // size - len(parts[0])
        return torch.cat([parts[0], parts[0].new_zeros(padding, hf.hidden_size)])
    return _interleave(parts, _num_groups(weight, hf, size) // size)


def _interleave(sections: Sequence[Tensor], num_blocks: int) -> Tensor:
    """Join sections: the first block of each, then the second of each, and so on."""
    if len(sections) == 1:
        return sections[0]
    blocks = [section.unflatten(0, (num_blocks, -1)) for section in sections]
    return torch.cat(blocks, dim=1).flatten(0, 1)


def _separate(whole: Tensor, rows: Sequence[int], num_blocks: int) -> list[Tensor]:
    """Undo ``_interleave``; ``rows`` are those of the sections."""
    if len(rows) == 1:
        return [whole]
    blocks = whole.unflatten(0, (num_blocks, -1)).split([n // num_blocks for n in rows], dim=1)
    return [block.flatten(0, 1) for block in blocks]


def _part_of_rank(
    weight: Weight, shape: tuple[int, ...], rank: int, size: int
) -> tuple[slice, ...]:
    """Return where a rank's part of a Hugging Face tensor lies: consecutive rows or columns."""
    if weight.axis is None:
        return (slice(None),)
    end = shape[weight.axis]
    length = (padded_vocab_size(end, size) if weight.form == "vocab" else end) // size
    part = slice(min(end, rank * length), min(end, (rank + 1) * length))
    return (*(slice(None),) * weight.axis, part)


def from_shards(weight: Weight, shards: Sequence[Tensor], hf: HfConfig) -> dict[str, Tensor]:
    """Return the Hugging Face tensors of a parameter, given all ranks' parts in rank order."""
    whole = shards[0]
    if weight.axis is not None and len(shards) > 1:  # a single one is not copied
        whole = torch.cat(list(shards), dim=weight.axis)
    if weight.form == "vocab":
        whole = whole[: hf.vocab_size]
    rows = section_rows(weight, hf)
    sections = iter(_separate(whole, list(chain(*rows)), _num_groups(weight, hf, len(shards))))
    return {
        name: _interleave(list(islice(sections, len(parts))), _num_blocks(weight, hf))
        for name, parts in zip(weight.hf, rows, strict=True)
    }


def _num_groups(weight: Weight, hf: HfConfig, size: int) -> int:
    """Return how many blocks of all sections follow each other in a Megatron parameter."""
    return hf.num_kv_heads if weight.form == "qkv" else size


def _num_blocks(weight: Weight, hf: HfConfig) -> int:
    """Return how many blocks of its sections follow each other in a Hugging Face tensor."""
    if weight.form in ("sections_by_head", "interleaved"):
        return hf.dimensions["recurrent_groups" if weight.form == "sections_by_head" else "expert"]
    return hf.num_heads if weight.form == "qkv" else 1


_EXPERT_NAMES = (
    # Megatron's sequential experts, and Transformer Engine's grouped ones.
    re.compile(r"\.experts\.local_experts\.(?P<expert>\d+)\.(?P<name>linear_fc[12]\.\w+)$"),
    re.compile(r"\.experts\.(?P<name>linear_fc[12]\.[a-z]+)(?P<expert>\d+)$"),
)


def local_weights(
    chunks: Sequence[GPTModel], hf: HfConfig, groups: ProcessGroups
) -> list[tuple[Weight, Tensor]]:
    """Return this rank's parameters and buffers with their entries of the table, in its order."""
    per_rank = hf.experts.num // groups.expert.size() if hf.experts else 0
    first_expert = groups.expert.rank() * per_rank

    def count_over_layer(match: re.Match[str]) -> str:
        expert = first_expert + int(match["expert"])
        return f".experts.{expert}.{match['name']}"

    local: dict[str, Tensor] = {}  # with layers and experts counted over the whole model
    for chunk in chunks:
        buffers = (b for b in chunk.named_buffers() if b[0].endswith(".expert_bias"))
        for name, tensor in chain(chunk.named_parameters(), buffers):
            if name.startswith("lora."):
                continue
            if name.startswith("decoder.layers."):
                index = int(name.split(".")[2])
                layer = chunk.decoder.layers[index].layer_number - 1
                name = name.replace(f".{index}.", f".{layer}.", 1)
                name = name.replace(".conv1d_", ".conv1d.")  # Mamba's, as in checkpoints
                for pattern in _EXPERT_NAMES:
                    name = pattern.sub(count_over_layer, name)
            local[name] = tensor
    table = list(weight_table(hf))
    if hf.tied_embeddings and EMBEDDING.megatron not in local:
        # The last of several stages has a copy of the embedding as its output layer.
        table.append(replace(EMBEDDING, megatron=OUTPUT.megatron))
    weights = [(w, local.pop(w.megatron)) for w in table if w.megatron in local]
    assert not local, f"parameters without a Hugging Face counterpart: {sorted(local)}"
    return weights


def tensor_place(weight: Weight, groups: ProcessGroups) -> tuple[int, int]:
    """Return this rank's place among, and the number of, the ranks that divide a parameter."""
    if weight.expert is None:
        return groups.tensor.rank(), groups.tensor.size()
    return groups.expert_tensor.rank(), groups.expert_tensor.size()


@torch.no_grad()
def load_weights(
    local: Iterable[tuple[Weight, Tensor]],
    hf: HfConfig,
    files: Mapping[str, Path],
    groups: ProcessGroups,
) -> None:
    """Fill this rank's parameters from their rows or columns in files that were checked."""
    with reading_shards(files, hf) as read:
        for weight, parameter in local:
            shard = read(weight, *tensor_place(weight, groups))
            assert parameter.shape == shard.shape, (weight.megatron, parameter.shape, shard.shape)
            # Megatron takes others for replicas, and counts one rank's in the gradient norm.
            is_marked = getattr(parameter, "tensor_model_parallel", False)
            assert is_marked or weight.axis is None, weight.megatron
            parameter.copy_(shard)


@dataclass(frozen=True, slots=True)
class _Index:
    weight_map: dict[str, str]
    """File of each tensor, in ``INDEX_NAME``."""


def find_tensors(hf: HfConfig, model_dir: Path) -> tuple[dict[str, Path], dict[str, torch.dtype]]:
    """Return the file and the dtype of every tensor by name; headers and tied weights are read.

    Raises:
        ValueError: A file is missing or not readable; tensors are missing, unexpected, of another
            shape than config.json describes, or hold no floats; tied weights differ. All are named.
    """
    files: dict[str, Path] = {}
    shapes: dict[str, list[int]] = {}
    kinds: dict[str, str] = {}
    expected = {n: shape for w in weight_table(hf) for n, shape in stored_shapes(w, hf).items()}
    for path in _weight_files(model_dir):
        try:
            with safe_open(path, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 - not a dict
                    stored = reader.get_slice(name)
                    whole = {name: stored.get_shape()}
                    parts = whole if name in expected else dict(_per_expert(name, whole[name]))
                    for part, shape in parts.items():
                        files[part], shapes[part] = path, shape
                        kinds[part] = stored.get_dtype()
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path}: not a readable safetensors file ({error}); restore it"
            ) from error
    for name in list(shapes):
        # Old checkpoints hold frequencies, which are computed from the config. Some tools write the
        # tied output layer beside the embedding.
        is_tied = hf.tied_embeddings and name in OUTPUT.hf
        is_kept = FAMILIES[hf.model_type].is_kept(hf, name)
        if is_tied or is_kept or name.endswith("rotary_emb.inv_freq"):
            del shapes[name]
    check_shapes(shapes, expected, model_dir, "use the weights and the config of one model")
    for name in expected:
        if kinds[name] not in SAFETENSORS_DTYPES:
            raise ValueError(
                f"{model_dir}: {name} must be stored as {', '.join(SAFETENSORS_DTYPES)}, got "
                f"{kinds[name]}; save the model as one of them"
            )
    if hf.tied_embeddings:
        _check_tied(hf, files, model_dir)
    return files, {name: SAFETENSORS_DTYPES[kinds[name]] for name in expected}


def _per_expert(name: str, shape: list[int]) -> Iterator[tuple[str, list[int]]]:
    """Yield the matrices that a tensor holds: a file may have all experts of a layer in two."""
    layer, is_fused, kind = name.rpartition(".experts.")
    if not is_fused or kind not in ("gate_up_proj", "down_proj") or len(shape) != 3:
        yield name, shape
        return
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for expert, part in product(range(shape[0]), parts):
        yield f"{layer}.experts.{expert}.{part}.weight", [shape[1] // len(parts), shape[2]]


@dataclass(frozen=True, slots=True)
class _ExpertRows:
    """One expert's matrix in a tensor of all experts, for slicing."""

    fused: Any
    expert: int
    first: int
    num_rows: int

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        start, stop, _ = part[0].indices(self.num_rows)
        rows = slice(self.first + start, self.first + stop)
        return self.fused[(slice(self.expert, self.expert + 1), rows, *part[1:])][0]


@dataclass(frozen=True, slots=True)
class _StackedExpert:
    """One expert's part of a stack, [outputs, inputs] or [outputs], for slicing."""

    stack: Any
    expert: int

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        num_axes = len(self.stack.get_shape()) - 1
        whole = (slice(None),) * (num_axes - len(part))
        one = slice(self.expert, self.expert + 1)
        return self.stack[(one, *reversed((*part, *whole)))][0].t().contiguous()


def _stored(reader: Any, name: str, weight: Weight) -> Any:
    """Return what ``name`` is read from: a tensor, or a part of one."""
    layer, is_expert, rest = name.rpartition(".experts.")
    try:
        stored = reader.get_slice(name)
        return _StackedExpert(stored, weight.expert or 0) if weight.is_stacked else stored
    except SafetensorError:
        if not is_expert:
            raise
    expert, kind, _ = rest.split(".")
    is_down = kind == "down_proj"
    fused = reader.get_slice(f"{layer}.experts.{kind if is_down else 'gate_up_proj'}")
    num_rows = fused.get_shape()[1] // (1 if is_down else 2)
    return _ExpertRows(fused, int(expert), num_rows * (kind == "up_proj"), num_rows)


def find_kept(hf: HfConfig, directory: Path) -> dict[str, Path]:
    """Return the files of the tensors that are not trained, but copied to exports, by name."""
    is_kept = FAMILIES[hf.model_type].is_kept
    kept: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as reader:
            kept |= {name: path for name in reader.keys() if is_kept(hf, name)}  # noqa: SIM118
    return kept


def _check_tied(hf: HfConfig, files: Mapping[str, Path], model_dir: Path) -> None:
    (embedding,), (output,) = hf_names(EMBEDDING, hf), OUTPUT.hf
    if output not in files:
        return
    with (
        safe_open(files[embedding], framework="pt") as embeddings,
        safe_open(files[output], framework="pt") as outputs,
    ):
        first, second = embeddings.get_slice(embedding), outputs.get_slice(output)
        shape = first.get_shape()
        is_equal = shape == second.get_shape() and all(
            # A few rows at a time: comparing all at once would copy both.
            bool((first[row : row + TIED_ROWS] == second[row : row + TIED_ROWS]).all())
            for row in range(0, shape[0], TIED_ROWS)
        )
    if not is_equal:
        raise ValueError(
            f"{model_dir}: {output} must equal {embedding}, since config.json has "
            "tie_word_embeddings true, got another tensor; set tie_word_embeddings to false, or "
            "remove the one that is not the model's"
        )


def _weight_files(model_dir: Path) -> list[Path]:
    index, single = model_dir / INDEX_NAME, model_dir / SINGLE_NAME
    if not index.is_file() and not single.is_file():
        raise ValueError(
            f"{model_dir}: neither {SINGLE_NAME} nor {INDEX_NAME}; convert the weights to "
            "safetensors"
        )
    if not index.is_file():
        return [single]
    try:
        names = sorted(set(decode_json(_Index, index.read_bytes()).weight_map.values()))
    except ValueError as error:
        raise ValueError(f"{index}: {error}; restore the file") from error
    return [model_dir / name for name in names]


@contextmanager
def reading_shards(
    files: Mapping[str, Path], hf: HfConfig
) -> Iterator[Callable[[Weight, int, int], Tensor]]:
    """Open files while their tensors are read; yields ``read(weight, rank, size)``.

    It reads the part of a Megatron parameter that one of ``size`` tensor-parallel ranks holds, and
    no more.
    """
    with ExitStack() as stack:

        @functools.cache
        def reader_of(path: Path) -> Any:
            return stack.enter_context(safe_open(path, framework="pt"))

        def read(weight: Weight, rank: int, size: int) -> Tensor:
            slices = [_stored(reader_of(files[name]), name, weight) for name in weight.hf]
            return to_shard(weight, slices, hf, rank, size)

        yield read


def check_shapes(
    actual: Mapping[str, Sequence[int]],
    expected: Mapping[str, Sequence[int]],
    directory: Path,
    remedy: str,
) -> None:
    """Refuse tensors that are missing, unexpected or of other shapes than config.json describes."""
    missing, unexpected = expected.keys() - actual.keys(), actual.keys() - expected.keys()
    differing = [
        f"{name} is {list(actual[name])}, config.json asks for {list(shape)}"
        for name, shape in expected.items()
        if name in actual and list(actual[name]) != list(shape)
    ]
    kinds = {"missing ": sorted(missing), "unexpected ": sorted(unexpected), "": differing}
    problems = [f"{kind}{listed(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise ValueError(
            f"{directory}: weights do not fit config.json: {'; '.join(problems)}; {remedy}"
        )


def listed(names: Sequence[str]) -> str:
    """Return names for an error message, the first few if there are many."""
    shown = ", ".join(names[:MAX_NAMES_IN_ERROR])
    more = len(names) - MAX_NAMES_IN_ERROR
    return f"{shown} and {more} more" if more > 0 else shown
