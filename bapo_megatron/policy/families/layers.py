"""The weights of the layers that families are built of."""

from dataclasses import replace

from bapo_megatron.policy.architecture import HfConfig, LayerWeights, Weight


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
NORM_AFTER = Weight(
    "mlp.linear_fc2.post_norm.weight", ("post_feedforward_layernorm.weight",), ("hidden",)
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
    """A token mixer, and an MLP or experts, under the names that most models use."""
    mlp = feed_forward(hf, layer) if hf.has_mlp(layer) else LayerWeights(())
    if not hf.is_gated:
        mlp = LayerWeights(_without_gate(mlp.shared), _without_gate(mlp.expert))
    return LayerWeights((*hf.mixers[layer].weights(hf), *mlp.shared), mlp.expert)


def feed_forward(hf: HfConfig, layer: int) -> LayerWeights:
    """Return the weights of a gated MLP, or of a router and experts."""
    if hf.experts is None or not hf.has_experts(layer):
        norm, *linears = DENSE_MLP
        norms = [norm] if hf.norms_before else []
        if hf.norms_after:  # attention's is what most models call the one before the MLP
            norms = [replace(n, hf=("pre_feedforward_layernorm.weight",)) for n in norms]
            linears.append(NORM_AFTER)
        return LayerWeights((*norms, *linears))
    bias = [EXPERT_BIAS] if hf.experts.has_bias else []
    shared: tuple[Weight, ...] = ()
    if hf.experts.shared_intermediate_size:
        shared = GATED_SHARED_EXPERT if hf.experts.has_shared_gate else SHARED_EXPERTS
    return LayerWeights((*EXPERTS, *bias, *shared), EXPERT)


def _without_gate(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    return tuple(
        replace(w, hf=w.hf[1:], shapes=w.shapes[1:], form="plain") if w.form == "gate_up" else w
        for w in weights
    )


def is_draft(hf: HfConfig, name: str) -> bool:
    """Return whether a tensor is of a draft layer, which published checkpoints end with."""
    return name.startswith("model.layers.") and int(name.split(".")[2]) >= hf.num_layers
