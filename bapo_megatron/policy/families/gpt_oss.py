"""gpt-oss: attention sinks, a sliding window in every other layer, experts with biases.

Files have the experts of a layer in four tensors, inputs before outputs, with the columns of gate
and up interleaved. Published checkpoints are MXFP4, which has to be dequantized before.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bapo_megatron.policy.architecture import (
    Experts,
    Family,
    HfConfig,
    LayerWeights,
    Positive,
    Weight,
)
from bapo_megatron.policy.families.config_json import (
    ConfigJson,
    Count,
    check_layers,
    understand_common,
)
from bapo_megatron.policy.families.layers import EXPERTS
from bapo_megatron.policy.mixers.attention import Attention

_ROUTER = (
    EXPERTS[0],
    Weight("mlp.router.weight", ("mlp.router.weight",), ("experts hidden",)),
    Weight("mlp.router.bias", ("mlp.router.bias",), ("experts",)),
)
_FC1, _FC2 = "mlp.experts.{expert}.linear_fc1", "mlp.experts.{expert}.linear_fc2"
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_EXPERT = tuple(
    replace(weight, is_stacked=True)
    for weight in (
        Weight(f"{_FC1}.weight", (_GATE_UP,), ("expert+expert hidden",), 0, "interleaved"),
        Weight(f"{_FC1}.bias", (f"{_GATE_UP}_bias",), ("expert+expert",), 0, "interleaved"),
        Weight(f"{_FC2}.weight", (_DOWN,), ("hidden expert",), 1),
        Weight(f"{_FC2}.bias", (f"{_DOWN}_bias",), ("hidden",)),
    )
)


class GptOssJson(ConfigJson):
    """The fields of config.json."""

    default_rope_theta: ClassVar[float] = 150_000.0
    attention_bias: Literal[True] = True
    layer_types: list[Literal["sliding_attention", "full_attention"]]  # type: ignore[assignment]
    sliding_window: Count
    num_local_experts: Count
    num_experts_per_tok: Count
    experts_per_token: int | None = None
    """The older name of ``num_experts_per_tok``, beside it."""
    swiglu_alpha: Annotated[float, Field(ge=1.702, le=1.702)] = 1.702
    swiglu_limit: Positive = 7.0
    initial_context_length: int | None = None
    """The ``original_max_position_embeddings`` of YaRN once more."""


def _understand(fields: GptOssJson) -> HfConfig:
    common = understand_common(fields, optional_biases=("qkv", "output"))
    check_layers("layer_types", fields.layer_types, common.num_layers)
    if fields.experts_per_token not in (None, fields.num_experts_per_tok):
        raise ValueError(
            f"'experts_per_token' must be 'num_experts_per_tok' {fields.num_experts_per_tok}, got "
            f"{fields.experts_per_token}"
        )
    windows = {"sliding_attention": fields.sliding_window, "full_attention": None}
    experts = Experts(
        num=fields.num_local_experts,
        per_token=fields.num_experts_per_tok,
        intermediate_size=fields.intermediate_size,
        swiglu_limit=fields.swiglu_limit,
        has_linear_biases=True,
    )
    mixers = tuple(Attention(windows[kind], has_sinks=True) for kind in fields.layer_types)
    return replace(common, mixers=mixers, experts=experts)


def _layer(hf: HfConfig, layer: int) -> LayerWeights:
    return LayerWeights((*hf.mixers[layer].weights(hf), *_ROUTER), _EXPERT)


FAMILIES = (Family("gpt_oss", "GptOssForCausalLM", GptOssJson, _understand, _layer),)
