"""The fields of config.json that families share; a family reads others, the rest is refused."""

import math
from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from bapo_megatron.policy.architecture import HfConfig, LinearRope, Llama3Rope, Positive, YarnRope
from bapo_megatron.policy.mixers.attention import Attention
from bapo_megatron.runtime.calls import decode, shown_value

HARMLESS_FIELDS = (
    # For a window that use_sliding_window and layer_types rule out.
    *("max_window_layers", "_sliding_window_pattern"),
    # Training from scratch, generation, and the file itself.
    *("initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("unk_token_id", "is_llama_config", "transformers.js_config", "_model_name_or_path"),
    *("dtype", "torch_dtype", "transformers_version", "_name_or_path", "id2label", "label2id"),
    *("problem_type", "return_dict", "output_attentions", "output_hidden_states"),
    *("_attn_implementation_autoset", "unsloth_fixed", "unsloth_version"),
    *("router_aux_loss_coef", "output_router_logits", "cache_implementation"),
    # Second names of Nemotron-H's fields, and Mamba's initialization and kernels.
    *("rms_norm_eps", "norm_eps", "mamba_num_groups", "mamba_state_dim"),
    *("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual", "expand"),
    *("use_mamba_kernels", "chunk_size", "num_logits_to_keep", "moe_shared_expert_overlap"),
    # Vision towers and draft layers, whose tensors families name, or are refused.
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id"),
    *("vision_end_token_id", "mm_tokens_per_image", "boi_token_index", "eoi_token_index"),
    *("image_token_index", "num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mtp_transformer_layers"),
    *("mtp_layers_block_type", "use_mtp"),
    # How DeepSeek trained, and of layers that no MiniMax-M2 has.
    *("ep_size", "aux_loss_alpha", "seq_aux", "shared_moe_mode", "mlp_intermediate_size"),
    "layernorm_linear_attention_beta",
)
"""Fields that do not change what the model computes."""

Count = Annotated[int, Field(ge=1, le=1 << 12)]
Channels = Annotated[int, Field(ge=1, le=1 << 20)]
Share = Annotated[float, Field(gt=0, le=1)]
ExpertsPerToken = Annotated[int, Field(ge=2, le=1 << 12)]
"""A router with sigmoid scores needs two: Megatron does not normalise the weight of one expert."""


class RopeJson(BaseModel):
    """The fields read from ``rope_parameters`` or ``rope_scaling``."""

    model_config = ConfigDict(strict=True, extra="allow")
    rope_theta: Positive | None = None
    rope_type: Literal["default", "linear", "llama3", "yarn"] = Field(
        "default", validation_alias=AliasChoices("rope_type", "type")
    )
    partial_rotary_factor: Share | None = None
    attention_factor: Positive | None = None

    def scaling(self, max_position_embeddings: int) -> LinearRope | Llama3Rope | YarnRope | None:
        """Return the scaling of frequencies.

        Raises:
            ValueError: A field of it is missing, or engines would understand it differently.
        """
        fields = {name: value for name, value in (self.model_extra or {}).items() if name != "type"}
        if self.rope_type == "default":
            return None
        if self.rope_type != "yarn":
            return decode({"linear": LinearRope, "llama3": Llama3Rope}[self.rope_type], fields)
        original = {"original_max_position_embeddings": max_position_embeddings}
        yarn = decode(YarnRope, original | fields)
        actual, expected = self.attention_factor, yarn.attention_factor
        if actual is not None and not math.isclose(actual, expected, rel_tol=1e-6):
            raise ValueError(
                f"'attention_factor' must be {expected:.7g}, which follows from 'factor' and "
                f"'mscale' and is what SGLang uses, got {actual}"
            )
        return yarn


class ConfigJson(BaseModel):
    """The fields read from config.json.

    No other field may be on, except ``HARMLESS_FIELDS`` and ``model.ignored_config_fields``.
    Limits are far above any model, so that a damaged file is refused before it takes all memory.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    default_rope_theta: ClassVar[float] = 10_000.0
    """Base of rotary embeddings where config.json gives none, as in transformers."""
    model_type: str
    architectures: list[str] | None = None
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)]
    hidden_size: Annotated[int, Field(ge=1, le=1 << 17)]
    intermediate_size: Channels
    num_hidden_layers: Annotated[int, Field(ge=1, le=1 << 10)]
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 31)]
    rms_norm_eps: Positive
    tie_word_embeddings: bool = False
    rope_theta: Positive | None = None
    rope_parameters: RopeJson | None = None
    rope_scaling: RopeJson | None = None
    hidden_act: Literal["silu"] = "silu"
    partial_rotary_factor: Share | None = None
    pretraining_tp: Literal[1] | None = None
    layer_types: list[Literal["full_attention"]] | None = None
    attention_bias: bool | None = None
    sliding_window: int | None = None


def understand_common(
    fields: ConfigJson,
    *,
    optional_biases: Collection[str] = (),
    qkv_bias: bool = False,
    qk_norm: bool = False,
    rotary_share: float = 1.0,
) -> HfConfig:
    """Return the architecture that the shared fields describe, without experts.

    ``optional_biases`` (qkv, output) are those that ``attention_bias`` turns on; with none it must
    be off. ``rotary_share`` is the family's, which config.json may only confirm.

    Raises:
        ValueError: Fields contradict each other, or name what is not supported.
    """
    if fields.attention_bias and not optional_biases:
        raise ValueError(
            f"'attention_bias' must be false with model_type {fields.model_type}, got true"
        )
    biases = optional_biases if fields.attention_bias else ()
    num_heads = fields.num_attention_heads
    num_kv_heads = fields.num_key_value_heads or num_heads
    head_dim = fields.head_dim or fields.hidden_size // num_heads
    if num_heads % num_kv_heads or not head_dim:
        raise ValueError(
            f"'num_attention_heads' must be a multiple of 'num_key_value_heads' {num_kv_heads} and "
            f"at most 'hidden_size' {fields.hidden_size}, got {num_heads}"
        )
    # transformers 5 writes rope_parameters, older ones two fields; readers differ in which counts.
    ropes = [rope for rope in (fields.rope_parameters, fields.rope_scaling) if rope]
    bases = [fields.rope_theta, *(rope.rope_theta for rope in ropes)]
    thetas = {theta for theta in bases if theta is not None} or {fields.default_rope_theta}
    positions = fields.max_position_embeddings
    scalings = {rope.scaling(positions) for rope in ropes if rope.model_fields_set}
    if len(thetas) > 1 or len(scalings) > 1:
        raise ValueError(
            "'rope_theta', 'rope_parameters' and 'rope_scaling' must give one base and one "
            f"scaling, got {shown_value(sorted(thetas))} and {shown_value(list(scalings))}"
        )
    for place, part in (
        ("", fields),
        ("rope_parameters.", fields.rope_parameters),
        ("rope_scaling.", fields.rope_scaling),
    ):
        if part and part.partial_rotary_factor not in (None, rotary_share):
            raise ValueError(
                f"'{place}partial_rotary_factor' must be {rotary_share:g} with model_type "
                f"{fields.model_type}, got {part.partial_rotary_factor:g}"
            )
    return HfConfig(
        model_type=fields.model_type,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        mixers=(Attention(),) * fields.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.rms_norm_eps,
        max_position_embeddings=fields.max_position_embeddings,
        rope_theta=thetas.pop(),
        rope_scaling=scalings.pop() if scalings else None,
        tied_embeddings=fields.tie_word_embeddings,
        qkv_bias=qkv_bias or "qkv" in biases,
        qk_norm=qk_norm,
        output_bias="output" in biases,
        rotary_share=rotary_share,
    )


def alternating(often: str, every: str, interval: int, num_layers: int) -> list[str]:
    """Return a kind per layer: each ``interval``-th is ``every``, the others are ``often``."""
    return [often if (layer + 1) % interval else every for layer in range(num_layers)]


def check_layers(name: str, kinds: Sequence[str], num_layers: int) -> None:
    """Raise a ``ValueError`` unless the field ``name`` has an entry per layer."""
    if len(kinds) != num_layers:
        raise ValueError(f"'{name}' must have {num_layers} entries, got {len(kinds)}")


def refuse_unknown(fields: ConfigJson) -> None:
    """Raise a ``ValueError`` for a field that may change the model and that nothing here reads.

    Such as biases, windows, dropout, quantization.
    """
    extra: dict[str, Any] = fields.model_extra or {}
    if isinstance(quantization := extra.get("quantization_config"), dict):
        method, how = quantization.get("quant_method"), "dequantized, and save it in bfloat16"
        if method == "mxfp4":
            how = (
                "quantization_config=Mxfp4Config(dequantize=True) and dtype='bfloat16', and save "
                "it with save_original_format=False"
            )
        raise ValueError(
            "'quantization_config' must be absent: quantized weights are not trained, got "
            f"{shown_value(method)}; load the model with transformers, {how}"
        )
    for name, value in extra.items():
        if name not in HARMLESS_FIELDS and value:
            raise ValueError(
                f"{name!r} is unknown and may change what the model computes, got "
                f"{shown_value(value)}; if it does not, name it in model.ignored_config_fields "
                "(convert and init: --ignore-field)"
            )
