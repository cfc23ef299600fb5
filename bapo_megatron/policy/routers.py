"""Router replay (R2, R3) and router metrics of a model with experts.

Megatron asks ``router.router_replay`` for the experts of each token. Its own class keeps one choice
per router in a process-wide list; this one gets the choices with the micro-batch, and keeps those
of passes that are recomputed in a queue, since Megatron recomputes the micro-batches of a chunk in
their order.

Shape legend: n = tokens of a micro-batch on this rank, or with sequence parallelism its part of
them; N = the same without sequence parallelism; E = experts; K = experts of a token; L = layers of
the model; M = those of them on this rank that have experts.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from bapo_megatron.policy.architecture import Experts
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.types import MicroBatch

_TOTALS = ("entropy", "tokens", "replayed", "matches")
"""What is summed besides the load of each expert."""


@dataclass(eq=False)
class _RouterReplay:
    """Takes the place of Megatron's ``RouterReplay`` in one router."""

    module: TopKRouter
    recomputes: bool
    """Whether activations are recomputed in the backward pass."""
    is_loss_pass: bool = False
    replayed: Tensor | None = None
    """[n, K] int64: experts to use; −1: the router's own."""
    measured_n: Tensor | None = None
    """[n] float64: 1 for the tokens that metrics count."""
    recorded: list[Tensor] | None = None
    """[n, K] int16 of each micro-batch, while choices are recorded."""
    totals: Tensor = field(init=False)
    """[E + 4] float64: tokens of each expert, then ``_TOTALS``."""
    _kept: deque[Tensor] = field(default_factory=deque)
    """What was chosen in forward passes that are to be recomputed."""

    def __post_init__(self) -> None:
        size = self.module.config.num_moe_experts + len(_TOTALS)
        self.totals = torch.zeros(size, dtype=torch.float64, device=self.module.weight.device)

    def begin_pass(self, *, is_loss_pass: bool) -> None:
        """Forget what an earlier pass, which may have failed, left."""
        self.is_loss_pass = is_loss_pass
        self._kept.clear()

    def get_replay_topk(
        self,
        scores_nE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices of each token's experts, [n, K]; called by Megatron."""
        is_recomputation = self.is_loss_pass and self.recomputes and torch.is_grad_enabled()
        if is_recomputation and self.replayed is not None:
            chosen = self._kept.popleft()
            return scores_nE.gather(1, chosen), chosen
        values, top = choose(scores_nE, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = top
        if self.replayed is not None:
            chosen = torch.where(self.replayed >= 0, self.replayed, top)
            values = scores_nE.gather(1, chosen)
            if self.is_loss_pass and self.recomputes:
                self._kept.append(chosen)
        if self.recorded is not None:
            self.recorded.append(chosen.to(torch.int16))
        if self.is_loss_pass and not is_recomputation:
            self._measure(scores_nE.detach(), top, chosen)
        return values, chosen

    def _measure(self, scores_nE: Tensor, top: Tensor, chosen: Tensor) -> None:
        assert self.measured_n is not None, "begin_micro_batch comes first"
        weight_n = self.measured_n
        probability_nE = self._probabilities(scores_nE.double())
        entropy_n = torch.special.entr(probability_nE).sum(dim=-1)
        num_experts = scores_nE.shape[1]
        weights = weight_n[:, None].expand_as(chosen).flatten()
        self.totals[:num_experts].index_add_(0, chosen.flatten(), weights)
        counts = [(entropy_n * weight_n).sum(), weight_n.sum()]
        if self.replayed is not None:
            known_n = weight_n * (self.replayed >= 0).all(dim=-1)
            matches_n = (top[:, :, None] == self.replayed[:, None, :]).any(dim=-1).sum(dim=-1)
            counts += [known_n.sum(), (matches_n * known_n).sum()]
        self.totals[num_experts : num_experts + len(counts)] += torch.stack(counts)

    def _probabilities(self, scores_nE: Tensor) -> Tensor:
        """Turn what the choice depends on into probabilities of experts."""
        config = self.module.config
        if config.moe_router_score_function == "softmax":
            return scores_nE if config.moe_router_pre_softmax else scores_nE.softmax(dim=-1)
        if self.module.expert_bias is not None:
            scores_nE = scores_nE - self.module.expert_bias
        return scores_nE / scores_nE.sum(dim=-1, keepdim=True)


class Routers:
    """The routers of this rank's chunks of a model."""

    def __init__(self, chunks: Sequence[GPTModel], experts: Experts, groups: ProcessGroups) -> None:
        """Take over the choices of the chunks' routers."""
        config: Any = chunks[0].config
        recomputes = config.recompute_granularity == "full"
        self._experts, self._groups = experts, groups
        is_divided = config.sequence_parallel
        self._part = (groups.tensor.rank(), groups.tensor.size()) if is_divided else (0, 1)
        routers = ([m for m in chunk.modules() if isinstance(m, TopKRouter)] for chunk in chunks)
        self._chunks = [[_RouterReplay(router, recomputes) for router in part] for part in routers]
        for router in self._all():
            router.module.router_replay = router

    @property
    def layers(self) -> tuple[int, ...]:
        """[M] Numbers of the layers, from 0, in the order of ``MicroBatch.routes``."""
        return tuple(router.module.layer_number - 1 for router in self._all())

    def begin_pass(self, *, is_loss_pass: bool) -> None:
        """Prepare for a pass over micro-batches; only a loss pass is measured."""
        for router in self._all():
            router.begin_pass(is_loss_pass=is_loss_pass)

    def begin_micro_batch(self, micro_batch: MicroBatch, chunk: int) -> None:
        """Prepare a chunk's routers for its forward pass of a micro-batch on the device."""
        replayed = None if micro_batch.routes is None else micro_batch.routes.long()
        num_tokens, device = micro_batch.num_tokens, micro_batch.rows_T.device
        counts_N = torch.zeros(num_tokens, dtype=torch.float64, device=device)
        counts_N.index_fill_(0, micro_batch.rows_T, 1.0)
        rank, size = self._part
        measured_n = counts_N.chunk(size)[rank]
        first = sum(map(len, self._chunks[:chunk]))
        for number, router in enumerate(self._chunks[chunk], start=first):
            router.measured_n = measured_n
            router.replayed = None if replayed is None else replayed[:, number]

    def balance(self, coefficient: float, num_tokens: float) -> None:
        """Add coefficient · the load balancing loss to the losses of later loss passes.

        It is that of the Switch Transformer (arXiv 2101.03961), E Σ_e f_e P_e per layer and
        micro-batch, averaged over micro-batches by tokens: f_e is the fraction of choices, P_e the
        mean probability. f_e counts the router's own top-k without a bias, not replayed experts.
        ``num_tokens`` are those of the update on all ranks, with padding.
        """
        for router in self._all():
            router.module.routing_type = "aux_loss"
            # Megatron multiplies it by the tokens of the micro-batch.
            router.module.config.moe_aux_loss_coeff = coefficient / num_tokens

    @contextmanager
    def recorded(self) -> Iterator[list[Tensor]]:
        """Yield a list that afterwards has the choices of each micro-batch, [n, M, K] int16."""
        routes: list[Tensor] = []
        for router in self._all():
            router.recorded = []
        try:
            yield routes
            recorded = [router.recorded for router in self._all() if router.recorded is not None]
            routes += [torch.stack(parts, dim=1) for parts in zip(*recorded, strict=True)]
        finally:
            for router in self._all():
                router.recorded = None

    def take_sums(self, num_layers: int) -> dict[str, float]:
        """Return sums for ``trainer.records`` over all ranks since the last call.

        A collective of all ranks: one all-reduce of [L, E + 4]. Ranks that compute a layer for the
        same tokens count these equally often, so that quotients are right.
        """
        size = self._experts.num + len(_TOTALS)
        totals = torch.zeros((num_layers, size), dtype=torch.float64, device=self._groups.device)
        for layer, router in zip(self.layers, self._all(), strict=True):
            totals[layer] = router.totals
            router.totals.zero_()
        dist.all_reduce(totals)
        load_LE = totals[:, : self._experts.num]
        is_measured_L = load_LE.sum(dim=1) > 0
        if not is_measured_L.any():
            return {}
        ratio_L = (load_LE.amax(dim=1) / load_LE.mean(dim=1))[is_measured_L]
        entropy, tokens, replayed, matches = totals[:, self._experts.num :].sum(dim=0).tolist()
        return {
            "router_entropy": entropy,
            "router_tokens": tokens,
            "router_replayed": replayed,
            "router_matches": matches,
            "router_compared": replayed * self._experts.per_token,
            "router_load": float(ratio_L.sum()),
            "router_layers": float(len(ratio_L)),
            "router_load_max": float(ratio_L.max()),
            "router_steps": 1.0,
        }

    def _all(self) -> Iterator[_RouterReplay]:
        return (router for chunk in self._chunks for router in chunk)
