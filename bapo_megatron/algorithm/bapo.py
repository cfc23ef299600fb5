"""BAPO: clip bounds searched so that positive tokens hold the target share (Algorithm 1).

The statistic is the table of contributions, exact integers for every candidate at once; the
decision is the outcome of the search, which stays on the device from there to the loss.

Shape legend: T = response tokens, K = slots of the table.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from bapo_megatron.algorithm.clip import Clip
from bapo_megatron.algorithm.objective import TokenBatch
from bapo_megatron.config.objectives import BapoConfig
from bapo_megatron.ops.backend import Kernels
from bapo_megatron.ops.contributions import BOUNDS_FIELDS, EXIT_NAMES, REFUSED, BoundSearch

EXIT_METRICS = {name: f"bapo/exit_{name}_share" for name in ("start", "met", "exhausted")}
"""The metric of each exit of a search: the share of searches that ended there."""

_LOW, _HIGH, _EXIT = (BOUNDS_FIELDS.index(name) for name in ("low", "high", "exit"))


class Bapo(Clip):
    """Searches the bounds over all tokens of an update, or of micro-batches (``scope``)."""

    def __init__(
        self, config: BapoConfig, dual_clip: float | None, kernels: Kernels | None = None
    ) -> None:
        """Lay out the candidates; without ``kernels`` the search is for tokens on the CPU."""
        self.needs = config.scope
        self.decisive = slice(_LOW, _HIGH + 1) if config.scope == "update" else None
        self.speculate = config.speculate
        self.dual_clip = dual_clip
        self.search = BoundSearch(config, dual_clip, kernels)

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Return the contributions of the tokens, [K] int64."""
        values = (tokens.logprob, tokens.behaviour_logprob, tokens.advantage, tokens.mask)
        return self.search.contributions(*(value_T.float() for value_T in values))

    def decide(self, total_K: Tensor) -> Tensor:
        """Search the bounds; return ``BOUNDS_FIELDS``."""
        return self.search.bounds(total_K)

    def foresee(self, known_K: Tensor, recent_K: Tensor | None) -> Tensor:
        """Take the ratios of recent updates, with this update's own weight of each sign.

        Σ |w A| of the tokens of a sign is known before their log-probs.
        """
        return known_K if recent_K is None else self.search.rescale(recent_K, known_K)

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the bounds that were found."""
        assert tokens.decision is not None, "the bounds are searched before the loss"
        found = tokens.decision.to(tokens.ratio.dtype)
        return found[_LOW], found[_HIGH]

    def report_decision(self, decision: Sequence[float]) -> Mapping[str, float]:
        """Return bounds, positive shares and exit of a search."""
        found = dict(zip(BOUNDS_FIELDS, decision, strict=True))
        bounds = {"bapo/clip_low": found["low"], "bapo/clip_high": found["high"]}
        exit_name = EXIT_NAMES[int(found["exit"])]
        if exit_name == "unsearched":
            return bounds
        shares = ("positive_share_start", "positive_share")
        exits = {metric: float(name == exit_name) for name, metric in EXIT_METRICS.items()}
        return bounds | {f"bapo/{name}": found[name] for name in shares} | exits

    def refuses(self, decision: Tensor) -> Tensor:
        """Return whether the table is unfit for a search."""
        return decision[_EXIT] == REFUSED

    def explain_refusal(self, decision: Sequence[float]) -> str:
        """Say what was wrong with the table."""
        found = dict(zip(BOUNDS_FIELDS, decision, strict=True))
        if found["out_of_range_tokens"] > 0:
            return (
                f"{found['out_of_range_tokens']:.0f} tokens have |weight · advantage| >= 256 or a "
                "mask other than 0 and 1, beyond the exact sums of the bound search; scale the "
                "rewards down"
            )
        if found["tokens"] >= 1 << 31:
            return (
                f"the bound search saw {found['tokens']:.0f} tokens, 2^31 or more; use smaller "
                "batches or raise algorithm.updates_per_batch"
            )
        return (
            "the contribution table holds a negative sum, which no tokens can give; its all-reduce "
            "went wrong, so check that all ranks run the same version"
        )
