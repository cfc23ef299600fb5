"""The KV cache of the rows that are decoded together, and its attention.

All rows end at the same column, so that a step writes one column; shorter rows are padded on the
left. A gated delta net or Mamba-2 keeps a state per row in place of columns.

Shape legend: B = rows of a decode step, N = query heads, M = key-value heads, W = columns,
P = positions of a prefill, H = head size, R = rows that a prefill fills; of a recurrence D =
channels and S = width of its convolution.
"""

import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION = "bapo_local"
"""Name of ``_attend`` for transformers."""

Layer = tuple[Tensor, Tensor]
"""Keys and values; with multi-head latent attention the latents and the rotated keys, M = 1; of a
recurrence the last inputs of the convolution, and the state; empty for an MLP alone."""


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
    """Attend as transformers' ``sdpa``; in a decode step, heads of a group act as positions.

    ``options`` may have a layer's ``sliding_window`` and ``s_aux``, a sink [N] per head.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    num_rows, num_heads, num_positions, _ = query_BNSH.shape
    window, sinks_N = options.get("sliding_window"), options.get("s_aux")
    mask: Tensor | None
    if num_positions > 1:
        if sinks_N is None and (window is None or window >= num_positions):
            return sdpa_attention_forward(  # type: ignore[no-any-return]
                module, query_BNSH, key_BMWH, value_BMWH, attention_mask, **options
            )
        position_P = torch.arange(num_positions, device=query_BNSH.device)
        past_PP = position_P[:, None] - position_P
        is_hidden_PP = (past_PP < 0) | (past_PP >= (window or num_positions))
        hidden_PP = query_BNSH.new_zeros(is_hidden_PP.shape).masked_fill(is_hidden_PP, -torch.inf)
        mask, grouped = hidden_PP.expand(1, num_heads, -1, -1), query_BNSH
    else:
        if window is not None:
            key_BMWH, value_BMWH = key_BMWH[:, :, -window:], value_BMWH[:, :, -window:]
        mask = None if attention_mask is None else attention_mask[..., -key_BMWH.shape[2] :]
        grouped = query_BNSH.reshape(num_rows, key_BMWH.shape[1], -1, key_BMWH.shape[3])
    if sinks_N is not None:  # one more key of zeros, whose value is zeros
        seen = query_BNSH.new_zeros(1, 1, 1, key_BMWH.shape[2]) if mask is None else mask
        sinks = sinks_N.to(seen.dtype).view(1, grouped.shape[1], -1, 1)
        shape = (len(seen), *grouped.shape[1:3])
        mask = torch.cat((seen.expand(*shape, -1), sinks.expand(*shape, 1)), dim=-1)
        key_BMWH, value_BMWH = (F.pad(part, (0, 0, 0, 1)) for part in (key_BMWH, value_BMWH))
    mixed = F.scaled_dot_product_attention(
        grouped, key_BMWH, value_BMWH, attn_mask=mask, scale=options["scaling"], enable_gqa=True
    )
    if num_positions > 1:
        return mixed.transpose(1, 2), None
    return mixed.reshape(num_rows, 1, num_heads, value_BMWH.shape[3]), None


class Prefill:
    """The KV cache of one forward pass over whole inputs, for transformers."""

    def __init__(self, starts: Sequence[tuple[int, int, int]] = ()) -> None:
        self._layers: dict[int, Layer] = {}  # each [inputs, M, P, H], padded on the right
        self._starts = starts
        """[R] Row of the decode cache, index of its input, and length of that input."""
        self._convolved = torch.empty(0)

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Return False: inputs begin here."""
        return False

    def update_conv_state(self, inputs_RDP: Tensor, *_: Any, **__: Any) -> Tensor:
        """Store the inputs of the next layer's convolution."""
        self._convolved = inputs_RDP
        return inputs_RDP

    def update_recurrent_state(self, state: Tensor, layer_idx: int, *_: Any, **__: Any) -> None:
        """Store the state after each input, which padding did not change (``RecurrentPadding``)."""
        self._layers[layer_idx] = (self._convolved, state)

    def copy_state_to(self, target: Tensor, layer: int, part: int) -> None:
        """Copy the last inputs of a convolution (part 0), or states (1), to their rows."""
        source = self._layers[layer][part]
        if part == 1:
            rows_R, inputs_R, _ = torch.tensor(self._starts, device=source.device).T
            target[rows_R] = source[inputs_R].to(target.dtype)
            return
        for row, index, length in self._starts:
            last = source[index, :, max(length - target.shape[-1], 0) : length]
            target[row, :, target.shape[-1] - last.shape[-1] :] = last

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> Layer:
        """Store keys and values of a layer."""
        self._layers[layer] = (keys, values)
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
        cache, config, device = cls(num_columns, end), model.config, model.device
        kinds = getattr(config, "layer_types", None) or ()
        kept = torch.tensor(kept_rows, dtype=torch.long, device=device)
        num_heads, *sizes = _cached_shape(config)
        columns = [((num_heads, num_columns, size), model.dtype) for size in sizes]
        for layer in range(config.num_hidden_layers):
            if layer < len(kinds) and kinds[layer] in ("mlp", "moe"):
                cache._layers.append((torch.empty(0), torch.empty(0)))
                continue
            has_state = layer < len(kinds) and kinds[layer] == "linear_attention"
            tensors = []
            for part, (shape, dtype) in enumerate(
                _state_shapes(config, model.dtype) if has_state else columns
            ):
                new = torch.zeros((num_rows, *shape), dtype=dtype, device=device)
                if old is not None and kept_rows:
                    seen, place = old._layers[layer][part], new[: len(kept_rows)]
                    if not has_state:
                        seen = seen[:, :, old.first : old.end]
                        place = place[:, :, end - seen.shape[2] : end]
                    place.copy_(seen[kept])
                for prefill in prefills:
                    if has_state:
                        prefill.copy_state_to(new, layer, part)
                    else:
                        prefill.copy_to(new, layer, part, end)
                tensors.append(new)
            cache._layers.append((tensors[0], tensors[1]))
            if old is not None:
                empty = cache._layers[layer][0][:0]
                old._layers[layer] = (empty, empty)
        return cache

    @property
    def layers(self) -> list[SimpleNamespace]:
        """What transformers' recurrences look at."""
        return [
            SimpleNamespace(conv_states=(conv,), recurrent_states=(state,), record_past=False)
            for conv, state in self._layers
        ]

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Return True: zeros are the state before the first token."""
        return True

    def update_recurrent_state(self, state: Tensor, layer: int, *_: Any, **__: Any) -> None:
        """Store the new states of a layer."""
        self._layers[layer][1].copy_(state)

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


def _state_shapes(config: Any, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and type of the parts of a row's state: [D, S], and one state per head."""
    if size := getattr(config, "ssm_state_size", None):  # Mamba-2
        state_shape = (config.mamba_num_heads, config.mamba_head_dim, size)
        num_channels = math.prod(state_shape[:2]) + 2 * config.n_groups * size
        return [((num_channels, config.conv_kernel), dtype), (state_shape, torch.float32)]
    key_size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
    num_heads, width = config.linear_num_value_heads, config.linear_conv_kernel_dim
    num_channels = 2 * config.linear_num_key_heads * key_size + num_heads * value_size
    state_shape = (num_heads, key_size, value_size)
    return [((num_channels, width), dtype), (state_shape, torch.float32)]


