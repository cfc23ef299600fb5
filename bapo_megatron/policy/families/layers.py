"""The weights of the layers that families are built of."""

from bapo_megatron.policy.families.base import HfConfig, LayerWeights, Weight

ATTENTION = (
    Weight("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), ("hidden",)),
    Weight(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        ("query hidden", "key hidden", "key hidden"),
        0,
        "qkv",
    ),
    Weight("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), ("hidden query",), 1),
)
QKV_BIAS = Weight(
    "self_attention.linear_qkv.bias",
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ("query", "key", "key"),
    0,
    "qkv",
)
OUTPUT_BIAS = Weight("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",), ("hidden",))
QK_NORM = (
    Weight("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), ("head",)),
    Weight("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), ("head",)),
)


def _swiglu(megatron: str, hf: str, channels: str) -> tuple[Weight, Weight]:
    """A gated MLP: gate and up as one product, and down."""
    return (
        Weight(
            f"{megatron}.linear_fc1.weight",
            (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"),
            (f"{channels} hidden", f"{channels} hidden"),
            0,
            "gate_up",
        ),
        Weight(
            f"{megatron}.linear_fc2.weight", (f"{hf}.down_proj.weight",), (f"hidden {channels}",), 1
        ),
    )


_NORM_NAMES = ("post_attention_layernorm.weight",)
DENSE_MLP = (
    Weight("mlp.linear_fc1.layer_norm_weight", _NORM_NAMES, ("hidden",)),
    *_swiglu("mlp", "mlp", "intermediate"),
)
EXPERTS = (
    Weight("pre_mlp_layernorm.weight", _NORM_NAMES, ("hidden",)),
    Weight("mlp.router.weight", ("mlp.gate.weight",), ("experts hidden",)),
)
EXPERT_BIAS = Weight(
    "mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",), ("experts",), is_buffer=True
)
SHARED_EXPERTS = _swiglu("mlp.shared_experts", "mlp.shared_experts", "shared")
EXPERT = _swiglu("mlp.experts.{expert}", "mlp.experts.{expert}", "expert")


def decoder_layer(hf: HfConfig, layer: int) -> LayerWeights:
    """Grouped-query attention, and a gated MLP or experts, under the names that most models use."""
    biases = (*([QKV_BIAS] if hf.qkv_bias else []), *([OUTPUT_BIAS] if hf.output_bias else []))
    mlp = feed_forward(hf, layer)
    extra = (*biases, *(QK_NORM if hf.qk_norm else ()))
    return LayerWeights((*ATTENTION, *mlp.shared, *extra), mlp.expert)


def feed_forward(hf: HfConfig, layer: int) -> LayerWeights:
    """Return the weights of a gated MLP, or of a router and experts."""
    if hf.experts is None or not hf.has_experts(layer):
        return LayerWeights(DENSE_MLP)
    bias = [EXPERT_BIAS] if hf.experts.has_bias else []
    shared = SHARED_EXPERTS if hf.experts.shared_intermediate_size else ()
    return LayerWeights((*EXPERTS, *bias, *shared), EXPERT)


def is_draft(hf: HfConfig, name: str) -> bool:
    """Return whether a tensor is of a draft layer, which published checkpoints end with."""
    return name.startswith("model.layers.") and int(name.split(".")[2]) >= hf.num_layers
