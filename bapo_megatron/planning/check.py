"""A plan's parameters against those of the model that Megatron builds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bapo_megatron.planning.parameters import chunk_parameters

if TYPE_CHECKING:
    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.planning.layout import Layout
    from bapo_megatron.policy.hf_config import HfConfig


def check_parameters(config: RunConfig, hf: HfConfig, layout: Layout) -> None:
    """Build every stage on the meta device and compare.

    Imports Megatron, and leaves this process unfit for a GPU.

    Raises:
        RuntimeError: A number differs: a defect of the plan.
    """
    from bapo_megatron.policy.quiet import ignore_known_warnings

    ignore_known_warnings()  # before megatron is imported
    from bapo_megatron.policy.meta_model import stage_parameters

    for stage in range(layout.pipeline):
        chunks = stage_parameters(hf, config.model, config.parallel, stage)
        built = [sum(map(math.prod, shapes.values())) for shapes in chunks]
        planned = [chunk_parameters(hf, layout, stage, chunk) for chunk in range(layout.virtual)]
        if built != planned:
            raise RuntimeError(
                f"stage {stage}: Megatron builds {built} parameters, the plan counts {planned}"
            )
