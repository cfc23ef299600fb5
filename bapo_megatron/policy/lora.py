"""Low-rank adapters (LoRA, arXiv 2106.09685): y = W x + α/r · B A x, of which A and B are trained.

Every Hugging Face linear has its own A and B, named and shaped as PEFT has them, also where
Megatron fuses several, such as query, key and value, and every expert its own (PEFT itself has
none for transformers' fused experts). Only r channels per token cross tensor-parallel ranks. The
parameters are float32, and are cast to the model's dtype to compute.

Shape legend: N = tokens on this rank, I and O = input and output channels of a linear on this
rank, r = rank, R = r × the adapters of a linear.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import mappings
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.policy.adapters import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    LAYER_KINDS,
    adapted,
    adapter_table,
    adapter_weights,
    base_name,
    check_adapter,
    check_targets,
    layer_kind,
    peft_fields,
    targets_of,
)
from bapo_megatron.policy.architecture import HfConfig, Weight
from bapo_megatron.policy.hf_weights import (
    check_shapes,
    load_weights,
    local_weights,
    tensor_place,
    to_shard,
)
from bapo_megatron.policy.local_layers import normalised
from bapo_megatron.policy.weight_table import hf_shapes
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.runtime.files import sampled_digest


class Adapter(nn.Module):
    """This rank's part of the adapters of one weight of Megatron's model."""

    def __init__(
        self,
        weight: Weight,
        hf: HfConfig,
        config: LoraConfig,
        groups: ProcessGroups,
        *,
        is_sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.entry, self.groups = weight, groups
        self._scale = config.alpha / config.rank
        self.entries = adapter_weights(weight, hf, config)
        self.part = tensor_place(weight, groups)
        """Place among, and number of, the ranks that divide the weight."""
        self._is_sequence_parallel = is_sequence_parallel
        for number, pair in enumerate(self.entries):
            for entry, name in zip(pair, "ab", strict=True):
                shape = next(iter(hf_shapes(entry, hf).values()))
                whole = torch.zeros(shape)
                if name == "a":  # as PEFT initialises it, equal in every layout
                    digest = hashlib.sha256(f"{config.seed} {entry.megatron}".encode()).digest()
                    generator = torch.Generator().manual_seed(int.from_bytes(digest[:6]))
                    whole.uniform_(-1, 1, generator=generator).div_(math.sqrt(shape[1]))
                shard = to_shard(entry, [whole], hf, *self.part)
                # Not in a list: Megatron gathers updated parameters before their module's pass.
                self.register_parameter(f"{name}{number}", self._parameter(entry, shard))
        self._rows_O, sizes = self._fused_rows(hf)
        numbers = {base_name(a): number for number, (a, _) in enumerate(self.entries)}
        self._blocks = [(size, numbers.get(name)) for name, size in sizes.items()]
        """Rows of each linear of the weight, and the number of its adapter, if it has one."""
        self._base_square: Tensor | None = None
        """‖W‖² over the rows with adapters of this rank's part, once it is known: W is frozen."""

    @property
    def replica(self) -> int:
        """Place among the ranks that hold this part of the weight for other tokens."""
        is_expert = self.entry.expert is not None
        return (self.groups.expert_data if is_expert else self.groups.data).rank()

    def _parameter(self, entry: Weight, shard: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(shard.contiguous().to(self.groups.device))
        # Megatron's marks: how gradients are summed, and which ranks count them in the norm.
        if entry.axis is not None:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim, parameter.partition_stride = entry.axis, 1  # type: ignore[attr-defined]
        if entry.expert is not None:
            parameter.allreduce = False  # type: ignore[attr-defined]
        elif entry.axis is None:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return parameter

    def _fused_rows(self, hf: HfConfig) -> tuple[Tensor | None, dict[str, int]]:
        """Return where rows of the fused weight are among those of its linears, and their sizes."""
        shapes = hf_shapes(self.entry, hf)
        size = self.part[1] if self.entry.axis == 0 else 1
        sizes = {name: shape[0] // size for name, shape in shapes.items()}
        if len(shapes) == 1:
            return None, sizes
        ends = itertools.accumulate((shape[0] for shape in shapes.values()), initial=0)
        ids = [torch.arange(*rows)[:, None] for rows in itertools.pairwise(ends)]
        fused_O = to_shard(self.entry, ids, hf, *self.part)[:, 0]
        return fused_O.argsort().argsort().to(self.groups.device), sizes

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A, [R, I], and α/r · B, [O, R], of the fused weight; float32."""
        # A, [r, I], and B, [rows on this rank, r], in turn.
        parameters: list[Tensor] = list(self.parameters())
        a_RI, blocks = torch.cat(parameters[::2]), parameters[1::2]
        rank, width = blocks[0].shape[1], len(a_RI)
        parts = [
            a_RI.new_zeros(num_rows, width)
            if number is None
            else F.pad(blocks[number], (rank * number, width - rank * (number + 1)))
            for num_rows, number in self._blocks
        ]
        b_OR = torch.cat(parts) * self._scale
        return a_RI, b_OR if self._rows_O is None else b_OR[self._rows_O]

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what the adapters add to the weight's output."""
        a_RI, b_OR = (factor.to(hidden.dtype) for factor in self.factors())
        group, axis = self.groups.tensor, self.entry.axis
        if self.entry.expert is not None:
            # Expert-tensor ranks have the same tokens, and outputs of ``fc2`` are summed later:
            # parts of the gradient of what each has whole.
            sums = partial(_CROSSINGS[0, False], group=self.groups.expert_tensor)
            a_RI, b_OR = (sums(a_RI), b_OR) if axis == 0 else (a_RI, sums(b_OR))
            return F.linear(F.linear(hidden, a_RI), b_OR)
        reduced = F.linear(hidden, a_RI)
        if self.part[1] > 1 and axis is not None:
            reduced = _CROSSINGS[axis, self._is_sequence_parallel](reduced, group=group)
        return F.linear(reduced, b_OR)

    @torch.no_grad()
    def merged(self, base: Tensor) -> Tensor:
        """Return W + α/r · B A in the dtype of ``base``, rounded once."""
        a_RI, b_OR = self.factors()
        return torch.addmm(base.float(), b_OR, a_RI).to(base.dtype)

    @torch.no_grad()
    def squared_norms(self, base: Tensor) -> Tensor:
        """Return ‖A‖², ‖B‖², ‖α/r · B A‖² and ‖W‖² over the linears with adapters, [4] float64.

        ``base`` is this rank's part of the weight, [O, I]. The sum over all ranks counts every
        element once. ‖B A‖² = ⟨BᵀB, A Aᵀ⟩ takes only [r, r].
        """
        if self._base_square is None:
            self._base_square = self._adapted_square(base)
        sums = self._base_square.new_zeros(4)
        sums[3] = self._base_square
        parameters = [parameter.double() for parameter in self.parameters()]
        for a, b in zip(parameters[::2], parameters[1::2], strict=True):
            product = ((b.T @ b) * (a @ a.T)).sum()
            sums[:3] += torch.stack([a.square().sum(), b.square().sum(), self._scale**2 * product])
        parts = (*self.entries[0], self.entry, self.entry)
        is_counted = [entry.axis is not None or self.part[0] == 0 for entry in parts]
        return sums * sums.new_tensor(is_counted) * (self.replica == 0)

    def _adapted_square(self, base: Tensor) -> Tensor:
        norm_O = torch.linalg.vector_norm(base, dim=1, dtype=torch.float64)
        blocks = [norm_O.new_full((size,), number is not None) for size, number in self._blocks]
        adapted_O = torch.cat(blocks)
        if self._rows_O is not None:
            adapted_O = adapted_O[self._rows_O]
        return (norm_O.square() * adapted_O).sum()


_CROSSINGS: dict[tuple[int, bool], Callable[..., Tensor]] = {
    (0, False): mappings.copy_to_tensor_model_parallel_region,
    (0, True): mappings.gather_from_sequence_parallel_region,
    (1, False): mappings.reduce_from_tensor_model_parallel_region,
    (1, True): mappings.reduce_scatter_to_sequence_parallel_region,
}
"""What crosses tensor-parallel ranks between A and B, by axis and ``sequence_parallel``."""


class ChunkAdapters(nn.ModuleList):
    """The adapters of a chunk, its module ``lora``."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        """Return Megatron's description of every parameter, under PEFT's names."""
        state = {}
        for number, adapter in enumerate(cast("Iterable[Adapter]", self)):
            replica, entries = adapter.replica, itertools.chain.from_iterable(adapter.entries)
            for entry, (name, parameter) in zip(entries, adapter.named_parameters(), strict=True):
                offsets = [] if entry.axis is None else [(entry.axis, *adapter.part)]
                place = adapter.part[0] if entry.axis is None else 0
                state[f"{prefix}{number}.{name}"] = ShardedTensor.from_rank_offsets(
                    f"lora.{entry.megatron}", parameter, *offsets, replica_id=(0, place, replica)
                )
        return state


@dataclass(eq=False, repr=False)
class Lora:
    """The adapters of a model; ``attach`` adds them."""

    config: LoraConfig
    adapters: dict[Weight, Adapter]
    """On this rank, by the weight that they change."""
    identity: dict[str, Any]
    """See ``identity_of``; on rank 0."""
    _is_on: bool = True

    @classmethod
    def attach(
        cls,
        config: LoraConfig,
        chunks: Sequence[GPTModel],
        hf: HfConfig,
        groups: ProcessGroups,
        base: Path,
    ) -> Self:
        """Freeze the chunks and add adapters, with B = 0, to the linears that ``config`` names.

        Raises:
            ConfigError: The model lacks a target.
        """
        check_targets(hf, config, groups.tensor.size())
        lora = cls(config, {}, identity_of(config, hf, base) if groups.rank == 0 else {})
        for chunk in chunks:
            chunk.requires_grad_(False)
            if chunk.pre_process:
                # Recomputed layers have gradients only if their input has.
                chunk.embedding.register_forward_hook(_with_gradient)
            owners = {
                parameter: chunk.get_submodule(name.rpartition(".")[0])
                for name, parameter in chunk.named_parameters()
            }
            of_linear: dict[nn.Module, list[Adapter]] = {}
            is_divided = chunk.config.sequence_parallel
            for weight, parameter in local_weights([chunk], hf, groups):
                if adapted(weight, hf, config):
                    adapter = Adapter(weight, hf, config, groups, is_sequence_parallel=is_divided)
                    lora.adapters[weight] = adapter
                    of_linear.setdefault(owners[parameter], []).append(adapter)
            for linear, adapters in of_linear.items():
                linear.register_forward_hook(partial(lora._add, adapters), prepend=True)
            chunk.lora = ChunkAdapters(a for adapters in of_linear.values() for a in adapters)
        return lora

    def _add(
        self, adapters: Sequence[Adapter], linear: nn.Module, inputs: tuple[Any, ...], output: Any
    ) -> Any:
        if not self._is_on:
            return None
        hidden = normalised(linear, inputs[0])
        if len(adapters) == 1:
            delta = adapters[0](hidden)
        else:  # Transformer Engine's grouped experts, with the tokens of each
            parts = hidden.split([int(size) for size in inputs[1]])
            delta = torch.cat([one(part) for one, part in zip(adapters, parts, strict=True)])
        return (output[0] + delta, *output[1:])

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the base model."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    def merged(self, weight: Weight, parameter: Tensor) -> Tensor:
        """Return a parameter with its adapters, and another one as it is."""
        adapter = self.adapters.get(weight)
        return parameter.detach() if adapter is None else adapter.merged(parameter)

    def metrics(
        self, local: Iterable[tuple[Weight, Tensor]], hf: HfConfig, groups: ProcessGroups
    ) -> dict[str, float]:
        """Return the metrics ``lora/…`` of docs/metrics.md, equal on all ranks.

        A collective of all ranks: one all-reduce. ``local`` is as ``local_weights`` returns it.
        """
        sums = torch.zeros((len(LAYER_KINDS), 4), dtype=torch.float64, device=groups.device)
        for weight, parameter in local:
            if (adapter := self.adapters.get(weight)) is not None:
                sums[LAYER_KINDS.index(layer_kind(weight, hf))] += adapter.squared_norms(parameter)
        dist.all_reduce(sums)
        return {
            f"lora/{kind}/{name}": math.sqrt(max(square, 0.0))  # less than 0 by rounding
            for kind, (a, b, change, base) in zip(LAYER_KINDS, sums.tolist(), strict=True)
            if base > 0
            for name, square in (("a_norm", a), ("b_norm", b), ("change_ratio", change / base))
        }

    def parameters(self) -> Iterator[tuple[Weight, Tensor]]:
        """Yield this rank's parts of A and B with their entries of ``adapter_table``."""
        for adapter in self.adapters.values():
            entries = itertools.chain.from_iterable(adapter.entries)
            yield from zip(entries, adapter.parameters(), strict=True)


def _with_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def load_adapter(directory: Path, lora: Lora, hf: HfConfig, groups: ProcessGroups) -> None:
    """Fill this rank's adapters from a PEFT directory.

    Raises:
        ValueError: It is not readable, or not of this model, rank, alpha and targets; one line.
        OSError: It cannot be read.
    """
    config = lora.config
    check_adapter(directory, config, hf)
    weights = directory / ADAPTER_NAME
    try:
        with safe_open(weights, framework="pt") as reader:
            shapes = {name: reader.get_slice(name).get_shape() for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{weights}: not readable ({error}); restore it") from error
    expected_shapes = {n: s for w in adapter_table(hf, config) for n, s in hf_shapes(w, hf).items()}
    remedy = (
        "set model.lora.targets to the linears that it adapts, or save it without other tensors "
        "(save_embedding_layers=False)"
    )
    check_shapes(shapes, expected_shapes, directory, remedy)
    load_weights(lora.parameters(), hf, dict.fromkeys(shapes, weights), groups)


def identity_of(config: LoraConfig, hf: HfConfig, base: Path) -> dict[str, Any]:
    """Return what a checkpoint of adapters belongs to, plain JSON values."""
    return {
        "rank": config.rank,
        "alpha": config.alpha,
        "targets": sorted(targets_of(hf, config)),
        "base": sampled_digest(sorted(base.glob("*.safetensors"))),
        "base_path": str(base),
    }


def write_adapter(
    tensors: Iterable[tuple[str, Tensor]], hf: HfConfig, config: LoraConfig, base: Path, to: Path
) -> None:
    """Write a PEFT directory from all tensors of ``adapter_table``."""
    fields = peft_fields(hf, config, base)
    (to / ADAPTER_CONFIG_NAME).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    contents = {name: tensor.cpu().contiguous() for name, tensor in tensors}
    save_file(contents, to / ADAPTER_NAME, metadata={"format": "pt"})
    (to / ADAPTER_NAME).chmod(0o644)  # safetensors makes it private
