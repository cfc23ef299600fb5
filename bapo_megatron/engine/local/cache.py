"""The KV cache of the rows that are decoded together, and its attention.

All rows end at the same column, so that a step writes one column; shorter rows are padded on the
left.

Shape legend: B = rows of a decode step, N = query heads, M = key-value heads, W = columns,
P = positions of a prefill, H = head size, R = rows that a prefill fills.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "bapo_local"
"""Name of ``_attend`` for transformers."""

Layer = tuple[Tensor, Tensor]
"""Keys and values; for multi-head latent attention the latents and the rotated keys, M = 1."""


def register_attention() -> None:
    """Make ``attn_implementation=ATTENTION`` available."""
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
    """Attend as transformers' ``sdpa``; in a decode step, heads of a group act as positions."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    num_rows, num_heads, num_positions, _ = query_BNSH.shape
    if num_positions > 1:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query_BNSH, key_BMWH, value_BMWH, attention_mask, **options
        )
    grouped = query_BNSH.reshape(num_rows, key_BMWH.shape[1], -1, key_BMWH.shape[3])
    mixed = scaled_dot_product_attention(
        grouped, key_BMWH, value_BMWH, attn_mask=attention_mask, scale=options["scaling"]
    )
    return mixed.reshape(num_rows, 1, num_heads, value_BMWH.shape[3]), None


class Prefill:
    """The KV cache of one forward pass over whole inputs, for transformers."""

    def __init__(self, starts: Sequence[tuple[int, int, int]] = ()) -> None:
        self._layers: list[Layer] = []  # each [inputs, M, P, H], padded on the right
        self._starts = starts
        """[R] Row of the decode cache, index of its input, and length of that input."""

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> Layer:
        """Store keys and values of the next layer."""
        self._layers.append((keys, values))
        return keys, values

    def copy_to(self, target_BMWH: Tensor, layer: int, part: int, end: int) -> None:
        """Copy keys (part 0) or values (1) of a layer to their rows, right-aligned at ``end``."""
        source = self._layers[layer][part]
        longest = max(length for *_, length in self._starts)
        rows_R, inputs_R, lengths_R = torch.tensor(self._starts, device=source.device).T
        columns_P = torch.arange(longest, device=source.device)
        # Columns before a shorter input are masked; they only have to be finite.
        positions_RP = (lengths_R[:, None] - longest + columns_P).clamp(min=0)
        moved_RPMH = source.transpose(1, 2)[inputs_R[:, None], positions_RP]
        target_BMWH[:, :, end - longest : end][rows_R] = moved_RPMH.transpose(1, 2)


class DecodeCache:
    """The KV cache of decode steps, for transformers: two tensors [B, M, W, H] per layer."""

    def __init__(self, num_columns: int, end: int) -> None:
        self._layers: list[Layer] = []
        self.num_columns = num_columns
        """W."""
        self.first = 0
        """First column that is not padding in every active row."""
        self.end = end
        """The column that the next step writes."""

    @classmethod
    def build(
        cls,
        model: Any,
        old: Self | None,
        kept_rows: Sequence[int],
        prefills: Sequence[Prefill],
        num_rows: int,
        num_columns: int,
        end: int,
    ) -> Self:
        """Copy ``kept_rows`` of ``old``, which become the first rows, and ``prefills``.

        Layer by layer, so that at most one layer exists twice; ``old`` loses its layers. Further
        rows are zero. The longest row fills the columns before ``end`` < ``num_columns``.
        """
        cache, device = cls(num_columns, end), model.device
        kept = torch.tensor(kept_rows, dtype=torch.long, device=device)
        num_heads, *sizes = _cached_shape(model.config)
        for layer in range(model.config.num_hidden_layers):
            tensors = []
            for part, size in enumerate(sizes):
                shape = (num_rows, num_heads, num_columns, size)
                new = torch.zeros(shape, dtype=model.dtype, device=device)
                if old is not None and kept_rows:
                    seen = old._layers[layer][part][:, :, old.first : old.end]
                    new[: len(kept_rows), :, end - seen.shape[2] : end] = seen[kept]
                for prefill in prefills:
                    prefill.copy_to(new, layer, part, end)
                tensors.append(new)
            cache._layers.append((tensors[0], tensors[1]))
            if old is not None:
                old._layers[layer] = (new[:0], new[:0])
        return cache

    def update(self, keys_BM1H: Tensor, values_BM1H: Tensor, layer: int, *_: Any) -> Layer:
        """Write the new column of a layer; return views from the first column in use."""
        keys, values = self._layers[layer]
        keys[:, :, self.end : self.end + 1] = keys_BM1H
        values[:, :, self.end : self.end + 1] = values_BM1H
        seen = slice(self.first, self.end + 1)
        return keys[:, :, seen], values[:, :, seen]


def _cached_shape(config: Any) -> tuple[int, int, int]:
    """Return the number of cached heads (M), and the sizes (H) of keys and of values."""
    if latent := getattr(config, "kv_lora_rank", None):
        return 1, latent, config.qk_rope_head_dim
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_key_value_heads, size, size
