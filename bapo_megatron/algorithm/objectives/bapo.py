"""BAPO: clip bounds searched so that positive tokens hold the target share (Algorithm 1).

The statistic is the table of contributions, exact integers for every candidate at once; the
decision is the outcome of the search, which stays on the device from there to the loss.

Shape legend: T = response tokens, K = slots of the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from bapo_megatron.algorithm.objective import NamedObjective, Speculate, TokenBatch
from bapo_megatron.algorithm.objectives.clip import Clip, bound_metrics
from bapo_megatron.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.ops.contributions import BoundSearch

EXIT_METRICS = {name: f"bapo/exit_{name}_share" for name in ("start", "met", "exhausted")}
"""The metric of each exit of a search: the share of searches that ended there."""

MAX_CANDIDATES = 256
"""Limit for each bound: the table of the search stays small (csrc/README.md)."""


class RangeConfig(Section):
    """The movable range of one clip bound, in importance ratios."""

    start: float
    """First candidate."""
    max: float
    """Upper limit of the candidates."""
    step: float = Field(gt=0)
    """Distance between candidates."""


_RECIPE: dict[str, Any] = {
    "target": 1.0,
    "lower": {"start": 0.6, "max": 0.8, "step": 0.05},
    "upper": {"start": 1.2, "max": 2.0, "step": 0.05},
    "order": "lower_first",
    "measure": "ratio",
    "scope": "micro_batch",
}


class BapoConfig(Section):
    """The bound search of BAPO (docs/algorithm.md). The defaults are those of ``preset: paper``."""

    preset: Literal["paper", "recipe"] = "paper"
    """``paper``: Algorithm 1 as published, with the defaults of this section. ``recipe``: the
    authors' released code."""
    target: float = Field(0.4, gt=2.0**-25)
    """ρ0: the positive share (or ratio) that the search tries to reach."""
    lower: RangeConfig = RangeConfig(start=0.6, max=0.9, step=0.02)
    """Range of c_low."""
    upper: RangeConfig = RangeConfig(start=1.2, max=3.0, step=0.05)
    """Range of c_high."""
    order: Literal["upper_first", "lower_first"] = "upper_first"
    """Which bound moves first."""
    contribution: Literal["surrogate", "gradient"] = "surrogate"
    """``surrogate``: Eq. 8, clipped values. ``gradient``: Eq. 5, only unclipped tokens."""
    measure: Literal["share", "ratio"] = "share"
    """``share``: P / (P + N) ≥ target. ``ratio``: P / N ≥ target."""
    weight: Literal["uniform", "behaviour_prob"] = "uniform"
    """Token weight: 1, or π_rollout(y) (the literal reading of Eq. 8)."""
    scope: Literal["update", "micro_batch"] = "update"
    """Bounds for each update or for each micro-batch."""
    speculate: Speculate = "auto"
    """How the bounds, which follow from the update's log-probs, reach the loss pass. ``never``: a
    forward-only pass comes first. ``always``: the loss pass runs with predicted bounds, and again
    if they prove wrong. ``auto``: predicts while that saves time and both passes give the same
    log-probs. Results are equal."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        ranges = {name: cls.model_fields[name].default.model_dump() for name in ("lower", "upper")}
        preset = _RECIPE if values.get("preset") == "recipe" else ranges
        filled = {**preset, **values}
        for name in ranges:
            if isinstance(values.get(name), dict):
                filled[name] = {**preset[name], **values[name]}
        return filled

    @model_validator(mode="after")
    def _can_be_searched(self) -> Self:
        low, high = self.lower, self.upper
        if not (0.5 <= low.start <= low.max <= 1 <= high.start <= high.max < 256):
            raise ValueError(
                "needs 0.5 <= lower.start <= lower.max <= 1 <= upper.start <= upper.max < 256, got "
                f"{low.start}, {low.max}, {high.start}, {high.max}"
            )
        limit = 1 if self.measure == "share" else 256
        if self.target >= limit:
            raise ValueError(f"target must be below {limit} with this measure, got {self.target}")
        for name, side in (("lower", low), ("upper", high)):
            candidates = math.floor((side.max - side.start) / side.step + 1e-6) + 1
            if candidates > MAX_CANDIDATES:
                raise ValueError(
                    f"{name}.step must leave at most {MAX_CANDIDATES} candidates, got {candidates}"
                    "; raise it"
                )
        return self

    def search(self, dual_clip: float | None = None) -> BoundSearch:
        """Lay out the candidates.

        With ``contribution: gradient`` tokens above ``dual_clip`` have no gradient and drop out.
        """
        from bapo_megatron.ops.contributions import BoundSearch
        from bapo_megatron.ops.extension import ClipGrid

        grid = ClipGrid(
            (self.lower.start, self.lower.max, self.lower.step),
            (self.upper.start, self.upper.max, self.upper.step),
            order=self.order,
            # The released recipe adds up its steps, the paper's candidates are start + k · step.
            spacing="running_sum" if self.preset == "recipe" else "multiples",
            dual_clip=dual_clip if self.contribution == "gradient" else None,
        )
        return BoundSearch(grid, self.target, self.contribution, self.measure, self.weight)


class Bapo(Clip):
    """Searches the bounds over all tokens of an update, or of micro-batches (``scope``)."""

    def __init__(self, options: BapoConfig, dual_clip: float | None) -> None:
        """Lay out the candidates; see ``BapoConfig.search``."""
        self.needs = options.scope
        self.decisive = slice(0, 2) if options.scope == "update" else None
        self.speculate = options.speculate
        self.dual_clip = dual_clip
        self.search = options.search(dual_clip)

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Return the contributions of the tokens, [K] int64."""
        values = (tokens.logprob, tokens.behaviour_logprob, tokens.advantage, tokens.mask)
        return self.search.contributions(*(value_T.float() for value_T in values))

    def decide(self, total_K: Tensor) -> Tensor:
        """Search the bounds; return ``BoundSearch.FIELDS``, of which the bounds are the first."""
        return self.search.bounds(total_K)

    def foresee(self, known_K: Tensor, recent_K: Tensor | None) -> Tensor:
        """Combine the ratios of recent updates with this update's Σ |w A| of each sign.

        Σ |w A| is known before the log-probs.
        """
        return known_K if recent_K is None else self.search.rescale(recent_K, known_K)

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the bounds of the decision."""
        assert tokens.decision is not None, "the bounds are searched before the loss"
        low, high = tokens.decision[:2].to(tokens.ratio.dtype)
        return low, high

    def report_decision(self, decision: Sequence[float]) -> Mapping[str, float]:
        """Return bounds, positive shares and exit of a search."""
        fields = dict(zip(self.search.FIELDS, decision, strict=True))
        bounds = bound_metrics(fields["low"], fields["high"])
        exit_name = self.search.EXITS[int(fields["exit"])]
        if exit_name == "unsearched":
            return bounds
        shares = ("positive_share_start", "positive_share")
        exits = {metric: float(name == exit_name) for name, metric in EXIT_METRICS.items()}
        return bounds | {f"bapo/{name}": fields[name] for name in shares} | exits

    def refuses(self, decision: Tensor) -> Tensor:
        """Return whether the table is unfit for a search."""
        search = self.search
        return decision[search.FIELDS.index("exit")] == search.EXITS.index("refused")

    def explain_refusal(self, decision: Sequence[float]) -> str:
        """Say what was wrong with the table."""
        fields = dict(zip(self.search.FIELDS, decision, strict=True))
        if fields["out_of_range_tokens"] > 0:
            return (
                f"{fields['out_of_range_tokens']:.0f} tokens have |weight · advantage| >= 256 or a "
                "mask other than 0 and 1, beyond the exact sums of the bound search; scale the "
                "rewards down"
            )
        return (
            f"the bound search refused a table of {fields['tokens']:.0f} tokens: 2^31 or more, or "
            "a negative sum; use smaller batches, and one version on all ranks"
        )


NAMED = {
    "bapo": NamedObjective(
        lambda o, c: Bapo(o, c.dual_clip), BapoConfig, dual_clip=True, centers=True
    )
}
