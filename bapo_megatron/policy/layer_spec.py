"""The modules of a transformer layer.

On a GPU with Transformer Engine: Megatron's own Transformer Engine layer. Elsewhere: Megatron's
parallel linears with the twins of ``policy.local_layers``.
"""

import importlib.util
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TEColumnParallelLinear, TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from bapo_megatron.policy.architecture import HfConfig
from bapo_megatron.policy.experts import GroupedExperts
from bapo_megatron.policy.local_layers import NormAfter, NormColumnParallelLinear, RMSNorm


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
    mixer = hf.mixers[number]
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if hf.has_experts(number) else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        **mixer.spec_options(hf),
    )
    mixer.put_into(layer, hf, is_fused=True)
    _place_norms(layer.submodules, hf, TEColumnParallelLinear)
    _drop_mlp(layer, hf, number)
    return layer


def _layer(hf: HfConfig, config: TransformerConfig, number: int) -> ModuleSpec:
    mixer = hf.mixers[number]
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if hf.has_experts(number) else None,
        normalization=config.normalization,
        **mixer.spec_options(hf),
    )
    submodules = layer.submodules
    submodules.input_layernorm = IdentityOp  # fused into the linear, unless the mixer puts one
    mixer.put_into(layer, hf, is_fused=False)
    if hf.has_experts(number):
        submodules.pre_mlp_layernorm = RMSNorm  # router, experts and shared experts share it
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        modules = submodules.mlp.keywords["submodules"]
        modules.experts = partial(GroupedExperts, submodules=linears)
    else:
        submodules.pre_mlp_layernorm = IdentityOp
        linears = MLPSubmodules(linear_fc1=NormColumnParallelLinear, linear_fc2=RowParallelLinear)
        submodules.mlp = partial(MLP.as_mlp_submodule, submodules=linears)
    _place_norms(submodules, hf, ColumnParallelLinear)
    _drop_mlp(layer, hf, number)
    # The local spec renames separate norms to the fused names in checkpoints; ours have them.
    submodules.sharded_state_dict_keys_map = {}
    return layer


def _drop_mlp(layer: ModuleSpec, hf: HfConfig, number: int) -> None:
    if not hf.has_mlp(number):
        layer.submodules.pre_mlp_layernorm = layer.submodules.mlp = IdentityOp
        layer.submodules.mlp_bda = IdentityFuncOp


def _place_norms(layer: Any, hf: HfConfig, linear_without_norm: Any) -> None:
    """Change a spec of layers with fused norms before attention and MLP."""
    if hf.norms_before and not hf.norms_after:
        return
    assert hf.experts is None, "experts have a norm before them alone"
    attention, mlp = layer.self_attention.submodules, layer.mlp.keywords["submodules"]
    if not hf.norms_before:
        attention.linear_qkv = mlp.linear_fc1 = linear_without_norm
    if hf.norms_after:
        attention.linear_proj = NormAfter(attention.linear_proj)
        mlp.linear_fc2 = NormAfter(mlp.linear_fc2)


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
