"""The one translation from a Hugging Face architecture and our settings to Megatron's GPTModel."""

import random
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_find_correction_range,
    _yarn_linear_ramp_mask,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from bapo_megatron.config.megatron import MegatronConfig, ModelConfig, ParallelConfig
from bapo_megatron.policy.architecture import HfConfig, LinearRope, YarnRope
from bapo_megatron.policy.hf_config import check_division, padded_vocab_size
from bapo_megatron.policy.layer_spec import layer_spec, uses_transformer_engine
from bapo_megatron.policy.local_layers import squared_relu, use_own_kernels
from bapo_megatron.policy.mixers.latent import LatentAttention
from bapo_megatron.runtime.distributed import ProcessGroups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_chunks(
    hf: HfConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    megatron: MegatronConfig,
    groups: ProcessGroups,
) -> list[GPTModel]:
    """Build this rank's part of the model, with weights still to be loaded.

    Returns:
        One GPTModel per chunk of layers: ``parallel.virtual_pipeline`` of them, usually one. The
        first stage's first chunk has the embedding, the last stage's last one the output layer.

    Raises:
        ValueError: The model does not fit the layout, or the machine lacks what a setting needs.
    """
    check_division(hf, parallel)
    config = _transformer_config(hf, model, parallel, megatron, groups)
    chunks = []
    for chunk in range(parallel.virtual_pipeline):
        vp_stage = chunk if parallel.virtual_pipeline > 1 else None
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(hf, config, groups.device, vp_stage),
            vocab_size=padded_vocab_size(hf.vocab_size, parallel.tensor),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=groups.is_first_stage and chunk == 0,
            post_process=groups.is_last_stage and chunk == parallel.virtual_pipeline - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=hf.tied_embeddings,
            position_embedding_type="rope" if hf.rotary_dim else "none",
            rotary_base=hf.rope_theta,
            rotary_percent=hf.rotary_share,
            vp_stage=vp_stage,
        )
        for name, parameter in gpt.named_parameters():
            if ".mlp.experts." in name:
                # Megatron's default only if expert parallel > 1. Always, so that gradients are
                # summed over the ranks with the same expert, and every layout's optimizers match.
                parameter.allreduce = False
                parameter.sequence_parallel = False  # Megatron would sum biases' gradients twice
            elif name.endswith(".softmax_offset"):
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        for module in gpt.modules():
            if hasattr(module, "frozen_expert_bias"):
                module.frozen_expert_bias = True  # training keeps the balance that it finds
        if hasattr(gpt, "rotary_pos_emb"):
            _scale_frequencies(gpt.rotary_pos_emb, hf)
        if not uses_transformer_engine(groups.device, config.params_dtype):
            use_own_kernels(gpt)
            # It would plan anew for every length of a sequence, which takes up to a second.
            torch.backends.cuda.enable_cudnn_sdp(False)
        _add_hooks(gpt, hf)
        chunks.append(gpt.to(groups.device))
    return chunks


def wrap_for_precision(chunks: Sequence[GPTModel]) -> list[nn.Module]:
    """Return the chunks as Megatron's schedule calls them: wrapped if they compute in bfloat16.

    The biases of routers stay float32.
    """
    modules = [Float16Module(gpt.config, gpt) if gpt.config.bf16 else gpt for gpt in chunks]
    for router in (part for gpt in chunks for part in gpt.modules()):
        if hasattr(router, "expert_bias"):
            router._maintain_float32_expert_bias()
    return modules


