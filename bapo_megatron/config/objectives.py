"""The settings of the objectives, one section each (docs/objectives.md).

Bounds are importance ratios, not distances from 1.
"""

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from bapo_megatron.config.section import Section

OBJECTIVES = (
    "bapo",
    "clip",
    "none",
    "reinforce",
    "cispo",
    "sapo",
    "ce_gppo",
    "aspo",
    "topr",
    "dppo_tv",
    "dcpo",
    "gspo",
    "gmpo",
    "opsm",
    "m2po",
)
"""Names that ``algorithm.objective`` takes; ``algorithm.built_in`` makes the objectives."""

DUAL_CLIPPED = ("bapo", "clip", "none", "ce_gppo", "dcpo", "gspo", "opsm", "m2po")
"""Those that ``algorithm.dual_clip`` is for."""

ADVANTAGES = ("grpo", "grpo_no_std", "rloo", "opo", "reinforce_pp", "reinforce_pp_baseline")
"""Names that ``algorithm.advantage`` takes."""

SHIFTED = ("grpo_no_std", "rloo", "opo")
"""Those whose baseline ``algorithm.baseline_shift`` moves: they are R minus a baseline."""


Speculate = Literal["auto", "never", "always"]
"""Whether the loss pass runs with a predicted decision (docs/algorithm.md)."""


class RangeConfig(Section):
    """The movable range of one clip bound, in importance ratios."""

    start: float
    """First candidate."""
    max: float
    """Upper limit of the candidates."""
    step: float = Field(gt=0)
    """Distance between candidates."""


BAPO_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "target": 0.4,
        "lower": {"start": 0.6, "max": 0.9, "step": 0.02},
        "upper": {"start": 1.2, "max": 3.0, "step": 0.05},
        "order": "upper_first",
        "measure": "share",
        "scope": "update",
    },
    "recipe": {
        "target": 1.0,
        "lower": {"start": 0.6, "max": 0.8, "step": 0.05},
        "upper": {"start": 1.2, "max": 2.0, "step": 0.05},
        "order": "lower_first",
        "measure": "ratio",
        "scope": "micro_batch",
    },
}


