"""The architecture in a Hugging Face config.json, checked field by field.

Everything that would change what the model computes is either understood here or refused.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from bapo_megatron.config.check import check_heads, check_layers
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.teacher import TEACHER_KEY
from bapo_megatron.runtime.calls import decode, shown_value
from bapo_megatron.runtime.files import parse_json, read_regular

if TYPE_CHECKING:
    from bapo_megatron.data.packing import SequenceFlops

Positive = Annotated[float, Field(gt=0, lt=1e30, strict=True)]


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Frequency scaling of rotary embeddings, ``rope_type: llama3``."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Positive


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al. 2023, arXiv 2309.00071), ``rope_type: yarn``: frequencies and attention."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    factor: Annotated[float, Field(ge=1, lt=1e30, strict=True)]
    original_max_position_embeddings: Positive
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: Annotated[bool, Field(strict=True)] = True
    """Whether the range of interpolated channels ends at whole numbers."""

    @property
    def attention_factor(self) -> float:
        """Factor of the cosines and sines of queries and of keys."""
        numerator, denominator = self.mscale, self.mscale_all_dim
        if numerator is None or denominator is None:
            numerator, denominator = 1.0, 0.0
        log = 0.1 * math.log(self.factor)
        return (1 + numerator * log) / (1 + denominator * log)


@dataclass(frozen=True, slots=True)
class HfConfig:
    """One dense decoder-only model: Qwen2/Qwen2.5, Qwen3, Llama or Mistral."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Llama3Rope | YarnRope | None
    tied_embeddings: bool
    qkv_bias: bool
    """Biases on the query, key and value projections."""
    qk_norm: bool
    """RMSNorm over each head's query and key."""
    output_bias: bool = False
    """Bias on the output projection of attention."""

    @property
    def sequence_flops(self) -> "SequenceFlops":
        """FLOPs of a forward pass: two per weight and token, and causal attention.

        Attention multiplies queries with keys and scores with values, half of the L² pairs each:
        2 · 2 · L²/2 · channels FLOPs per layer. The embedding is a lookup.
        """
        from bapo_megatron.data.packing import SequenceFlops  # imports numpy

        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        projections = self.hidden_size * (2 * query + 2 * key + 3 * self.intermediate_size)
        weights = self.num_layers * projections + self.vocab_size * self.hidden_size
        return SequenceFlops(per_token=2 * weights, per_pair=2 * self.num_layers * query)

    @property
    def division_fields(self) -> dict[str, int]:
        """The config.json fields by which ``config.check`` checks a layout."""
        return {
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "num_hidden_layers": self.num_layers,
        }


def check_division(hf: HfConfig, parallel: ParallelConfig) -> None:
    """Refuse a layout that the model cannot be divided into.

    The vocabulary is padded, so that it always divides.

    Raises:
        ConfigError: Key, rule, value and remedy.
    """
    check_heads(hf.division_fields, "parallel.tensor", parallel.tensor)
    if hf.intermediate_size % parallel.tensor:
        raise ConfigError(
            f"parallel.tensor: must divide the model's {hf.intermediate_size} intermediate "
            f"channels, got {parallel.tensor}; choose a divisor"
        )
    check_layers(hf.division_fields, parallel)


