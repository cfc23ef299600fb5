"""The typed configuration of a run: frozen, every key documented, unknown keys refused.

A name that ends in ``_s`` holds seconds. ``load.load_config`` reads YAML into ``RunConfig`` and
turns validation errors into one line; ``check.check_config`` holds rules that cross sections.

Objectives with their options, and advantages, are declared in a layer above this one. When this
module is imported, it asks ``algorithm.objectives`` and ``algorithm.advantages`` for them, by name,
and ``AlgorithmConfig`` gets the options as fields. No file there imports torch, so nor does reading
a configuration.
"""

import importlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from bapo_megatron.config.data import DataConfig, DatasetConfig, SourceConfig
from bapo_megatron.config.demonstrations import DemonstrationsConfig, MixedDemonstrationsConfig
from bapo_megatron.config.evaluation import EvalConfig
from bapo_megatron.config.megatron import (
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.config.rollout import ReplayConfig, RolloutConfig
from bapo_megatron.config.scorers import (
    REFERENCE_KEY,
    TEACHER_KEY,
    CenteringConfig,
    DistillationConfig,
    FrozenModelConfig,
    KlConfig,
)
from bapo_megatron.config.section import MAX_SECONDS, AbsolutePath, Section, built_in_or_own


class CorrectionConfig(Section):
    """Importance weights for the trainer–engine mismatch: w = π_recomputed / π_rollout.

    Needs ``behaviour: recomputed``. With stale tokens w carries their staleness too (decoupled
    PPO). The bound search ignores it.
    """

    kind: Literal["none", "token", "sequence", "icepop", "geometric"] = "none"
    """``token``: min(w, cap) per token; ``sequence``: min(∏ w, cap) for a response's tokens;
    ``icepop``: tokens with w outside [low, high] are left out of the loss; ``geometric``: responses
    whose geometric mean of w is outside are, and w does not weigh the others."""
    cap: float = Field(2.0, gt=0)
    """Limit of the weight (``token`` and ``sequence``)."""
    low: float = Field(0.5, gt=0, le=1)
    """Minimum w to keep (``icepop``; ``geometric``, where the default is 0.999)."""
    high: float = Field(5.0, ge=1)
    """Maximum w to keep (``icepop``; ``geometric``, where the default is 1.001)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_kind(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("kind") == "geometric":
            return {"low": 0.999, "high": 1.001, **values}
        return values


_objectives = importlib.import_module("bapo_megatron.algorithm.objectives")

OBJECTIVES: tuple[str, ...] = tuple(_objectives.NAMED)
"""Names that ``algorithm.objective`` takes."""

DUAL_CLIPPED = tuple(name for name, entry in _objectives.NAMED.items() if entry.dual_clip)
"""Objectives that take ``algorithm.dual_clip``."""

_advantages = importlib.import_module("bapo_megatron.algorithm.advantages")

ADVANTAGES: tuple[str, ...] = tuple(_advantages.NAMED)
"""Names that ``algorithm.advantage`` takes."""

SHIFTED: tuple[str, ...] = _advantages.SHIFTED
"""Advantages that take ``algorithm.baseline_shift``."""


_USUAL_NAMES = {name: f"the loss of {name.upper()} is clip" for name in ("grpo", "ppo")}


class _AlgorithmKeys(Section):
    """The keys that do not belong to one objective."""

    objective: Annotated[str, built_in_or_own(OBJECTIVES, "name", _USUAL_NAMES)] = "bapo"
    """The loss: ``bapo``; ``clip``, PPO's loss with fixed bounds, which is GRPO; ``none``, without
    a clip; another one of docs/objectives.md; or ``package.module:name``, your function or
    class."""
    objective_options: dict[str, Any] = Field({})
    """Keyword arguments for your class, or extra ones for your function."""
    dual_clip: float | None = Field(None, ge=1.0001)
    """Upper limit of the ratio for negative advantages (3 in the recipe), or none."""
    entropy_share: float = Field(1.0, gt=0, le=1)
    """Train only this share of an update's tokens, those with the highest entropy (0.2: 80/20)."""
    advantage: Annotated[str, built_in_or_own(ADVANTAGES, "function")] = "grpo"
    """Advantage of each response: ``grpo``, ``grpo_no_std`` (Dr. GRPO), ``rloo``, ``opo``,
    ``reinforce_pp``, ``reinforce_pp_baseline`` (docs/objectives.md); ``distill``: 0, so that only
    the teacher of ``distillation`` counts; ``none``: 0, always so for ``nll``; or
    ``package.module:function``, called with rewards [G] and the group's samples."""
    baseline_shift: float = 0.0
    """Added to the baseline of ``grpo_no_std``, ``rloo`` and ``opo``; below 0 in AsymRE."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "token_sum_norm"] = "token_mean"
    """How token losses are reduced to one number; denominators are global."""
    token_sum_norm_constant: float = Field(1.0, gt=0)
    """The constant of ``token_sum_norm``: the sum is divided by responses × constant."""
    behaviour: Literal["rollout", "recomputed"] = "rollout"
    """μ: the engine's own log-probs, or the trainer's at the start of the step."""
    router_replay: Literal["none", "behaviour", "rollout"] = "none"
    """Which choices the routers of a model with experts replay, since rounding alone changes many:
    those of the pass that recomputes μ (R2), or the engine's, for prompt and response (R3;
    docs/rollout.md)."""
    load_balancing_coefficient: float = Field(0.0, ge=0)
    """Weight of a loss that spreads tokens evenly over experts, in each layer (0.001 is usual in
    pretraining)."""
    correction: CorrectionConfig = CorrectionConfig()
    kl: KlConfig = KlConfig()
    distillation: DistillationConfig = DistillationConfig()
    centering: CenteringConfig = CenteringConfig()
    demonstrations: MixedDemonstrationsConfig = MixedDemonstrationsConfig()
    updates_per_batch: int = Field(1, ge=1)
    """Number of optimizer updates that a batch is split into (whole groups each)."""
    epochs: int = Field(1, ge=1)
    """Passes over the batch."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    on_nonfinite: Literal["raise", "skip_update"] = "raise"
    """When a log-prob, advantage or gradient norm is not finite: end the run or skip the update."""


