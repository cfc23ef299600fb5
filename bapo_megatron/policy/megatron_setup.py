"""The one translation from a Hugging Face architecture to a Megatron-core GPTModel."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from bapo_megatron.policy.layer_spec import layer_spec

if TYPE_CHECKING:
    from bapo_megatron.config.schema import ModelConfig, ParallelConfig
    from bapo_megatron.distributed import ProcessGroups
    from bapo_megatron.policy.hf_config import HfConfig, Llama3Rope

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this. It does not depend on the tensor-parallel size
(up to 128), so that a checkpoint fits every layout, and it keeps the output GEMM aligned on a
GPU."""


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Return the vocabulary size that the model allocates over all tensor-parallel ranks."""
    multiple = math.lcm(VOCAB_MULTIPLE, tensor)
    return -(-vocab_size // multiple) * multiple


def build_gpt_model(
    hf: HfConfig, model: ModelConfig, parallel: ParallelConfig, groups: ProcessGroups
) -> GPTModel:
    """Build this rank's part of the model, with weights still to be loaded.

    Raises:
        ValueError: The model cannot be divided over ``parallel.tensor`` ranks.
    """
    config = transformer_config(hf, model, parallel, groups)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, groups.device),
        vocab_size=padded_vocab_size(hf.vocab_size, parallel.tensor),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=hf.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=hf.rope_theta,
    )
    if hf.rope_scaling is not None:
        _scale_rope(gpt, hf.rope_scaling)
    return gpt.to(groups.device)


def transformer_config(
    hf: HfConfig, model: ModelConfig, parallel: ParallelConfig, groups: ProcessGroups
) -> TransformerConfig:
    """Translate the architecture and the layout.

    Raises:
        ValueError: The model cannot be divided over ``parallel.tensor`` ranks.
    """
    _check_divisible(hf, parallel)
    dtype = DTYPES[model.dtype]
    return TransformerConfig(
        num_layers=hf.num_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_heads,
        num_query_groups=hf.num_kv_heads,
        kv_channels=hf.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.qkv_bias,
        qk_layernorm=hf.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        perform_initialization=False,  # every parameter is loaded, or loading fails
        use_cpu_initialization=groups.device.type == "cpu",
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=groups.pipeline_size,
        sequence_parallel=parallel.sequence,
        # Micro-batches differ in length; Megatron then wants this dispatcher in dense models too.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Losses come with global denominators: neither schedule nor DDP may divide gradients.
        calculate_per_token_loss=True,
        # These need CUDA kernels that are not always there.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
    )


def seed_everything(seed: int, groups: ProcessGroups) -> None:
    """Seed Python, PyTorch and Megatron's named streams.

    Data-parallel ranks draw differently, tensor-parallel ranks alike except in Megatron's own
    tensor-parallel stream.
    """
    own_seed = seed + 1000 * groups.data_rank + 100_000 * groups.pipeline_rank
    random.seed(own_seed)
    torch.manual_seed(own_seed)
    model_parallel_cuda_manual_seed(own_seed)


def _check_divisible(hf: HfConfig, parallel: ParallelConfig) -> None:
    sizes = {
        "num_attention_heads": hf.num_heads,
        "num_key_value_heads": hf.num_kv_heads,
        "intermediate_size": hf.intermediate_size,
    }
    for name, size in sizes.items():
        if size % parallel.tensor:
            raise ValueError(
                f"parallel.tensor: {parallel.tensor} must divide the model's {name}, {size}; "
                "choose a smaller size"
            )
    if parallel.sequence and parallel.tensor == 1:
        raise ValueError(
            "parallel.sequence needs parallel.tensor > 1; set parallel.sequence: false"
        )


def _scale_rope(gpt: GPTModel, scaling: Llama3Rope) -> None:
    """Scale rotary frequencies; GPTModel's own option fixes all values but the factor."""
    rope = gpt.rotary_pos_emb
    rope.inv_freq = rope._apply_scaling(
        rope.inv_freq,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position_embeddings=scaling.original_max_position_embeddings,
    )
