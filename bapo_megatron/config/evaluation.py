"""Configuration of evaluations."""

from typing import Annotated

from pydantic import Field

from bapo_megatron.config.data import DatasetConfig
from bapo_megatron.config.reward import RewardConfig, RewardFunctions
from bapo_megatron.config.section import Section

MAX_SAMPLES = 1000
"""Limit of a prompt's samples: n · C(n, k) stays within the range of a float64."""


class EvalSamplingConfig(Section):
    """How the responses to one set are sampled."""

    samples_per_prompt: int = Field(1, ge=1, le=MAX_SAMPLES)
    """n, the samples of each prompt: the k of avg@k, and the largest of pass@k and maj@k."""
    max_prompts: int | None = Field(None, ge=1)
    """Use only the first N prompts of each set."""
    temperature: float = Field(0.6, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling (evaluation only)."""
    top_k: int = Field(-1, ge=-1)
    """Sample from the k likeliest tokens (evaluation only); -1: from all."""
    max_response_tokens: int = Field(4096, ge=1)
    """Maximum response length; by default ``rollout.max_response_tokens``."""


class EvalSetConfig(DatasetConfig):
    """One evaluation set; what it does not set itself is taken from the ``eval`` section."""

    samples_per_prompt: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    """``eval.samples_per_prompt`` of this set."""
    max_prompts: int | None = Field(None, ge=1)
    """``eval.max_prompts`` of this set."""
    temperature: float | None = Field(None, ge=0)
    """``eval.temperature`` of this set."""
    top_p: float | None = Field(None, gt=0, le=1)
    """``eval.top_p`` of this set."""
    top_k: int | None = Field(None, ge=-1)
    """``eval.top_k`` of this set."""
    max_response_tokens: int | None = Field(None, ge=1)
    """``eval.max_response_tokens`` of this set."""


class EvalConfig(EvalSamplingConfig):
    """Evaluation inside training and by the ``eval`` command (docs/evaluation.md)."""

    sets: tuple[EvalSetConfig, ...] = ()
    """Evaluation files, each with its own sampling settings where they differ from these."""
    functions: RewardFunctions | None = None
    """Reward functions of evaluations; null: ``reward.functions``."""
    every_steps: int = Field(0, ge=0)
    """Evaluate every N steps; 0: never between start and end."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    overlap: bool = False
    """Evaluate during the next step's rollout and training, until the next weight sync. The
    evaluations before the first step and after the last one still run alone."""
    k_values: tuple[Annotated[int, Field(ge=1)], ...] = (1, 4, 16, 64)
    """Further k of pass@k and maj@k; those above a set's ``samples_per_prompt`` are left out."""
    bootstrap_resamples: int = Field(10000, ge=100)
    """Bootstrap resamples of the problems for each 95 % interval; their seed is the run's."""

    def sampling_of(self, dataset: EvalSetConfig) -> EvalSamplingConfig:
        """How ``dataset`` is sampled: its own settings, and these where it has none."""
        names = EvalSamplingConfig.model_fields
        settings = {name: getattr(dataset, name) for name in names}
        return EvalSamplingConfig.model_validate(
            {n: getattr(self, n) if value is None else value for n, value in settings.items()}
        )


def eval_reward(reward: RewardConfig, evaluation: EvalConfig) -> RewardConfig:
    """The reward section with the functions of evaluations."""
    if evaluation.functions is None:
        return reward
    return reward.model_copy(update={"functions": evaluation.functions})
