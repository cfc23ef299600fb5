"""Gemma 3: layers with a window and rotary frequencies of their own, norms around both parts.

Published checkpoints above 1B (``gemma3``) have a vision tower and its projector, which are not
trained; exports have them as they were.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from bapo_megatron.policy.architecture import Family, HfConfig, LinearRope, Positive
from bapo_megatron.policy.families.config_json import (
    ConfigJson,
    Count,
    RopeJson,
    alternating,
    check_layers,
    understand_common,
)
from bapo_megatron.policy.families.layers import decoder_layer
from bapo_megatron.policy.mixers.attention import Attention

DEFAULT_LOCAL_ROPE_THETA = 10_000.0


class LayerRopesJson(BaseModel):
    """Rotary embeddings by the type of a layer, as transformers 5 writes them."""

    model_config = ConfigDict(strict=True, extra="forbid")
    full_attention: RopeJson = RopeJson()
    sliding_attention: RopeJson = RopeJson()


class Gemma3Json(ConfigJson):
    """The fields of config.json; published files leave out what transformers has as a default."""

    default_rope_theta: ClassVar[float] = 1_000_000.0
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)] = 262_208
    num_attention_heads: Count = 8
    num_key_value_heads: Count = 4
    head_dim: Count = 256
    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 31)] = 131_072
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = True
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    query_pre_attn_scalar: Positive = 256
    sliding_window: Annotated[int, Field(ge=1)] = 4096
    sliding_window_pattern: Count = 6
    layer_types: list[Literal["sliding_attention", "full_attention"]] | None = None  # type: ignore[assignment]
    rope_local_base_freq: Positive | None = None
    rope_parameters: LayerRopesJson | None = None  # type: ignore[assignment]


def _understand(gemma: Gemma3Json) -> HfConfig:
    ropes = gemma.rope_parameters or LayerRopesJson()
    common = understand_common(
        gemma.model_copy(update={"rope_parameters": ropes.full_attention}), qk_norm=True
    )
    if not isinstance(common.rope_scaling, LinearRope | None):
        raise ValueError(f"'rope_type' must be default or linear, got {common.rope_scaling}")
    local = ropes.sliding_attention
    local_thetas = {base for base in (gemma.rope_local_base_freq, local.rope_theta) if base}
    if local.rope_type != "default" or len(local_thetas) > 1:
        raise ValueError(
            "layers with a window must have rope_type default and one base, got "
            f"{local.rope_type} and {local_thetas}"
        )
    kinds = gemma.layer_types or alternating(
        "sliding_attention", "full_attention", gemma.sliding_window_pattern, common.num_layers
    )
    check_layers("layer_types", kinds, common.num_layers)
    return replace(
        common,
        mixers=tuple(
            Attention(gemma.sliding_window if kind == "sliding_attention" else None)
            for kind in kinds
        ),
        local_rope_theta=max(local_thetas, default=DEFAULT_LOCAL_ROPE_THETA),
        attention_scale=gemma.query_pre_attn_scalar**-0.5,
        zero_centered_norms=True,
        norms_after=True,
        activation="gelu",
        scales_embeddings=True,
        tensor_prefix="language_model.model" if gemma.model_type == "gemma3" else "model",
    )


FAMILIES = (
    Family("gemma3_text", "Gemma3ForCausalLM", Gemma3Json, _understand, decoder_layer),
    Family(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        Gemma3Json,
        _understand,
        decoder_layer,
        lambda hf, name: name.startswith(("vision_tower.", "multi_modal_projector.")),
    ),
)