def check_frozen_model(config: RunConfig, key: str, hf: HfConfig, policy: HfConfig) -> None:
    """Refuse a frozen model that the trainer cannot build beside the policy.

    ``key``: its section of the configuration.

    Raises:
        ConfigError: It does not divide over the layout, cannot get the policy's weights though it
            is to, or is a teacher with another vocabulary than its loss needs.
    """
    path, distillation = attrgetter(f"{key}.path")(config), config.algorithm.distillation
    try:
        check_division(hf, config.parallel)
    except ConfigError as error:
        raise ConfigError(f"{key}.path: '{path}': {error}") from None
    if key == "algorithm.kl.reference" and config.algorithm.kl.reference.update_every:
        differing = [
            field.name
            for field in fields(HfConfig)
            if getattr(hf, field.name) != getattr(policy, field.name)
            # No layer computes with them.
            and field.name not in ("model_type", "max_position_embeddings")
        ]
        if differing:
            raise ConfigError(
                f"{key}.path: must be a model like the policy with update_every above 0, since it "
                f"gets the policy's weights, got another {', '.join(differing)} in '{path}'; "
                "choose another reference, or update_every: 0"
            )
    compares_vocabularies = key == TEACHER_KEY and distillation.is_over_vocabulary
    if compares_vocabularies and hf.vocab_size != policy.vocab_size:
        raise ConfigError(
            f"{key}.path: must have the policy's vocab_size {policy.vocab_size} with "
            f"algorithm.distillation.loss: {distillation.loss}, got {hf.vocab_size}; choose "
            "another teacher, or loss: tokens"
        )


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Return the vocabulary size that the model allocates over all tensor-parallel ranks.

    A multiple of 128: the same for every power of two up to 128 ranks, so that a checkpoint fits
    all of these layouts, and aligned for the output GEMM on a GPU.
    """
    multiple = math.lcm(128, tensor)
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class _Family:
    """Traits that a ``model_type`` implies beyond its config.json."""

    architecture: str
    qkv_bias: bool
    qk_norm: bool
    has_attention_bias: bool = False
    """Whether ``attention_bias: true`` adds biases to all four projections of attention."""


FAMILIES = {
    "qwen2": _Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False),
    "qwen3": _Family("Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, has_attention_bias=True),
    "llama": _Family("LlamaForCausalLM", qkv_bias=False, qk_norm=False, has_attention_bias=True),
    "mistral": _Family("MistralForCausalLM", qkv_bias=False, qk_norm=False),
}

DEFAULT_ROPE_THETA = 10_000.0
"""Base of rotary embeddings where config.json gives none, as in transformers."""


class RopeJson(BaseModel):
    """The fields read from ``rope_parameters`` or ``rope_scaling``."""

    model_config = ConfigDict(strict=True, extra="allow")
    rope_theta: Positive | None = None
    rope_type: Literal["default", "llama3", "yarn"] = Field(
        "default", validation_alias=AliasChoices("rope_type", "type")
    )
    partial_rotary_factor: Annotated[float, Field(ge=1, le=1)] = 1
    attention_factor: Positive | None = None

    def scaling(self, max_position_embeddings: int) -> Llama3Rope | YarnRope | None:
        """Return the scaling of frequencies.

        Raises:
            ValueError: A field of it is missing, or engines would understand it differently.
        """
        fields = {name: value for name, value in (self.model_extra or {}).items() if name != "type"}
        if self.rope_type == "default":
            return None
        if self.rope_type == "llama3":
            return decode(Llama3Rope, fields)
        original = {"original_max_position_embeddings": max_position_embeddings}
        yarn = decode(YarnRope, original | fields)
        actual, expected = self.attention_factor, yarn.attention_factor
        if actual is not None and not math.isclose(actual, expected, rel_tol=1e-6):
            raise ValueError(
                f"'attention_factor' must be {expected:.7g}, which follows from 'factor' and "
                f"'mscale' and is what SGLang uses, got {actual}"
            )
        return yarn


Heads = Annotated[int, Field(ge=1, le=1 << 12)]


class ConfigJson(BaseModel):
    """The fields read from config.json.

    No other field may be on, except ``HARMLESS_FIELDS`` and ``model.ignored_config_fields``.
    Limits are far above any model, so that a damaged file is refused before it takes all memory.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    model_type: str = Field(pattern=rf"^({'|'.join(FAMILIES)})$")
    architectures: list[str] | None = None
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)]
    hidden_size: Annotated[int, Field(ge=1, le=1 << 17)]
    intermediate_size: Annotated[int, Field(ge=1, le=1 << 20)]
    num_hidden_layers: Annotated[int, Field(ge=1, le=1 << 10)]
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Heads | None = None
    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 31)]
    rms_norm_eps: Positive
    tie_word_embeddings: bool = False
    rope_theta: Positive | None = None
    rope_parameters: RopeJson | None = None
    rope_scaling: RopeJson | None = None
    hidden_act: Literal["silu"] = "silu"
    partial_rotary_factor: Annotated[float, Field(ge=1, le=1)] | None = None
    pretraining_tp: Literal[1] | None = None
    layer_types: list[Literal["full_attention"]] | None = None
    attention_bias: bool | None = None
    sliding_window: int | None = None


