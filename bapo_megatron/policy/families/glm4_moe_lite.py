"""GLM-4.7-Flash: DeepSeek-V3's layers, with the dense ones named one by one."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from bapo_megatron.policy.architecture import Family, HfConfig
from bapo_megatron.policy.families.config_json import check_layers
from bapo_megatron.policy.families.deepseek_v3 import DeepseekV3Json, understand_deepseek
from bapo_megatron.policy.families.layers import decoder_layer, is_draft


class Glm4MoeLiteJson(DeepseekV3Json):
    """The fields of config.json."""

    first_k_dense_replace: Annotated[int, Field(ge=0)] = 1
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None


def _understand(glm: Glm4MoeLiteJson) -> HfConfig:
    common, kinds = understand_deepseek(glm), glm.mlp_layer_types
    if kinds is None or common.experts is None:
        return common
    check_layers("mlp_layer_types", kinds, common.num_layers)
    dense = frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
    return replace(common, experts=replace(common.experts, dense_layers=dense))


FAMILIES = (
    Family(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        Glm4MoeLiteJson,
        _understand,
        decoder_layer,
        is_draft,
    ),
)
