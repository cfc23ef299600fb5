"""Configuration of the frozen models that score tokens: a KL reference and a teacher."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from bapo_megatron.config.rollout import ENGINES, WITH_SERVERS
from bapo_megatron.config.section import AbsolutePath, Section

REFERENCE_KEY = "algorithm.kl.reference"
TEACHER_KEY = "algorithm.distillation.teacher"

if TYPE_CHECKING:
    _TeacherEngine = str
else:
    _TeacherEngine = Literal["", *ENGINES]


def _as_tuple(value: Any) -> Any:
    # ``AlgorithmConfig`` completes its values first, so strict validation no longer sees JSON.
    return tuple(value) if isinstance(value, list) else value


class FrozenModelConfig(Section):
    """A model in the trainer, in the policy's parallel layout, whose weights are not trained."""

    path: AbsolutePath | None = None
    """Directory of a Hugging Face model (config.json, safetensors, tokenizer)."""
    memory: Literal["device", "host"] = "device"
    """Where the weights are kept between passes; ``host`` copies them to the GPU for each step."""


class ReferenceConfig(FrozenModelConfig):
    """The reference of the KL divergence; without ``path`` the initial policy, without adapters."""

    update_every: int = Field(0, ge=0)
    """Every N steps the current policy becomes the reference; 0: never."""


class KlConfig(Section):
    """KL divergence from the policy to a reference, estimated on sampled tokens."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the divergence; 0: no penalty, and no reference is loaded unless ``measure``."""
    kind: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimate per token, with x = ℓ − ℓ_ref: ``k1`` x; ``k2`` x²/2; ``k3`` e^−x − 1 + x; ``k1+``
    and ``k3+`` use the gradient of ``k2``, which is unbiased."""
    where: Literal["loss", "reward"] = "loss"
    """``loss``: added to each token's loss; ``reward``: the sum over a response, for the policy
    that sampled it, is subtracted from the reward before advantages are computed."""
    reference: ReferenceConfig = ReferenceConfig()
    measure: bool = False
    """Report ``kl/reference`` with ``coefficient: 0``, too."""

    @property
    def is_used(self) -> bool:
        """Whether there is a reference."""
        return self.coefficient > 0 or self.measure

    @model_validator(mode="after")
    def _kind_fits(self) -> Self:
        if self.where == "reward" and self.kind.endswith("+"):
            raise ValueError(
                f"kind must be k1, k2 or k3 with where: reward, got {self.kind}: it differs from "
                f"{self.kind[:-1]} only in its gradient, and a reward has none; drop the +"
            )
        return self


class TeacherConfig(FrozenModelConfig):
    """The teacher: a model in the trainer, or one that engines serve to score responses."""

    engine: _TeacherEngine = ""
    """Empty: in the trainer; else a built-in ``rollout.engine``, on ``servers`` or in the
    collector's process. The tokenizer is always read from ``path``."""
    servers: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Addresses (http://host:port) of running servers with this model."""
    patience_s: float = Field(900.0, gt=0)
    """How long a run waits without a usable server before it saves and ends."""

    @model_validator(mode="after")
    def _engine_fits(self) -> Self:
        if self.servers and self.engine not in WITH_SERVERS:
            names = " or ".join(WITH_SERVERS)
            raise ValueError(
                f"servers must be left out unless engine is {names}, got {len(self.servers)} with "
                f"engine: '{self.engine}'; set engine: {names}, or remove them"
            )
        return self


class DistillationConfig(Section):
    """On-policy distillation: match a teacher's distribution at the tokens the policy sampled."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the teacher; 0: no distillation, and no teacher is loaded."""
    loss: Literal["tokens", "reverse_kl", "forward_kl", "top_k"] = "tokens"
    """``tokens``: coefficient · (ℓ_teacher − μ) is added to each token's advantage. ``reverse_kl``
    and ``forward_kl``: KL(policy‖teacher) or KL(teacher‖policy) over the whole vocabulary is added
    to each token's loss (teacher in the trainer, ``ops.logits_chunk_tokens`` above 0). ``top_k``:
    KL(teacher‖policy) over the teacher's ``top_k`` likeliest tokens (teacher behind an engine;
    ``ops.logits_chunk_tokens`` above 0, too)."""
    top_k: int = Field(64, ge=1, le=1024)
    """Tokens per position with ``loss: top_k``; the teacher's probabilities are renormalised."""
    teacher: TeacherConfig = TeacherConfig()

    @property
    def is_used(self) -> bool:
        """Whether there is a teacher."""
        return self.coefficient > 0

    @property
    def num_top(self) -> int:
        """Tokens per position of the columns with the teacher's likeliest; 0 without them."""
        return self.top_k if self.loss == "top_k" else 0

    @property
    def is_over_vocabulary(self) -> bool:
        """Whether the loss compares distributions, not only log-probs of sampled tokens."""
        return self.is_used and self.loss != "tokens"

    @property
    def has_engine(self) -> bool:
        """Whether there is a teacher behind an engine."""
        return self.is_used and self.teacher.engine != ""

    @model_validator(mode="after")
    def _teacher_fits(self) -> Self:
        if not self.is_used:
            return self
        if self.teacher.path is None:
            raise ValueError(
                f"teacher.path must be given with coefficient: {self.coefficient:g}, got none; "
                "name the teacher's directory, or set the coefficient to 0"
            )
        needs_engine = self.loss == "top_k"
        if self.loss != "tokens" and needs_engine != bool(self.teacher.engine):
            raise ValueError(
                f"teacher.engine must be {' or '.join(ENGINES) if needs_engine else 'empty'} with "
                f"loss: {self.loss}, got '{self.teacher.engine}'; change one of them"
            )
        return self


class CenteringConfig(Section):
    """Score centering: subtract the mean of the weighted score under the sampler's distribution.

    docs/objectives.md has the equations (arXiv 2609.20807).
    """

    top_k: int = Field(0, ge=0, le=1024)
    """Likeliest tokens of the sampler at each position, with their log-probs; the rest of the
    vocabulary is taken to be the policy's, scaled. 0: no centering."""

    @property
    def is_used(self) -> bool:
        """Whether the loss is centred."""
        return self.top_k > 0

    @property
    def num_top(self) -> int:
        """Tokens per position of the columns that the engine fills."""
        return self.top_k
