"""The policy in float64 by transformers, with a row and a loss mask for every response token.

Nothing is taken from the package but the dump: which tokens have a loss is the mask's, [R].

Shape legend: R = tokens of one response, what an environment wrote included.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bapo_megatron.types import RolloutBatch
from tests.policy.tiny_models import load_reference
from tests.trainer.one_update import TEMPERATURE

UNKNOWN_LOGPROB = -2.5
"""μ of a written token, which nothing may depend on."""


class ExactPolicy:
    """Sequences of a batch, with a graph to the weights of transformers' model."""

    def __init__(self, model_dir: Path, batch: RolloutBatch) -> None:
        self.model = load_reference("qwen2", model_dir).eval().double()
        self.logprobs: list[Tensor] = []
        """[R] each, float64."""
        self.entropies: list[Tensor] = []
        """[R] each, float64."""
        self.masks: list[Tensor] = []
        """[R] each, float64: 1 where the policy sampled."""
        self.behaviours: list[Tensor] = []
        """[R] each, float64."""
        sequences = [(i, s) for i, sample in enumerate(batch.samples) for s in sample.sequences]
        self.owners = [i for i, _ in sequences]
        """Index of each sequence's sample."""
        self.lengths = [len(s.response_token_ids) for _, s in sequences]
        self.rewards = np.array([[s.reward for s in g.samples] for g in batch.groups])
        for _, sample in sequences:
            ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_token_ids.tolist()]])
            rows = (self.model(ids).logits[0] / TEMPERATURE).log_softmax(-1)
            start = len(sample.prompt.token_ids)
            rows = rows[start - 1 : -1]
            self.logprobs.append(rows.gather(1, ids[0, start:, None])[:, 0])
            self.entropies.append(-(rows.exp() * rows).sum(-1))
            mask_R = torch.ones(len(rows), dtype=torch.float64)
            for first, num_tokens in sample.written:
                mask_R[first : first + num_tokens] = 0.0
            behaviour_R = torch.full_like(mask_R, UNKNOWN_LOGPROB)
            behaviour_R[mask_R == 1] = torch.tensor(sample.behaviour_logprobs).double()
            self.masks.append(mask_R)
            self.behaviours.append(behaviour_R)

    @property
    def responses(self) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
        """ℓ, μ and mask [R], and the advantage, of each sequence."""
        return zip(self.logprobs, self.behaviours, self.masks, self.advantages, strict=True)

    @property
    def advantages(self) -> list[float]:
        centred = self.rewards - self.rewards.mean(axis=1, keepdims=True)
        scale = self.rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6
        return (centred / scale).flatten()[self.owners].tolist()  # type: ignore[no-any-return]

    def token_mean(self, losses: Sequence[Tensor]) -> Tensor:
        """Mean of losses [R] over the tokens of all responses with mask 1."""
        mask = torch.cat(self.masks)
        return (mask * torch.cat(list(losses))).sum() / mask.sum()

    def episode_mean(self, losses: Sequence[Tensor]) -> Tensor:
        """Mean over episodes of the mean of losses [R] over their tokens with mask 1."""
        means = []
        for owner in dict.fromkeys(self.owners):
            parts = [i for i, number in enumerate(self.owners) if number == owner]
            mask = torch.cat([self.masks[i] for i in parts])
            means.append((mask * torch.cat([losses[i] for i in parts])).sum() / mask.sum())
        return torch.stack(means).mean()

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        self.model.zero_grad()
        loss.backward(retain_graph=True)
        return {
            name: parameter.grad.clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
