"""Keys and values of the rows that are decoded together, and the attention over them.

Every row ends at one common column, so that a step writes one column of all rows, and what a row
lacks to the longest one is padding on its left.

Shape legend: B = rows of a decode step, N = query heads, M = key-value heads, W = columns,
P = positions of a prefill, H = head size, R = rows that a prefill is copied to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

ATTENTION = "bapo_local"
"""Name of ``_attend`` for transformers."""

Layer = tuple[Tensor, Tensor]
"""Keys and values of a layer."""


def register_attention() -> None:
    """Let models be loaded with ``attn_implementation=ATTENTION``."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)


def _attend(
    module: nn.Module,
    query_BNSH: Tensor,
    key_BMWH: Tensor,
    value_BMWH: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers' ``sdpa``, but a decode step does not repeat keys and values.

    With one position, the query heads of a key-value head are as good as positions.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    num_rows, num_heads, num_positions, head_size = query_BNSH.shape
    if num_positions > 1:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query_BNSH, key_BMWH, value_BMWH, attention_mask, **options
        )
    grouped = query_BNSH.reshape(num_rows, key_BMWH.shape[1], -1, head_size)
    mixed = scaled_dot_product_attention(
        grouped, key_BMWH, value_BMWH, attn_mask=attention_mask, scale=options["scaling"]
    )
    return mixed.reshape(num_rows, 1, num_heads, head_size), None


class Prefill:
    """Takes what a forward pass over whole inputs computes, as a cache of transformers."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        """Each [inputs, M, P, H], padded on the right."""

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> Layer:
        """Keep keys and values of a layer; layers come in order."""
        self.layers.append((keys, values))
        return keys, values


@dataclass(frozen=True, slots=True)
class Placed:
    """Which rows start with what a prefill computed."""

    layers: list[Layer]
    """What the prefill computed."""
    rows: list[int]
    """[R] rows of the cache."""
    inputs: list[int]
    """[R] input of the prefill that each row starts with; rows may share one."""
    lengths: list[int]
    """[R] tokens of that input."""

    def copy_to(self, target_BMWH: Tensor, layer: int, part: int, end: int) -> None:
        """Copy keys (part 0) or values (1) of a layer, right-aligned at a column."""
        source = self.layers[layer][part]
        device, longest = source.device, max(self.lengths)
        inputs_R1 = torch.tensor(self.inputs, device=device)[:, None]
        lengths_R1 = torch.tensor(self.lengths, device=device)[:, None]
        # What lands before a shorter input is masked; it only has to be finite.
        positions_RP = (torch.arange(longest, device=device) - longest + lengths_R1).clamp(min=0)
        rows = torch.tensor(self.rows, device=device)
        moved_RPMH = source.transpose(1, 2)[inputs_R1, positions_RP]
        target_BMWH[:, :, end - longest : end][rows] = moved_RPMH.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a model's cache looks like."""

    num_layers: int
    num_heads: int
    """Key-value heads, M."""
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of_model(cls, model: Any) -> Self:
        """Read it from a model of transformers."""
        config = model.config
        num_heads, hidden_size = config.num_attention_heads, config.hidden_size
        return cls(
            num_layers=config.num_hidden_layers,
            num_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or hidden_size // num_heads,
            dtype=model.dtype,
            device=model.device,
        )


class KeyValues:
    """The cache of decode steps, for transformers: each layer two tensors [B, M, W, H]."""

    def __init__(self, num_columns: int, end: int) -> None:
        """Without layers; ``build`` makes them."""
        self._layers: list[Layer] = []
        self.num_columns = num_columns
        """W."""
        self.first = 0
        """All columns before it are padding, of every row that is still decoded."""
        self.end = end
        """The column that the next step writes."""

    @classmethod
    def build(
        cls,
        spec: CacheSpec,
        old: Self | None,
        kept_rows: Sequence[int],
        placed: Sequence[Placed],
        *,
        num_rows: int,
        num_columns: int,
        end: int,
    ) -> Self:
        """Copy what is kept and what was computed for new rows.

        Layer by layer, so that never more than one layer is there twice.

        Args:
            spec: Of the model.
            old: Where rows are kept from; it loses its layers.
            kept_rows: Rows of ``old`` that become the first rows.
            placed: The other rows; those that are neither hold zeros.
            num_rows: B.
            num_columns: W, more than ``end``.
            end: Column that the longest row ends at, if it starts at column 0.
        """
        cache = cls(num_columns, end)
        kept = torch.tensor(kept_rows, dtype=torch.long, device=spec.device)
        shape = (num_rows, spec.num_heads, num_columns, spec.head_size)
        for layer in range(spec.num_layers):
            tensors = []
            for part in (0, 1):
                new = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
                if old is not None and kept_rows:
                    seen = old._layers[layer][part][:, :, old.first : old.end]
                    new[: len(kept_rows), :, end - seen.shape[2] : end] = seen[kept]
                for inputs in placed:
                    inputs.copy_to(new, layer, part, end)
                tensors.append(new)
            cache._layers.append((tensors[0], tensors[1]))
            if old is not None:
                old._layers[layer] = (new[:0], new[:0])
        return cache

    def update(self, keys_BM1H: Tensor, values_BM1H: Tensor, layer: int, *_: Any) -> Layer:
        """Write the new column of a layer; returns views of all columns that count."""
        keys, values = self._layers[layer]
        keys[:, :, self.end : self.end + 1] = keys_BM1H
        values[:, :, self.end : self.end + 1] = values_BM1H
        seen = slice(self.first, self.end + 1)
        return keys[:, :, seen], values[:, :, seen]
