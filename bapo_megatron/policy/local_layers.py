"""PyTorch twins of Transformer Engine's modules and kernels, for layers without it.

They bear **Transformer Engine's parameter names** (``linear_qkv.layer_norm_weight``), so that
weight mapping, packing and checkpoints are one code path.

Shape legend: N = packed tokens on this rank, S = those of one sequence, C = context-parallel ranks,
H = heads on this rank, G = key/value groups on this rank, D = channels of a head, F = channels of
the MLP.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import mlp, multi_latent_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32; Megatron's refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.config = eps, config
        self.weight = _replicated(config, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return _rms_norm(hidden, self.weight, self.eps, self.config)


class DividedByRank(nn.Module):
    """A module whose parameters tensor-parallel ranks divide along their first axis."""

    tp_group: dist.ProcessGroup

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the parameters for Megatron's checkpoints."""
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            dict.fromkeys(state, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


class JointRMSNorm(DividedByRank):
    """RMSNorm over the queries, or keys, of all heads together; also with Transformer Engine."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int
    ) -> None:
        super().__init__()
        self.eps, self.config = eps, config
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.weight = _weight(config, num_heads * hidden_size // self.tp_group.size())
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise the last two dimensions, this rank's heads and their channels."""
        hidden = heads.flatten(-2)
        if self.tp_group.size() == 1:
            return _rms_norm(hidden, self.weight, self.eps, self.config).view(heads.shape)
        normed: Tensor = _KeepsInputs.apply(self._divided_norm, hidden, self.weight)
        return normed.view(heads.shape)

    def _divided_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        mean = hidden.float().square().mean(dim=-1, keepdim=True) / self.tp_group.size()
        mean = reduce_from_tensor_model_parallel_region(mean, group=self.tp_group)
        # Every rank's output depends on it, so its gradients are summed, too.
        mean = copy_to_tensor_model_parallel_region(mean, group=self.tp_group)
        return (hidden * (mean + self.eps).rsqrt() * weight).to(hidden.dtype)


class _KeepsInputs(torch.autograd.Function):
    """A function that keeps its inputs alone; the backward pass computes it again."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.function = function
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        return None, *torch.autograd.grad(output, inputs, gradient)


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm and a column-parallel linear: the twin of TELayerNormColumnParallelLinear."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = _replicated(config, input_size)

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Normalise ``hidden``, then multiply; returns (output, bias to add later)."""
        eps = self.config.layernorm_epsilon
        normalised = _rms_norm(hidden, self.layer_norm_weight, eps, self.config)
        return super().forward(normalised, *args, **options)


@dataclass(frozen=True, slots=True)
class NormAfter:
    """Builds a row-parallel linear, Transformer Engine's too, whose ``post_norm`` norms its output.

    Adapters of the linear add to what is normed: their hooks come first.
    """

    linear: Callable[..., nn.Module]

    def __call__(self, *sizes: int, config: TransformerConfig, **options: Any) -> nn.Module:
        """Build it."""
        linear = self.linear(*sizes, config=config, **options)
        linear.post_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        linear.register_forward_hook(_with_post_norm)
        return linear


def _with_post_norm(linear: Any, inputs: Any, output: tuple[Tensor, Tensor | None]) -> Any:
    hidden, bias = output
    return linear.post_norm(hidden if bias is None else hidden + bias), None


class ReplicatedLinear(nn.Module):
    """A linear that every tensor-parallel rank has whole: the twin of a duplicated TELinear.

    Megatron's column-parallel one would give the rotated keys, which all heads share, the gradients
    of a rank's own heads alone.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any
    ) -> None:
        super().__init__()
        self.weight = _replicated(config, output_size, input_size)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Multiply; returns (output, no bias)."""
        return F.linear(hidden, self.weight), None


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed batch, with the lengths on the host."""

    lengths: Sequence[int] = ()
    """Of the whole sequences, which context-parallel ranks divide."""


class PackedRotaryEmbedding(nn.Module):
    """Rotations of the tokens of a packed batch, computed once for all layers.

    Megatron has the angles by position and, without Transformer Engine, rotates each sequence
    separately in every layer. With MLA every layer computes them.
    """

    def __init__(self, by_position: RotaryEmbedding, dtype: torch.dtype) -> None:
        super().__init__()
        self.by_position, self.dtype = by_position, dtype

    def get_rotary_seq_len(self, *args: Any) -> PackedSequences:
        """Return what GPTModel gives to ``forward``, in place of a length."""
        return args[-1]

    def forward(
        self, packed_seq_params: PackedSequences, *, cp_group: Any, **options: Any
    ) -> Tensor:
        """Return cosine and sine for each token of this context rank, [2, N, 1, D]."""
        angles = self.by_position(packed_seq_params.max_seqlen_q, **options)
        angles_N1D = self._angles_by_token(angles, packed_seq_params, cp_group)
        return torch.stack([angles_N1D.cos(), angles_N1D.sin()]).to(self.dtype)

    def get_cached_cos_sin(
        self, packed_seq_params: PackedSequences, *, packed_seq: bool, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return cosine and sine for MLA, [N, 1, D] each; YaRN scales them."""
        angles, factor = self.by_position(packed_seq_params.max_seqlen_q, packed_seq=packed_seq)
        angles_N1D = self._angles_by_token(angles, packed_seq_params, None)
        cos, sin = factor * angles_N1D.cos(), factor * angles_N1D.sin()
        return cos.to(self.dtype), sin.to(self.dtype)

    def _angles_by_token(
        self, angles_S11D: Tensor, packed_seq_params: PackedSequences, cp_group: Any
    ) -> Tensor:
        group = self.by_position.cp_group if cp_group is None else cp_group
        size, rank = group.size(), group.rank()
        angles, parts = angles_S11D[:, :, 0], []
        for length in packed_seq_params.lengths:
            chunks = angles[:length].tensor_split(2 * size)
            parts += [chunks[rank], chunks[-1 - rank]]
        return torch.cat(parts)


def use_own_kernels(gpt: GPTModel) -> None:
    """Have Megatron rotate a packed batch in one go, as with Transformer Engine, and use our gates.

    Megatron's needs torch's compiler. Replaces the kernels for every model of this process.
    """
    mlp.bias_swiglu_impl, mlp.weighted_bias_swiglu_impl = swiglu, weighted_swiglu
    mlp.bias_geglu_impl = geglu
    mlp.weighted_bias_quick_geglu_impl = weighted_clamped_swiglu
    for module in list(gpt.modules()):
        if isinstance(rope := getattr(module, "rotary_pos_emb", None), RotaryEmbedding):
            module.rotary_pos_emb = PackedRotaryEmbedding(rope, gpt.config.params_dtype)
    gpt.config.apply_rope_fusion = True
    rope_utils.fused_apply_rotary_pos_emb_thd = _rotate_packed
    multi_latent_attention.fused_apply_mla_rope_for_q = _rotate_latent_queries
    multi_latent_attention.fused_apply_mla_rope_for_kv = _rotate_latent_keys


def _rotate_packed(
    tokens_NHD: Tensor,
    cu_seqlens: Tensor | None,
    rotation: Tensor | tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    """Rotate queries or keys; the twin of Transformer Engine's kernel for packed batches."""
    cos_N1D, sin_N1D = rotation
    width = cos_N1D.shape[-1]
    rotated, passed = tokens_NHD[..., :width], tokens_NHD[..., width:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos_N1D + torch.cat((-second, first), dim=-1) * sin_N1D
    return torch.cat((rotated, passed), dim=-1) if passed.shape[-1] else rotated


def _rotate_latent_queries(
    query_NHD: Tensor, cos: Tensor, sin: Tensor, unrotated_dim: int, rotary_dim: int, *_: Any
) -> Tensor:
    """Rotate the last channels of queries; the twin of Megatron's kernel."""
    unrotated, rotated = query_NHD.split([unrotated_dim, rotary_dim], dim=-1)
    return torch.cat((unrotated, _rotate_pairs(rotated, cos, sin)), dim=-1)


def _rotate_latent_keys(
    key_value_NHD: Tensor,
    shared_key_N1D: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotary_dim: int,
    unrotated_dim: int,
    value_dim: int,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    """Return keys with the rotated channels that heads share, and values; the kernel's twin."""
    unrotated, value_NHD = key_value_NHD.split([unrotated_dim, value_dim], dim=-1)
    rotated = _rotate_pairs(shared_key_N1D, cos, sin).expand(-1, unrotated.shape[1], -1)
    return torch.cat((unrotated, rotated), dim=-1), value_NHD


def _rotate_pairs(tokens_NHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels 2i and 2i + 1 together; they become channels i and i + D/2."""
    halves = torch.cat((tokens_NHD[..., 0::2], tokens_NHD[..., 1::2]), dim=-1)
    return _rotate_packed(halves, None, (cos, sin))


class PackedCausalAttention(DividedByRank):
    """Causal attention within each sequence of a packed (thd) batch, with windows and sinks.

    The twin of TEDotProductAttention; Megatron's DotProductAttention refuses packed batches. Under
    context parallelism each rank holds two chunks of every sequence (``data.micro_batch``) and
    gathers the keys and values of the others.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args: Any,
        pg_collection: ProcessGroupCollection | None = None,
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        assert pg_collection is not None
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.context, self.tp_group, self.window = pg_collection.cp, pg_collection.tp, None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            assert config.window_size is not None
            self.window = config.window_size[0] + 1
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = _weight(config, num_heads)

    def forward(
        self,
        query_NHD: Tensor,
        key_NGD: Tensor,
        value_NGD: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSequences,
        **options: Any,
    ) -> Tensor:
        """Return [N, H · D]."""
        lengths = [length // self.context.size() for length in packed_seq_params.lengths]
        keys, values = self._sequences(key_NGD, lengths), self._sequences(value_NGD, lengths)
        parts = zip(query_NHD.split(lengths), keys, values, strict=True)
        return torch.cat([self._attend(*part) for part in parts]).flatten(1)

    def _sequences(self, local_NGD: Tensor, lengths: list[int]) -> list[Tensor]:
        """Return the keys or values of each whole sequence, [C · S, G, D].

        Gradients go back to the rank that owns the part. Rank c holds chunk c of a sequence and, of
        its 2C chunks, the c-th from the end.
        """
        size = self.context.size()
        if size == 1:
            return list(local_NGD.split(lengths))
        gathered = gather_from_sequence_parallel_region(local_NGD.contiguous(), group=self.context)
        sequences = []
        for parts_CSGD in gathered.unflatten(0, (size, -1)).split(lengths, dim=1):
            first, second = parts_CSGD.chunk(2, dim=1)
            sequences.append(torch.cat([first.flatten(0, 1), second.flip(0).flatten(0, 1)]))
        return sequences

    def _attend(self, query_SHD: Tensor, key_SGD: Tensor, value_SGD: Tensor) -> Tensor:
        """Attend within one sequence, of which this rank has S queries; returns [S, H, D]."""
        size = self.context.size()
        if self.window is not None or hasattr(self, "softmax_offset"):
            return self._masked(query_SHD, key_SGD, value_SGD)
        if size == 1:
            return self._causal(query_SHD, key_SGD, value_SGD)
        chunk, rank = len(key_SGD) // (2 * size), self.context.rank()
        ends = ((rank + 1) * chunk, (2 * size - rank) * chunk)  # keys that each chunk sees
        parts = zip(query_SHD.chunk(2), ends, strict=True)
        return torch.cat(
            [self._causal(part, key_SGD[:end], value_SGD[:end]) for part, end in parts]
        )

    def _masked(self, query_SHD: Tensor, key_SGD: Tensor, value_SGD: Tensor) -> Tensor:
        """Attend block by block: queries of a window's length see less than two windows of keys."""
        num_tokens, device = len(query_SHD), query_SHD.device
        window = self.window or num_tokens
        position_S, parts = torch.arange(num_tokens, device=device), []
        for start in range(0, num_tokens, window):
            query_B, first = position_S[start : start + window, None], max(0, start - window + 1)
            key_K = position_S[first : start + window]
            is_hidden_BK = (key_K > query_B) | (key_K <= query_B - window)
            mask_BK = query_SHD.new_zeros(is_hidden_BK.shape).masked_fill(is_hidden_BK, -torch.inf)
            part = slice(first, start + window)
            keys, values = key_SGD[part], value_SGD[part]
            parts.append(self._with_sinks(query_SHD[start : start + window], keys, values, mask_BK))
        return torch.cat(parts)

    def _with_sinks(self, query: Tensor, keys: Tensor, values: Tensor, mask_BK: Tensor) -> Tensor:
        """A sink is the logit of one more key, of zeros, whose value is zeros."""
        mask = mask_BK
        if (sinks_H := getattr(self, "softmax_offset", None)) is not None:
            keys, values = F.pad(keys, (0, 0, 0, 0, 0, 1)), F.pad(values, (0, 0, 0, 0, 0, 1))
            sinks_HB1 = sinks_H[:, None, None].expand(-1, len(query), 1).to(mask.dtype)
            mask = torch.cat((mask_BK.expand(len(sinks_H), -1, -1), sinks_HB1), dim=-1)
        return self._product(query, keys, values, mask[None])

    def _causal(self, query_SHD: Tensor, key_SGD: Tensor, value_SGD: Tensor) -> Tensor:
        """Let the last query see every key, and each one before it one key less."""
        num_queries, num_keys = len(query_SHD), len(key_SGD)
        bias = None
        if num_queries != num_keys:
            # Only context parallelism needs it, and it loads torch's compiler: almost a second that
            # processes without an optimizer (``convert``) save.
            from torch.nn.attention.bias import causal_lower_right

            # On a GPU it never becomes a mask, whose size is quadratic in the length.
            bias = causal_lower_right(num_queries, num_keys)
        return self._product(query_SHD, key_SGD, value_SGD, bias)

    def _product(
        self, query_SHD: Tensor, key_SGD: Tensor, value_SGD: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Attend with what is added to the scores; None: causally."""
        output_HSD = F.scaled_dot_product_attention(
            query_SHD.transpose(0, 1)[None],
            key_SGD.transpose(0, 1)[None],
            value_SGD.transpose(0, 1)[None],
            attn_mask=bias,
            is_causal=bias is None,
            scale=self.scale,
            enable_gqa=True,
        )[0]
        return output_HSD.transpose(0, 1)


def swiglu(gate_up_N2F: Tensor, *_: Any) -> Tensor:
    """Return silu(gate) · up, [N, F]; also in place of Megatron's ``bias_swiglu_impl``.

    The backward pass keeps the input alone. Autograd would keep silu(gate) and up as well, and
    concatenate the gradients of the two halves.
    """
    return _Gated.apply(gate_up_N2F, F.silu, torch.ops.aten.silu_backward.grad_input)


def geglu(gate_up_N2F: Tensor, *_: Any) -> Tensor:
    """Return gelu(gate) · up, as ``swiglu``, in place of Megatron's ``bias_geglu_impl``."""
    return _Gated.apply(gate_up_N2F, _gelu, _gelu_backward)


_gelu = partial(F.gelu, approximate="tanh")
_gelu_backward = partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")


def weighted_swiglu(gate_up_N2F: Tensor, _bias: None, weights_N1: Tensor, *_: Any) -> Tensor:
    """Return silu(gate) · up · weight, in place of Megatron's ``weighted_bias_swiglu_impl``."""
    return (swiglu(gate_up_N2F) * weights_N1).to(gate_up_N2F.dtype)


def squared_relu(hidden_NF: Tensor) -> Tensor:
    """Return max(0, x)²; Megatron's needs torch's compiler."""
    return F.relu(hidden_NF).square()


def weighted_clamped_swiglu(
    gate_up_N2F: Tensor,
    bias_2F: Tensor | None,
    weights_N1: Tensor,
    _fp8: bool,
    offset: float,
    limit: float,
) -> Tensor:
    """Return gpt-oss's gate σ(1.702 gate) (up + offset) · weight of clamped gate and up, [N, F].

    In place of Megatron's ``weighted_bias_quick_geglu_impl``; it keeps the input alone, too.
    """

    def clamped(gate_up_N2F: Tensor) -> Tensor:
        gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
        gate_NF = gate_NF.clamp(max=limit)
        return gate_NF * (1.702 * gate_NF).sigmoid() * (up_NF.clamp(-limit, limit) + offset)

    gate_up_N2F = gate_up_N2F if bias_2F is None else gate_up_N2F + bias_2F
    inner_NF: Tensor = _KeepsInputs.apply(clamped, gate_up_N2F)
    return (inner_NF * weights_N1).to(gate_up_N2F.dtype)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up_N2F: Tensor, activate: Callable[[Tensor], Tensor], backward: Any
    ) -> Tensor:
        ctx.save_for_backward(gate_up_N2F)
        ctx.activate, ctx.of_activation = activate, backward
        gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
        return activate(gate_NF).mul_(up_NF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NF: Tensor) -> tuple[Tensor, None, None]:
        (gate_up_N2F,) = ctx.saved_tensors
        gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
        gradient_N2F = torch.empty_like(gate_up_N2F)
        of_gate_NF, of_up_NF = gradient_N2F.chunk(2, dim=-1)
        torch.mul(gradient_NF, ctx.activate(gate_NF), out=of_up_NF)
        ctx.of_activation(gradient_NF * up_NF, gate_NF, grad_input=of_gate_NF)
        return gradient_N2F, None, None


def normalised(linear: Any, hidden: Tensor) -> Tensor:
    """Return what a linear multiplies: its input after its norm, if it has one."""
    if not hasattr(linear, "layer_norm_weight"):
        return hidden
    weight, config = linear.layer_norm_weight, linear.config
    if config.layernorm_zero_centered_gamma:
        weight = (1 + weight.float()).to(weight.dtype)
    return F.rms_norm(hidden, hidden.shape[-1:], weight, config.layernorm_epsilon)


def _weight(config: TransformerConfig, *shape: int) -> nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return nn.Parameter(torch.ones(shape, dtype=config.params_dtype, device=device))


def _replicated(config: TransformerConfig, *shape: int) -> nn.Parameter:
    weight = _weight(config, *shape)
    # Sequence-parallel ranks see a part of the tokens each: Megatron sums marked gradients.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


def _rms_norm(hidden: Tensor, weight: Tensor, eps: float, config: TransformerConfig) -> Tensor:
    """Normalise and scale in float32, rounded once; on a GPU a single kernel in each direction."""
    if config.layernorm_zero_centered_gamma:
        scale = 1 + weight.float()  # rounding it to bfloat16 would lose most of the weight
        return F.rms_norm(hidden.float(), hidden.shape[-1:], scale, eps).to(hidden.dtype)
    return F.rms_norm(hidden, hidden.shape[-1:], weight, eps)