if TYPE_CHECKING:

    class _WithOptions(_AlgorithmKeys): ...

else:
    _WithOptions = create_model(
        "_WithOptions",
        __base__=_AlgorithmKeys,
        **{key: (section, section()) for key, section in _objectives.SECTIONS.items()},
    )


class AlgorithmConfig(_WithOptions):
    """Advantages, clipping and the loss (docs/algorithm.md)."""

    def options[OptionsT: Section](self, kind: type[OptionsT]) -> OptionsT:
        """Return the options of a built-in objective by their class."""
        return next(value for _, value in self if isinstance(value, kind))

    @property
    def frozen_models(self) -> dict[str, FrozenModelConfig]:
        """The sections of the frozen models in the trainer, by key."""
        models: dict[str, FrozenModelConfig] = {}
        if self.kl.is_used:
            models[REFERENCE_KEY] = self.kl.reference
        if self.distillation.is_used and not self.distillation.has_engine:
            models[TEACHER_KEY] = self.distillation.teacher
        return models

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Add what the recipe preset sets outside the search."""
        bapo = values.get("bapo") if isinstance(values, dict) else None
        if not isinstance(bapo, dict) or bapo.get("preset") != "recipe":
            return values
        dual_clipped = values.get("objective", "bapo") in DUAL_CLIPPED
        return {"behaviour": "recomputed", "dual_clip": 3.0 if dual_clipped else None, **values}

    @model_validator(mode="after")
    def _settings_go_together(self) -> Self:
        if self.objective_options and self.objective in OBJECTIVES:
            raise ValueError(
                "objective_options are for an objective of your own, got them with objective: "
                f"{self.objective}; leave them out, or set objective: package.module:name"
            )
        if self.dual_clip is not None and self.objective in set(OBJECTIVES) - set(DUAL_CLIPPED):
            raise ValueError(
                f"dual_clip is for {', '.join(DUAL_CLIPPED)}, got {self.dual_clip:g} with "
                f"objective: {self.objective}; set dual_clip: null"
            )
        if self.baseline_shift != 0 and self.advantage not in SHIFTED:
            raise ValueError(
                f"baseline_shift is for {', '.join(SHIFTED)}, got {self.baseline_shift:g} with "
                f"advantage: {self.advantage}, which scales or replaces it; set it to 0"
            )
        if self.advantage == "distill" and not self.distillation.is_used:
            raise ValueError(
                "distillation.coefficient must be above 0 with advantage: distill, got 0: rewards "
                "do not count, and there is no teacher; set it, or choose another advantage"
            )
        ignores_rewards = self.advantage == "distill" or self.objective == "nll"
        if ignores_rewards and self.kl.coefficient > 0 and self.kl.where == "reward":
            raise ValueError(
                "kl.where must be loss with advantage: distill or objective: nll, got reward: "
                "advantages do not count there, so the divergence would not; change one of them"
            )
        adds_to_advantages = self.distillation.is_used and self.distillation.loss == "tokens"
        if self.objective == "nll" and adds_to_advantages:
            raise ValueError(
                "distillation.loss must not be tokens with objective: nll, which has no "
                "advantages to add to; choose another loss, or set distillation.coefficient to 0"
            )
        if self.router_replay == "behaviour" and self.behaviour != "recomputed":
            raise ValueError(
                "behaviour must be recomputed with router_replay: behaviour, got "
                f"{self.behaviour}: there is no pass whose choices could be replayed; change one "
                "of them"
            )
        if self.correction.kind != "none" and self.behaviour != "recomputed":
            raise ValueError(
                f"behaviour must be recomputed with correction.kind: {self.correction.kind}, got "
                f"{self.behaviour}: the correction compares the trainer's log-probs with the "
                "engine's; change one of them"
            )
        if self.centering.is_used:
            self._check_centering()
        return self

    def _check_centering(self) -> None:
        named = _objectives.NAMED.get(self.objective)
        if named is not None and not named.centers:
            names = ", ".join(name for name, value in _objectives.NAMED.items() if value.centers)
            raise ValueError(
                f"objective must be {names}, or one of your own that centers, with centering.top_k:"
                f" {self.centering.top_k}, got {self.objective}: the mean of its weighted score is "
                "0 or undefined; change it, or set top_k: 0"
            )
        if self.behaviour != "rollout":
            raise ValueError(
                f"behaviour must be rollout with centering.top_k: {self.centering.top_k}, got "
                f"{self.behaviour}: the sampler's distribution is known, the recomputed one is "
                "not; change one of them"
            )


class OpsConfig(Section):
    """The kernels of the loss stage (docs/kernels.md)."""

    logits_chunk_tokens: int = Field(0, ge=0)
    """Compute logits and their gradient for this many response tokens at a time, so that memory
    does not grow with the length (1024 or more keeps the speed). 0: all logits of a micro-batch."""


def _seconds(value: Any) -> Any:
    """Turn a number with a unit into seconds."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?[smhd]", value):
        return float(value[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[value[-1]]
    return value


class TrainConfig(Section):
    """The loop."""

    steps: int = Field(100, ge=1)
    """Training steps (batches)."""
    max_tokens_per_micro_batch: int = Field(8192, ge=1)
    """Token budget of one packed forward pass on one rank."""
    dump_tokens: int = Field(0, ge=0)
    """Every N steps, write log-prob, behaviour log-prob, advantage, entropy and mask of every
    response token to ``<run_dir>/tokens``, a parquet file per update (for ``report`` and
    ``bounds``); 0: never."""
    stop_after: Annotated[float | None, BeforeValidator(_seconds)] = Field(
        None, gt=0, le=MAX_SECONDS
    )
    """Save and end at the next safe point after this time: in seconds, or as 45m, 23h or 2d."""
    stop_lead_s: float = Field(900.0, ge=0)
    """Save and end this long before the Slurm job ends; must cover the training on one batch, a
    weight sync and a save."""


class CheckpointConfig(Section):
    """Checkpoints under ``<run_dir>/checkpoints``."""

    every_steps: int = Field(0, ge=0)
    """Save every N steps; 0: only at the end."""
    keep_last: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_every: int = Field(0, ge=0)
    """Keep every checkpoint whose step is a multiple of this; 0: none."""
    best: str = ""
    """Metric of an evaluation, such as ``eval/aime24/avg_at_k``: the checkpoint with its largest
    value is always saved, kept, and named by ``checkpoints/best``. Empty: none."""
    asynchronous: bool = False
    """Write in the background while training continues (from a copy in host memory)."""
    verify: bool = True
    """Compare the files that a resumed run reads with the checksums saved with them."""
    at_end: bool = True
    """Save a checkpoint and a Hugging Face export when the run ends."""


class LogConfig(Section):
    """Where metrics go, besides ``metrics.jsonl``, and when a hang is reported."""

    console: bool = True
    """A line per step on the terminal."""
    tensorboard: bool = True
    """Event files under ``<run_dir>/tensorboard``."""
    wandb_project: str = ""
    """Project name at Weights & Biases; empty: off. It gets metrics, settings and samples."""
    wandb_group: str = Field("", max_length=128)
    """Group of the run there, such as one name for all seeds."""
    wandb_tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """Tags of the run there, of 1 to 64 characters each."""
    wandb_samples_every: int = Field(20, ge=0)
    """Every N steps, a table of eight samples with texts, from the lowest reward to the highest, if
    ``rollout.dump`` keeps them; 0: never."""
    prometheus_port: int = Field(0, ge=0, le=65535)
    """Port at which Prometheus finds the newest row of ``metrics.jsonl``; 0: off."""
    prometheus_host: str = "127.0.0.1"
    """Address of rank 0's host to listen on."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak TFLOP/s of one GPU in the run's number format, for the MFU; null: from the data sheet,
    if the GPU is known (docs/runtime.md)."""
    gpu_hour_cost: float | None = Field(None, gt=0)
    """Price of a GPU-hour, for the cost in ``plan`` and ``summary.json``; null: hours alone."""
    hang_s: float = Field(300.0, gt=0)
    """When a rank has made no progress for this long, all ranks write their stacks to
    ``<run_dir>/logs`` and rank 0 reports what each rank is doing; the run continues. Must be below
    ``parallel.timeout_s``."""


class RunConfig(Section):
    """One run, described by a YAML file."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run."""
    run_dir: AbsolutePath
    """Directory for everything that the run writes."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of data order, sampling, replay, bootstrap intervals and the ranks' random streams."""
    replay: ReplayConfig = ReplayConfig()
    resume: bool = False
    """Continue from the newest checkpoint in ``run_dir``."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    megatron: MegatronConfig = MegatronConfig()
    data: DataConfig = DataConfig()
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    ops: OpsConfig = OpsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = Field(EvalConfig(), validate_default=True)
    log: LogConfig = LogConfig()
    sources: tuple[SourceConfig, ...] = ()
    """Where ``fetch`` gets models and files that other keys name; others here are ignored."""

    @property
    def imitates(self) -> bool:
        """Whether the run trains on demonstrations alone."""
        is_nll = self.algorithm.objective == "nll"
        return is_nll and bool(self.demonstrations.train) and self.replay.dumps is None

    @property
    def has_engines(self) -> bool:
        """Whether engines sample the run's batches."""
        return self.replay.dumps is None and not self.imitates

    @property
    def num_demonstrations(self) -> int:
        """Demonstrations of each step; 0: the run has none."""
        mixed, updates = self.algorithm.demonstrations, self.algorithm.updates_per_batch
        if self.imitates or mixed.coefficient == 0:
            return self.demonstrations.sequences_per_step * self.imitates
        return updates * math.ceil(mixed.share * self.rollout.groups_per_step / updates)

    @property
    def train_temperature(self) -> float:
        """What logits are divided by: nobody sampled demonstrations alone."""
        return 1.0 if self.imitates else self.rollout.temperature

    def with_steps(self, steps: int) -> Self:
        """Return the configuration with the steps that its epochs are."""
        train = self.train.model_copy(update={"steps": steps})
        demonstrations = self.demonstrations.model_copy(update={"epochs": None})
        return self.model_copy(update={"train": train, "demonstrations": demonstrations})

    @property
    def models(self) -> dict[str, Path]:
        """Directories of models and adapters that the run reads, by key."""
        teacher = self.algorithm.distillation
        paths = {
            "model.path": self.model.path,
            "model.lora.path": self.model.lora.path,
            **{f"{key}.path": model.path for key, model in self.algorithm.frozen_models.items()},
            f"{TEACHER_KEY}.path": teacher.teacher.path if teacher.is_used else None,
        }
        return {key: path for key, path in paths.items() if path is not None}

    @property
    def files(self) -> dict[str, Path]:
        """Files that rank 0 reads, by key; a pattern stands for the files that it matches now."""
        sets: dict[str, tuple[DatasetConfig, ...]] = {
            "data.train": self.data.train_sets,
            "demonstrations.train": self.demonstrations.train,
            "demonstrations.heldout": self.demonstrations.heldout,
            "eval.sets": self.eval.sets,
        }
        named = [(key, dataset) for key, datasets in sets.items() for dataset in datasets]
        paths = {
            f"{key}: {path.name}": path
            for key, dataset in named
            for path in dataset.files() or filter(None, [dataset.path])
        }
        if self.data.chat_template is not None:
            paths["data.chat_template"] = self.data.chat_template
        return paths

    def without_router_replay(self) -> Self:
        """Return the configuration of engines whose choices no trainer replays."""
        algorithm = self.algorithm.model_copy(update={"router_replay": "none"})
        return self.model_copy(update={"algorithm": algorithm})

    @property
    def reference_is_base(self) -> bool:
        """Whether the KL reference is the policy without its adapters, which costs no memory."""
        reference = self.algorithm.kl.reference
        return self.model.lora.rank > 0 and reference.path is None and not reference.update_every

    @property
    def sends_adapters(self) -> bool:
        """Whether weight syncs send adapters alone, not merged weights."""
        rollout = self.rollout
        if rollout.weight_sync.adapters is not None:
            return rollout.weight_sync.adapters == "adapter"
        is_exact = rollout.engine == "local" and not rollout.local.sampling_bits
        return is_exact and self.model.lora.rank > 0

    @field_validator("rollout")
    @classmethod
    def _default_verification(cls, rollout: RolloutConfig, info: ValidationInfo) -> RolloutConfig:
        """Verify every tenth weight sync of adapters unless ``verify`` is set."""
        has_adapters = "model" in info.data and info.data["model"].lora.rank > 0
        if not has_adapters or "verify" in rollout.weight_sync.model_fields_set:
            return rollout
        weight_sync = rollout.weight_sync.model_copy(update={"verify": 10})
        return rollout.model_copy(update={"weight_sync": weight_sync})

    @field_validator("eval")
    @classmethod
    def _default_length(cls, evaluation: EvalConfig, info: ValidationInfo) -> EvalConfig:
        """Give evaluations the rollout's ``max_response_tokens`` where they set none."""
        if "rollout" not in info.data or "max_response_tokens" in evaluation.model_fields_set:
            return evaluation
        limit = info.data["rollout"].max_response_tokens
        return evaluation.model_copy(update={"max_response_tokens": limit})