class RecurrentPadding:
    """Keeps padding on the right of prefilled inputs out of the states of recurrences."""

    def __init__(self, model: nn.Module) -> None:
        """Watch the projections to a token's rate and decay."""
        self.lengths: Sequence[int] = ()
        """Lengths of the inputs of a forward pass; none: all are whole."""
        for name, module in model.named_modules():
            if name.endswith((".in_proj_a", ".in_proj_b", ".in_proj_ba")):
                module.register_forward_hook(partial(self._clear, 0))
            elif hasattr(module, "time_step_limit"):  # Mamba-2
                # transformers' own is of prefills alone; Megatron and SGLang have none.
                module.time_step_limit = (0.0, math.inf)
                module.in_proj.register_forward_hook(partial(self._clear, -module.num_heads))

    def _clear(
        self, first: int, module: nn.Module, args: tuple[Tensor, ...], projected: Tensor
    ) -> None:
        """Let padding write nothing (sigmoid(−∞) = 0) and forget nothing (softplus(−∞) = 0).

        ``first`` is the first channel of a token's rate and decay.
        """
        if not self.lengths:
            return
        lengths_R1 = torch.tensor(self.lengths, device=projected.device)[:, None]
        is_padding_RP = torch.arange(projected.shape[1], device=projected.device) >= lengths_R1
        projected[..., first:].masked_fill_(is_padding_RP[..., None], float("-inf"))
