"""Multi-head latent attention, MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values are projections of one latent per token, queries of another (or of the hidden
states); a part of each head is rotated, in interleaved pairs, and its keys are shared by all heads.
"""

from dataclasses import dataclass, replace
from typing import Any

from bapo_megatron.policy.architecture import HfConfig, Weight, YarnRope
from bapo_megatron.policy.mixers.base import FLOAT32_BYTES, Mixer, Share, weight

_NORM = Weight("input_layernorm.weight", ("input_layernorm.weight",), ("hidden",))
_QUERY = weight("linear_q_proj.weight", "self_attn.q_proj.weight", "query hidden", 0)
_DOWN_QUERY = weight("linear_q_down_proj.weight", "self_attn.q_a_proj.weight", "query_rank hidden")
_DOWN_KEY_VALUE = weight(
    "linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "latent hidden"
)
_UP_QUERY = (
    weight("linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight", "query_rank"),
    weight("linear_q_up_proj.weight", "self_attn.q_b_proj.weight", "query query_rank", 0),
)
_UP_KEY_VALUE = (
    weight(
        "linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight", "key_value_rank"
    ),
    weight("linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", "key_value key_value_rank", 0),
)
_OUTPUT = weight("linear_proj.weight", "self_attn.o_proj.weight", "hidden value", 1)


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """Sizes of attention whose keys and values are projections of one latent per token."""

    query_rank: int | None
    """Channels of the queries' latent; None: queries are projections of the hidden states."""
    key_value_rank: int
    """Channels of the latent of keys and values."""
    unrotated_dim: int
    """Channels of a head's query and key that are not rotated."""
    rotary_dim: int
    """Channels of a head's query and key that are rotated; all heads have the same key there."""
    value_dim: int
    """Channels of a head's value."""

    title = "multi-head latent attention"
    divides_cache = False

    def weights(self, hf: HfConfig) -> tuple[Weight, ...]:
        if not self.query_rank:
            return (_NORM, _QUERY, _DOWN_KEY_VALUE, *_UP_KEY_VALUE, _OUTPUT)
        down = (_DOWN_QUERY, replace(_DOWN_KEY_VALUE, loads_with_previous=True))
        return (_NORM, *down, *_UP_QUERY, *_UP_KEY_VALUE, _OUTPUT)

    def dimensions(self, hf: HfConfig) -> dict[str, int]:
        return {
            "query_rank": self.query_rank or 0,
            "key_value_rank": self.key_value_rank,
            "latent": self.cached_channels(hf),
            "key_value": hf.num_heads * (self.unrotated_dim + self.value_dim),
            "value": hf.num_heads * self.value_dim,
        }

    def megatron_options(self, hf: HfConfig) -> dict[str, Any]:
        """See ``Mixer``.

        YaRN by a factor of 1 is no YaRN, and Megatron's kernel has no rotation without it.
        """
        yarn = hf.rope_scaling or YarnRope(1.0, 4096.0)
        assert isinstance(yarn, YarnRope)
        return {
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.key_value_rank,
            "qk_head_dim": self.unrotated_dim,
            "qk_pos_emb_head_dim": self.rotary_dim,
            "v_head_dim": self.value_dim,
            "rotary_base": hf.rope_theta,
            "rotary_scaling_factor": yarn.factor,
            "original_max_position_embeddings": int(yarn.original_max_position_embeddings),
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale or 1.0,
            "mscale_all_dim": yarn.mscale_all_dim or 0.0,
        }

    def spec_options(self, hf: HfConfig) -> dict[str, Any]:
        """See ``Mixer``; Megatron's switch for the latents' norms."""
        return {"multi_latent_attention": True, "qk_layernorm": True}

    def put_into(self, layer: Any, hf: HfConfig, *, is_fused: bool) -> None:
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.identity_op import IdentityOp

        from bapo_megatron.policy import local_layers

        class LatentSelfAttention(multi_latent_attention.MLASelfAttention):
            """With exactly its spec's norms; Megatron would norm queries that have no latent."""

            def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
                names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
                linears = {name: getattr(submodules, name) for name in names}
                return {**linears, "q_layernorm": IdentityOp, "kv_layernorm": IdentityOp}

        layer.submodules.self_attention.module = LatentSelfAttention
        if is_fused:
            return
        attention = layer.submodules.self_attention.submodules
        layer.submodules.input_layernorm = local_layers.RMSNorm
        attention.core_attention = local_layers.PackedCausalAttention
        up, down = local_layers.NormColumnParallelLinear, local_layers.ReplicatedLinear
        attention.linear_q_up_proj = attention.linear_kv_up_proj = up
        attention.linear_q_down_proj = attention.linear_kv_down_proj = down
        multi_latent_attention.TELinear = down  # the name that Megatron compares with

    def flops(self, hf: HfConfig) -> tuple[int, int]:
        return 0, hf.num_heads * (hf.head_dim + self.value_dim)

    def cached_channels(self, hf: HfConfig) -> int:
        """See ``Mixer``: the latent and the rotated key."""
        return self.key_value_rank + self.rotary_dim

    def saved(self, share: Share, *, is_recomputed: bool) -> dict[str, float]:
        """See ``Mixer``: it pads values to the width of keys, and cuts its output."""
        hf, heads = share.hf, share.hf.num_heads
        norms = sum(share.norm(rank) for rank in (self.query_rank, self.key_value_rank) if rank)
        if share.is_local:  # the input is a part of what has the rotated key too
            norms += share.element_bytes * self.rotary_dim / share.sequence_ranks
        query = share.divided(heads * hf.head_dim)
        tensors: dict[str, float] = {
            "latents and their norms": norms,
            "cosines and sines": 2 * self.rotary_dim * share.element_bytes,
            "queries, keys": 2 * query,
            "values": share.divided(heads * self.value_dim) if is_recomputed else query,
            "attention's output": share.divided(heads * self.value_dim),
        }
        if not is_recomputed:
            tensors["attention's output, by sequence"] = query  # as wide as keys
            tensors["log-sums of attention"] = FLOAT32_BYTES * (heads // share.tensor)
        return tensors