class BapoConfig(Section):
    """The bound search of BAPO (docs/algorithm.md). ``preset`` fills what is not given."""

    preset: Literal["paper", "recipe"] = "paper"
    """``paper``: Algorithm 1 as published. ``recipe``: the authors' released code."""
    target: float = Field(gt=0)
    """ρ0: the positive share (or ratio) that the search tries to reach."""
    lower: RangeConfig
    """Range of c_low."""
    upper: RangeConfig
    """Range of c_high."""
    order: Literal["upper_first", "lower_first"]
    """Which bound moves first."""
    contribution: Literal["surrogate", "gradient"] = "surrogate"
    """``surrogate``: Eq. 8, clipped values. ``gradient``: Eq. 5, only unclipped tokens."""
    measure: Literal["share", "ratio"]
    """``share``: P / (P + N) ≥ target. ``ratio``: P / N ≥ target."""
    weight: Literal["uniform", "behaviour_prob"] = "uniform"
    """Token weight: 1, or π_rollout(y) (the literal reading of Eq. 8)."""
    scope: Literal["update", "micro_batch"]
    """Bounds for each update or for each micro-batch."""
    speculate: Speculate = "auto"
    """Bounds of an update follow from its log-probs. ``never``: a forward-only pass finds them
    before the loss pass. ``always``: the loss pass runs with predicted bounds and finds the
    log-probs itself; where the bounds prove wrong, it runs again. ``auto``: as long as that takes
    less time, and both passes give the same log-probs. Results are equal."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("preset")  # checked later, so it may be of any type
        preset = BAPO_PRESETS[name if name in list(BAPO_PRESETS) else "paper"]
        filled = {**preset, **given}
        for name in ("lower", "upper"):
            if isinstance(given.get(name), dict):
                filled[name] = {**preset[name], **given[name]}
        return filled

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        low, high = self.lower, self.upper
        if self.speculate == "always" and self.scope == "micro_batch":
            raise ValueError(
                "speculate must be auto or never with scope: micro_batch, got always: bounds of a "
                "micro-batch are known before its loss; leave it out"
            )
        if not 0.5 <= low.start <= low.max <= 1:
            raise ValueError(
                f"needs 0.5 <= lower.start <= lower.max <= 1, got {low.start} and {low.max}"
            )
        if not 1 <= high.start <= high.max < 256:
            raise ValueError(
                f"needs 1 <= upper.start <= upper.max < 256, got {high.start} and {high.max}"
            )
        limit = 1 if self.measure == "share" else 256
        if self.target >= limit:
            raise ValueError(
                f"target must be below {limit} with measure: {self.measure}, got {self.target}"
            )
        for name, side in (("lower", low), ("upper", high)):
            candidates = math.floor((side.max - side.start) / side.step + 1e-6) + 1
            if candidates > 256:  # the table of the search stays small (csrc/README.md)
                raise ValueError(
                    f"{name} has {candidates} candidates from {side.start} to {side.max} by "
                    f"{side.step}, at most 256 are searched; raise {name}.step"
                )
        return self


class FixedClipConfig(Section):
    """Bounds of ``clip``, ``ce_gppo``, ``aspo`` and ``opsm``.

    [0.8, 1.2] is GRPO and PPO, [0.8, 1.28] is clip-higher.
    """

    low: float = Field(0.8, ge=0, le=1)
    """Lower bound of the importance ratio."""
    high: float = Field(1.2, ge=1)
    """Upper bound of the importance ratio."""


class CispoConfig(Section):
    """CISPO limits the weight r of a token, and leaves it its gradient."""

    low: float = Field(0.0, ge=0, le=1)
    """Smallest weight; 0: no lower limit."""
    high: float = Field(5.0, ge=1)
    """Largest weight."""


class SapoConfig(Section):
    """SAPO turns clipping into a smooth gate; higher temperatures close it faster."""

    positive: float = Field(1.0, gt=0)
    """τ where A > 0."""
    negative: float = Field(1.05, gt=0)
    """τ where A < 0."""


class CeGppoConfig(Section):
    """CE-GPPO gives clipped tokens a gradient of fixed size; ``fixed`` has the bounds."""

    beta_low: float = Field(0.75, ge=0)
    """Gradient of tokens below the lower bound, in multiples of that bound."""
    beta_high: float = Field(1.0, ge=0)
    """Gradient of tokens above the upper bound, in multiples of that bound."""


class AspoConfig(Section):
    """ASPO turns the ratio of positive tokens over; ``fixed`` has the bounds."""

    cap: float = Field(3.0, ge=1)
    """Largest weight: of 1/r where A > 0, of r where A < 0."""


class DppoTvConfig(Section):
    """DPPO leaves out tokens whose probability has moved too far."""

    delta: float = Field(0.15, gt=0, le=1)
    """How far the probability of a token may move with its advantage."""
    cap: float = Field(1e4, ge=1)
    """Largest weight r."""


class DcpoConfig(Section):
    """DCPO gives unlikely tokens wider bounds."""

    epsilon_low: float = Field(0.16, ge=0)
    """Width of the lower bound."""
    epsilon_high: float = Field(0.2, ge=0)
    """Width of the upper bound."""
    max_high: float = Field(10.0, ge=1)
    """Limit of the upper bound."""


class GspoConfig(Section):
    """Bounds of GSPO's s, the geometric mean of r over a response."""

    low: float = Field(0.9997, ge=0, le=1)
    """Lower bound."""
    high: float = Field(1.0004, ge=1)
    """Upper bound."""


class GmpoConfig(Section):
    """Bounds of ℓ − μ of each token in GMPO's geometric mean."""

    log_low: float = Field(-0.4, le=0)
    """Lower bound where A < 0."""
    log_high: float = Field(0.4, ge=0)
    """Upper bound where A > 0."""


class OpsmConfig(Section):
    """OPSM leaves out negative responses that are off-policy; ``fixed`` has the bounds of r."""

    delta: float = Field(1e-4, ge=0)
    """Largest mean of μ − ℓ of a negative response that trains."""


class M2poConfig(Section):
    """M2PO bounds r so that the second moment of ℓ − μ keeps to a budget."""

    budget: float = Field(0.04, gt=0)
    """Largest mean of min((ℓ − μ)², τ²) over the tokens that move outwards."""
    max_low: float = Field(0.7, ge=0, le=1)
    """The lower bound is never above this."""
    min_high: float = Field(1.5, ge=1)
    """The upper bound is never below this."""
    speculate: Speculate = "auto"
    """As in ``bapo``; where bounds are narrower than both limits, predictions are seldom right."""
