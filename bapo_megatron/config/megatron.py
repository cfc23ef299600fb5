"""Configuration of the model, of how Megatron runs it, and of the optimizer."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from bapo_megatron.config.section import AbsolutePath, Section


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685), which are trained in place of the model's weights."""

    rank: int = Field(0, ge=0, le=1024)
    """Rank r of the adapters; 0: none, and all weights are trained."""
    alpha: float = Field(32.0, gt=0)
    """Their factor is alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linears by the last part of their names, such as q_proj; empty: all of the layers, each
    expert's too, but routers."""
    path: AbsolutePath | None = None
    """PEFT directory to begin from, of this rank, alpha and targets; null: the model as it is."""
    seed: int = 0
    """Seed of the initial A; B begins at 0."""

    @model_validator(mode="after")
    def _has_rank(self) -> Self:
        for key, value in (("path", self.path), ("targets", ", ".join(self.targets))):
            if value and not self.rank:
                raise ValueError(
                    f"rank must be 1 or more with {key}, got 0 with '{value}'; set it, or leave "
                    f"{key} out"
                )
        return self


class ModelConfig(Section):
    """The policy."""

    path: AbsolutePath
    """Directory of a Hugging Face model (config.json, safetensors, tokenizer)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameter and activation type; with bfloat16 the optimizer keeps float32 master weights."""
    ignored_config_fields: tuple[str, ...] = ()
    """More fields of config.json that do not change the model's output; any value is accepted."""
    lora: LoraConfig = LoraConfig()


class ParallelConfig(Section):
    """How Megatron shards the model; the data-parallel size is the rest of the world size."""

    tensor: int = Field(1, ge=1)
    """Tensor-parallel size: ranks that share every layer."""
    sequence: bool = False
    """Sequence parallelism: tensor ranks also split the tokens between GEMMs (needs tensor > 1)."""
    pipeline: int = Field(1, ge=1)
    """Pipeline-parallel size: stages of successive layers."""
    virtual_pipeline: int = Field(1, ge=1)
    """Chunks of layers of each stage (interleaved schedule): smaller bubbles, more messages. Needs
    pipeline > 1."""
    context: int = Field(1, ge=1)
    """Context-parallel size: ranks that divide every sequence."""
    expert: int = Field(1, ge=1)
    """Expert-parallel size: ranks, of those that divide data and sequences, that divide the experts
    of a layer."""
    expert_tensor: int | None = Field(None, ge=1)
    """Tensor-parallel size of each expert (null: that of ``tensor``)."""
    timeout_s: float = Field(7200.0, gt=0)
    """Timeout of every process group. For a batch or an evaluation, ranks wait as long as rank 0
    does."""

    @property
    def expert_tensor_size(self) -> int:
        """Tensor-parallel size of each expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @model_validator(mode="after")
    def _sizes_go_together(self) -> Self:
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"virtual_pipeline needs pipeline > 1, got {self.virtual_pipeline} with 1; set it "
                "to 1, or raise pipeline"
            )
        return self


class MegatronConfig(Section):
    """Trade-offs of memory, communication and time; only ``fp8`` changes more than rounding."""

    overlap_grad_reduce: bool = False
    """Overlap the reduction of gradients with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the gathering of updated weights with the next forward pass (needs
    overlap_grad_reduce)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass: those inside attention (``selective``: pays
    only without flash attention), or all in a layer (``full``)."""
    recompute_layers: int = Field(1, ge=1)
    """Number of layers in a block whose input ``recompute: full`` keeps."""
    fp8: Literal["none", "e4m3", "hybrid"] = "none"
    """FP8 format of Transformer Engine's GEMMs."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    """Scaling of ``fp8``."""
    optimizer_offload_share: float = Field(0.0, ge=0, le=1)
    """Fraction of the optimizer state that is kept and updated in host memory (needs a GPU)."""

    @model_validator(mode="before")
    @classmethod
    def _is_not_batch_invariant(cls, values: Any) -> Any:
        if isinstance(values, dict) and "batch_invariant_mode" in values:
            raise ValueError(
                "batch_invariant_mode is not supported, got "
                f"{values['batch_invariant_mode']}: Megatron-core's kernels for it overwrite the "
                "weight gradients of earlier micro-batches; leave it out"
            )
        return values

    @model_validator(mode="after")
    def _settings_go_together(self) -> Self:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("overlap_param_gather needs overlap_grad_reduce; set both to true")
        return self


class OptimizerConfig(Section):
    """AdamW with Megatron's distributed optimizer."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate; 0 freezes the weights (a control)."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of a decaying schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after the warm-up."""
    warmup_updates: int = Field(0, ge=0)
    """Updates of linear warm-up."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Adam's first moment decay."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Adam's second moment decay."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = Field(1.0, gt=0)
    """Maximum global gradient norm."""
