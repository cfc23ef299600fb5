"""The modules of a transformer layer.

On a GPU with Transformer Engine: Megatron's own Transformer Engine layer. Elsewhere: Megatron's
parallel linears with the twins of ``policy.local_layers``.
"""

import copy
import importlib.util
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.ssm.gated_delta_net import HAVE_FLA, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from bapo_megatron.policy.delta_net import PackedGatedDeltaNet, use_twins
from bapo_megatron.policy.experts import GroupedExperts
from bapo_megatron.policy.families.base import HfConfig
from bapo_megatron.policy.local_layers import (
    NormColumnParallelLinear,
    PackedCausalAttention,
    ReplicatedLinear,
    RMSNorm,
)


def layer_spec(
    hf: HfConfig, config: TransformerConfig, device: torch.device, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the specs of this rank's layers on ``device``.

    ``vp_stage`` is the number of this rank's chunk of layers; None if it has only one.
    """
    is_fused = uses_transformer_engine(device, config.params_dtype)
    build = _fused_layer if is_fused else _layer
    first = get_transformer_layer_offset(config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage))
    return TransformerBlockSubmodules(
        layer_specs=[build(hf, config, number) for number in layers],
        layer_norm=TENorm if is_fused else RMSNorm,
    )


def _fused_layer(hf: HfConfig, config: TransformerConfig, number: int) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if hf.has_experts(number) else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm or hf.latent is not None,
        multi_latent_attention=hf.latent is not None,
    )
    if hf.latent:
        layer.submodules.self_attention.module = LatentSelfAttention
    if hf.output_bias:
        _add_output_bias(layer)
    if hf.has_delta_net(number):
        if not HAVE_FLA:
            raise ValueError(
                "flash-linear-attention: must be installed for a model with gated delta nets on a "
                "GPU with Transformer Engine; install it (docs/launch.md)"
            )
        _put_delta_net(layer, TELayerNormColumnParallelLinear, TENorm, TERowParallelLinear)
    return layer


def _layer(hf: HfConfig, config: TransformerConfig, number: int) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if hf.has_experts(number) else None,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        multi_latent_attention=hf.latent is not None,
    )
    submodules = layer.submodules
    attention = submodules.self_attention.submodules
    attention.core_attention = PackedCausalAttention
    if hf.latent:
        submodules.input_layernorm = RMSNorm
        submodules.self_attention.module = LatentSelfAttention
        attention.linear_q_up_proj = attention.linear_kv_up_proj = NormColumnParallelLinear
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
        multi_latent_attention.TELinear = ReplicatedLinear  # the name that Megatron compares with
    else:
        submodules.input_layernorm = IdentityOp  # fused into the linear
        attention.linear_qkv = NormColumnParallelLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if hf.output_bias:
        _add_output_bias(layer)
    if hf.has_experts(number):
        submodules.pre_mlp_layernorm = RMSNorm  # router, experts and shared experts share it
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        modules = submodules.mlp.keywords["submodules"]
        modules.experts = partial(GroupedExperts, submodules=linears)
    else:
        submodules.pre_mlp_layernorm = IdentityOp
        linears = MLPSubmodules(linear_fc1=NormColumnParallelLinear, linear_fc2=RowParallelLinear)
        submodules.mlp = partial(MLP.as_mlp_submodule, submodules=linears)
    # The local spec renames separate norms to the fused names in checkpoints; ours have them.
    submodules.sharded_state_dict_keys_map = {}
    if hf.has_delta_net(number):
        use_twins()
        _put_delta_net(layer, NormColumnParallelLinear, RMSNorm, RowParallelLinear)
    return layer


def _put_delta_net(layer: ModuleSpec, in_proj: type, norm: Any, out_proj: type) -> None:
    """Put a gated delta net in place of a layer's attention."""

    class OutNorm:  # Megatron calls classes, but not functions
        def __new__(cls, config: TransformerConfig, **options: Any) -> Any:
            plain = copy.copy(config)
            plain.layernorm_zero_centered_gamma = False  # the only norm whose weights are around 1
            return norm(plain, **options)

    layer.submodules.self_attention = ModuleSpec(
        module=PackedGatedDeltaNet, submodules=GatedDeltaNetSubmodules(in_proj, OutNorm, out_proj)
    )


def _add_output_bias(layer: ModuleSpec) -> None:
    """Give the output projection a bias; Megatron's own switch gives the MLP biases too."""
    attention = layer.submodules.self_attention.submodules
    linear = attention.linear_proj
    attention.linear_proj = lambda *args, **options: linear(*args, **{**options, "bias": True})


def uses_transformer_engine(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether layers on ``device`` are Transformer Engine's.

    Float32 layers are not: its attention has no float32 kernel that takes packed sequences under
    context parallelism.

    Raises:
        ValueError: Transformer Engine is installed, but cannot be used.
    """
    if device.type != "cuda" or dtype is torch.float32:
        return False
    if not HAVE_TE and importlib.util.find_spec("transformer_engine") is not None:
        raise ValueError(
            "transformer-engine: installed, but Megatron cannot import its PyTorch part; build it "
            "for this torch and CUDA (docs/launch.md), or uninstall it"
        )
    return bool(HAVE_TE)


class LatentSelfAttention(multi_latent_attention.MLASelfAttention):
    """Megatron's multi-head latent attention (MLA), with exactly the norms of its spec.

    Megatron's choice would add a norm to queries that have no latent.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        return {
            **{name: getattr(submodules, name) for name in names},
            **dict.fromkeys(("q_layernorm", "kv_layernorm"), IdentityOp),
        }
