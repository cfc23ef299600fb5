"""The objectives that have names: one line each (docs/objectives.md)."""

import math
from collections.abc import Callable

from bapo_megatron.algorithm.bapo import Bapo
from bapo_megatron.algorithm.clip import FixedClip
from bapo_megatron.algorithm.histograms import M2po
from bapo_megatron.algorithm.objective import Objective
from bapo_megatron.algorithm.response_losses import Gmpo, Gspo, Opsm
from bapo_megatron.algorithm.token_losses import (
    Dcpo,
    TokenLoss,
    aspo,
    ce_gppo,
    cispo,
    dppo_tv,
    reinforce,
    sapo,
    topr,
)
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.ops.backend import Kernels

BUILT_IN: dict[str, Callable[[AlgorithmConfig, Kernels], Objective]] = {
    "bapo": lambda c, kernels: Bapo(c.bapo, c.dual_clip, kernels),
    "clip": lambda c, _: FixedClip(c.fixed.low, c.fixed.high, c.dual_clip),
    "none": lambda c, _: FixedClip(0.0, math.inf, c.dual_clip),
    "reinforce": lambda c, _: TokenLoss(reinforce),
    "cispo": lambda c, _: TokenLoss(lambda tokens: cispo(tokens, c.cispo)),
    "sapo": lambda c, _: TokenLoss(lambda tokens: sapo(tokens, c.sapo)),
    "ce_gppo": lambda c, _: TokenLoss(
        lambda tokens: ce_gppo(tokens, c.ce_gppo, c.fixed, c.dual_clip)
    ),
    "aspo": lambda c, _: TokenLoss(lambda tokens: aspo(tokens, c.aspo, c.fixed)),
    "topr": lambda c, _: TokenLoss(topr),
    "dppo_tv": lambda c, _: TokenLoss(lambda tokens: dppo_tv(tokens, c.dppo_tv)),
    "dcpo": lambda c, _: Dcpo(c.dcpo, c.dual_clip),
    "gspo": lambda c, _: Gspo(c.gspo, c.dual_clip),
    "gmpo": lambda c, _: Gmpo(c.gmpo),
    "opsm": lambda c, _: Opsm(c.fixed.low, c.fixed.high, c.dual_clip, c.opsm.delta),
    "m2po": lambda c, _: M2po(c.m2po, c.dual_clip),
}
"""Makes the objective of each name in ``config.objectives.OBJECTIVES``."""