HARMLESS_FIELDS = (
    # For a window that use_sliding_window and layer_types rule out.
    "max_window_layers",
    # Training from scratch, generation, and the file itself.
    *("initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("unk_token_id", "is_llama_config", "transformers.js_config", "_model_name_or_path"),
    *("dtype", "torch_dtype", "transformers_version", "_name_or_path", "id2label", "label2id"),
    *("problem_type", "return_dict", "output_attentions", "output_hidden_states"),
    *("_attn_implementation_autoset", "unsloth_fixed", "unsloth_version"),
)
"""Fields that do not change what the model computes."""


def read_fields(path: Path) -> dict[str, Any]:
    """Read the fields of a ``config.json``, whatever model it describes.

    Raises:
        ValueError: It is damaged or not a JSON object; the message names the file.
        OSError: It cannot be read.
    """
    try:
        fields = parse_json(read_regular(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; restore the file") from error
    if not isinstance(fields, dict):
        raise ValueError(
            f"{path}: must hold a JSON object, got {shown_value(fields)}; restore the file"
        )
    return fields


def read_hf_config_file(path: Path, ignored_fields: Collection[str] = ()) -> HfConfig:
    """Read and check a model's ``config.json``.

    ``ignored_fields`` (``model.ignored_config_fields``) may have any value.

    Raises:
        ConfigError: One of ``ignored_fields`` is a field that is read.
        OSError: It cannot be read.
        ValueError: It describes a model that is not supported; the message names the file, the
            field and the value.
    """
    for name in ignored_fields:
        if name in ConfigJson.model_fields:
            raise ConfigError(
                f"model.ignored_config_fields: must not name a field that is read, got '{name}'; "
                "remove it"
            )
    fields = {k: value for k, value in read_fields(path).items() if k not in ignored_fields}
    try:
        return _understand(decode(ConfigJson, fields))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; choose another model, or correct the file") from None


def _understand(fields: ConfigJson) -> HfConfig:
    family, num_heads = FAMILIES[fields.model_type], fields.num_attention_heads
    if (fields.architectures or [family.architecture]) != [family.architecture]:
        raise ValueError(
            f"'architectures' must be {shown_value([family.architecture])}, got "
            f"{shown_value(fields.architectures)}"
        )
    # Other fields may change the architecture: biases, windows, dropout, quantization.
    for name, value in (fields.model_extra or {}).items():
        if name not in HARMLESS_FIELDS and value:
            raise ValueError(
                f"{name!r} is unknown and may change what the model computes, got "
                f"{shown_value(value)}; if it does not, name it in model.ignored_config_fields "
                "(convert and init: --ignore-field)"
            )
    if fields.attention_bias and not family.has_attention_bias:
        raise ValueError(
            f"'attention_bias' must be false with model_type {fields.model_type}, got true"
        )
    # Qwen's window needs use_sliding_window, Mistral's is there by default.
    has_window = fields.sliding_window or "sliding_window" not in fields.model_fields_set
    if fields.model_type == "mistral" and has_window:
        raise ValueError(
            "'sliding_window' must be null with model_type mistral, which has a window by default, "
            f"got {fields.sliding_window or 'none'}"
        )
    num_kv_heads = fields.num_key_value_heads or num_heads
    head_dim = fields.head_dim or fields.hidden_size // num_heads
    if num_heads % num_kv_heads or not head_dim:
        raise ValueError(
            f"'num_attention_heads' must be a multiple of 'num_key_value_heads' {num_kv_heads} and "
            f"at most 'hidden_size' {fields.hidden_size}, got {num_heads}"
        )
    # transformers 5 writes rope_parameters, older ones two fields; readers differ in which counts.
    ropes = [rope for rope in (fields.rope_parameters, fields.rope_scaling) if rope]
    bases = [fields.rope_theta, *(rope.rope_theta for rope in ropes)]
    thetas = {theta for theta in bases if theta is not None} or {DEFAULT_ROPE_THETA}
    positions = fields.max_position_embeddings
    scalings = {rope.scaling(positions) for rope in ropes if rope.model_fields_set}
    if len(thetas) > 1 or len(scalings) > 1:
        raise ValueError(
            "'rope_theta', 'rope_parameters' and 'rope_scaling' must give one base and one "
            f"scaling, got {shown_value(sorted(thetas))} and {shown_value(list(scalings))}"
        )
    return HfConfig(
        model_type=fields.model_type,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.rms_norm_eps,
        max_position_embeddings=fields.max_position_embeddings,
        rope_theta=thetas.pop(),
        rope_scaling=scalings.pop() if scalings else None,
        tied_embeddings=fields.tie_word_embeddings,
        qkv_bias=family.qkv_bias or bool(fields.attention_bias),
        qk_norm=family.qk_norm,
        output_bias=bool(fields.attention_bias),
    )