def _scale_frequencies(rope: RotaryEmbedding, hf: HfConfig) -> None:
    scaling = hf.rope_scaling
    if isinstance(scaling, YarnRope):
        # Not Megatron's YaRN: for packed batches its fused kernel drops the attention factor.
        low, high = _yarn_find_correction_range(
            scaling.beta_fast,
            scaling.beta_slow,
            hf.rotary_dim,
            hf.rope_theta,
            scaling.original_max_position_embeddings,
            scaling.truncate,
        )
        mask = 1 - _yarn_linear_ramp_mask(low, high, hf.rotary_dim // 2, rope.inv_freq.device)
        powers = hf.rope_theta ** (
            torch.arange(0, hf.rotary_dim, 2, device=mask.device) / hf.rotary_dim
        )
        rope.inv_freq = 1 / (scaling.factor * powers) * (1 - mask) + rope.inv_freq * mask
    elif isinstance(scaling, LinearRope):
        rope.inv_freq = rope.inv_freq / scaling.factor
    elif scaling is not None:
        # GPTModel's own option fixes all values but the factor.
        rope.inv_freq = rope._apply_scaling(rope.inv_freq, **asdict(scaling))
    if hf.local_rope_theta is not None:
        # The table of angles gets the channels of both, which ``_add_hooks`` separates.
        channels = torch.arange(0, hf.rotary_dim, 2, device=rope.inv_freq.device)
        local = 1 / hf.local_rope_theta ** (channels / hf.rotary_dim)
        rope.inv_freq = torch.cat((rope.inv_freq, local))


def _add_hooks(gpt: GPTModel, hf: HfConfig) -> None:
    if hf.scales_embeddings and gpt.pre_process:
        gpt.embedding.register_forward_hook(_scale_embeddings)
    if hf.local_rope_theta is None:
        return
    gpt.rotary_pos_emb.register_forward_hook(_separate_angles)
    for layer in gpt.decoder.layers:
        kind = int(getattr(hf.mixers[layer.layer_number - 1], "window", None) is not None)
        take = partial(_take_angles, kind)
        layer.self_attention.register_forward_pre_hook(take, with_kwargs=True)


def _separate_angles(rope: nn.Module, args: Any, table: Tensor) -> Tensor:
    """Stack the angles of layers without and with a window; channels repeat both frequencies."""
    return table.unflatten(-1, (2, 2, -1)).movedim(-2, 0).flatten(-2)


def _take_angles(kind: int, attention: nn.Module, args: Any, options: dict[str, Any]) -> Any:
    return args, {**options, "rotary_pos_emb": options["rotary_pos_emb"][kind]}


def _scale_embeddings(embedding: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Multiply by sqrt(hidden size), rounded to the type of the weights as in transformers."""
    return output * output.new_tensor(output.shape[-1] ** 0.5)


def _transformer_config(
    hf: HfConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    megatron: MegatronConfig,
    groups: ProcessGroups,
) -> TransformerConfig:
    dtype, num_chunks = DTYPES[model.dtype], parallel.virtual_pipeline
    fused = uses_transformer_engine(groups.device, dtype)
    has_latents = any(isinstance(mixer, LatentAttention) for mixer in hf.mixer_kinds)
    config = MLATransformerConfig if has_latents else TransformerConfig
    mixers = ChainMap(*(mixer.megatron_options(hf) for mixer in hf.mixer_kinds))
    return config(
        num_layers=hf.num_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_heads,
        num_query_groups=hf.num_kv_heads,
        kv_channels=hf.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=hf.is_gated,
        bias_activation_fusion=hf.is_gated,
        add_qkv_bias=hf.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        perform_initialization=False,  # every parameter is loaded, or loading fails
        use_cpu_initialization=groups.device.type == "cpu",
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        context_parallel_size=parallel.context,
        layernorm_zero_centered_gamma=hf.zero_centered_norms,
        attention_output_gate=hf.output_gate,
        **mixers,
        **_activation_options(hf),
        **_expert_options(hf, parallel, fused=fused),
        # A stage needs only the shape of its sent output, not the values.
        deallocate_pipeline_outputs=True,
        # Losses come with global denominators: neither schedule nor DDP may divide gradients.
        calculate_per_token_loss=True,
        **memory_options(megatron, fused),
        **_speed_options(groups.device, fused=fused, interleaved=num_chunks > 1),
    )


def _activation_options(hf: HfConfig) -> dict[str, Any]:
    if hf.experts is None or hf.experts.swiglu_limit is None:
        activation = getattr(F, hf.activation) if hf.is_gated else squared_relu
        return {"activation_func": activation, "add_bias_linear": False}
    return {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": hf.experts.swiglu_limit,
        "glu_linear_offset": 1.0,
        "add_bias_linear": hf.experts.has_linear_biases,
    }


def _expert_options(hf: HfConfig, parallel: ParallelConfig, *, fused: bool) -> dict[str, Any]:
    """Translate the experts of a layer and how they are divided; nothing for a dense model."""
    experts = hf.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_layer_freq": [int(hf.has_experts(layer)) for layer in range(hf.num_layers)],
        "moe_shared_expert_intermediate_size": experts.shared_intermediate_size or None,
        "moe_shared_expert_gate": experts.has_shared_gate,
        "moe_router_score_function": experts.scoring,
        # A softmax over the chosen logits alone is one over all logits, normalised.
        "moe_router_pre_softmax": experts.scoring == "softmax" and not experts.normalizes,
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1 else None,
        "moe_router_enable_expert_bias": experts.has_bias,
        "moe_router_num_groups": experts.num_groups if experts.num_groups > 1 else None,
        "moe_router_group_topk": experts.groups_per_token if experts.num_groups > 1 else None,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",  # the one for ranks with different token counts
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor_size,
    }


def memory_options(megatron: MegatronConfig, has_transformer_engine: bool) -> dict[str, Any]:
    """Translate recomputation and FP8.

    Raises:
        ValueError: FP8 needs Transformer Engine, which is not used here.
    """
    options: dict[str, Any] = {}
    if megatron.recompute == "selective":
        options = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    elif megatron.recompute == "full":
        options = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": megatron.recompute_layers,
        }
    if megatron.fp8 != "none":
        if not has_transformer_engine:
            raise ValueError(
                f"megatron.fp8: {megatron.fp8} needs a GPU with Transformer Engine, which this "
                "machine lacks; install it (docs/launch.md), or leave the setting out"
            )
        options |= {"fp8": megatron.fp8, "fp8_recipe": megatron.fp8_recipe}
    return options


def _speed_options(device: torch.device, *, fused: bool, interleaved: bool) -> dict[str, Any]:
    """Choose fused kernels and p2p communication for the machine; results agree up to rounding.

    Our own layers (``fused`` is False) use PyTorch's kernels alone.
    """
    on_gpu = device.type == "cuda"
    return {
        # Otherwise each micro-batch's weight gradient is rounded to bfloat16 before it is added.
        "gradient_accumulation_fusion": on_gpu,
        # The unfused form reads sequence lengths from the device, once per layer.
        "apply_rope_fusion": fused,
        "overlap_p2p_comm": on_gpu and interleaved,
        "batch_p2p_comm": on_gpu and not interleaved,
        # Works around a race that torch 1.13 fixed, and would block the host at every message.
        "batch_p2p_sync": False,
    }


def seed_everything(seed: int, groups: ProcessGroups) -> None:
    """Seed Python, PyTorch and Megatron's named streams.

    Data-, context- and pipeline-parallel ranks draw differently, tensor-parallel ranks alike except
    in Megatron's own tensor-parallel stream.
    """
    replica = groups.data_rank * groups.context.size() + groups.context.rank()
    rank_seed = seed + 1000 * replica + 100_000_000 * groups.pipeline.rank()
    random.seed(rank_seed)
    torch.manual_seed(rank_seed)
    model_parallel_cuda_manual_seed(rank_seed)
