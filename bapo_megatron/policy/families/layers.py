"""The weights of the layers that families are built of."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

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
GATED_QKV = replace(ATTENTION[1], shapes=("query+gate hidden", "key hidden", "key hidden"))
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


_DELTA_SECTIONS = ("query", "key", "value", "z", "beta", "alpha")


def delta_input(hf: Mapping[str, str], form: Literal["sections", "sections_by_head"]) -> Weight:
    """Return the fused input projection of a gated delta net.

    ``hf`` are shapes by name of the Hugging Face tensors, whose sections are those of Megatron:
    query, key, value, output gate, beta, alpha.
    """
    names = tuple(f"linear_attn.{name}.weight" for name in hf)
    shapes = tuple(f"{rows} hidden" for rows in hf.values())
    megatron = "self_attention.in_proj.weight"
    return Weight(megatron, names, shapes, 0, form, sections=_DELTA_SECTIONS)


DELTA_NET = (
    Weight("self_attention.in_proj.layer_norm_weight", ("input_layernorm.weight",), ("hidden",)),
    Weight(
        "self_attention.conv1d.weight",
        ("linear_attn.conv1d.weight",),
        ("delta_key+delta_key+delta_value one kernel",),
        0,
        "sections",
        sections=_DELTA_SECTIONS[:3],
    ),
    Weight("self_attention.dt_bias", ("linear_attn.dt_bias",), ("delta_heads",), 0),
    Weight("self_attention.A_log", ("linear_attn.A_log",), ("delta_heads",), 0),
    Weight("self_attention.out_norm.weight", ("linear_attn.norm.weight",), ("delta_head",)),
    Weight(
        "self_attention.out_proj.weight",
        ("linear_attn.out_proj.weight",),
        ("hidden delta_value",),
        1,
    ),
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
GATED_SHARED_EXPERT = (
    *_swiglu("mlp.shared_experts", "mlp.shared_expert", "shared"),
    Weight("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",), ("one hidden",)),
)
EXPERT = _swiglu("mlp.experts.{expert}", "mlp.experts.{expert}", "expert")


def decoder_layer(hf: HfConfig, layer: int) -> LayerWeights:
    """Grouped-query attention, and a gated MLP or experts, under the names that most models use."""
    biases = (*([QKV_BIAS] if hf.qkv_bias else []), *([OUTPUT_BIAS] if hf.output_bias else []))
    norm, qkv, projection = ATTENTION
    attention = (norm, GATED_QKV if hf.output_gate else qkv, projection)
    mlp = feed_forward(hf, layer)
    extra = (*biases, *(QK_NORM if hf.qk_norm else ()))
    return LayerWeights((*attention, *mlp.shared, *extra), mlp.expert)


def hybrid_layer(hf: HfConfig, layer: int, delta_input: Weight) -> LayerWeights:
    """As ``decoder_layer``, or a gated delta net in place of attention."""
    if not hf.has_delta_net(layer):
        return decoder_layer(hf, layer)
    mlp = feed_forward(hf, layer)
    return LayerWeights((delta_input, *DELTA_NET, *mlp.shared), mlp.expert)


def feed_forward(hf: HfConfig, layer: int) -> LayerWeights:
    """Return the weights of a gated MLP, or of a router and experts."""
    if hf.experts is None or not hf.has_experts(layer):
        return LayerWeights(DENSE_MLP)
    bias = [EXPERT_BIAS] if hf.experts.has_bias else []
    shared: tuple[Weight, ...] = ()
    if hf.experts.shared_intermediate_size:
        shared = GATED_SHARED_EXPERT if hf.experts.has_shared_gate else SHARED_EXPERTS
    return LayerWeights((*EXPERTS, *bias, *shared), EXPERT)


def is_draft(hf: HfConfig, name: str) -> bool:
    """Return whether a tensor is of a draft layer, which published checkpoints end with."""
    return name.startswith("model.layers.") and int(name.split(".")[2]) >= hf.num_layers
