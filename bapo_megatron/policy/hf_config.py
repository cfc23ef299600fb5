"""The architecture in a Hugging Face config.json, checked field by field.

Everything that would change what the model computes is either understood here or refused.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.check import check_heads, check_layers
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.runtime.files import parse_json, read_regular

if TYPE_CHECKING:
    from bapo_megatron.data.packing import SequenceFlops


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Frequency scaling of rotary embeddings, ``rope_type: llama3``."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


@dataclass(frozen=True, slots=True)
class HfConfig:
    """One dense decoder-only model: Qwen2/Qwen2.5, Qwen3 or Llama."""

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
    rope_scaling: Llama3Rope | None
    tied_embeddings: bool
    qkv_bias: bool
    """Biases on the query, key and value projections."""
    qk_norm: bool
    """RMSNorm over each head's query and key."""

    @property
    def sequence_flops(self) -> "SequenceFlops":
        """Operations of a forward pass: two per weight and token, and causal attention.

        Attention multiplies queries with keys and scores with values, half of the L² pairs each:
        2 · 2 · L²/2 · channels operations per layer. The embedding is a lookup.
        """
        from bapo_megatron.data.packing import SequenceFlops  # imports numpy

        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        projections = self.hidden_size * (2 * query + 2 * key + 3 * self.intermediate_size)
        weights = self.num_layers * projections + self.vocab_size * self.hidden_size
        return SequenceFlops(per_token=2 * weights, per_pair=2 * self.num_layers * query)

    @property
    def division_fields(self) -> dict[str, int]:
        """The config.json fields by which ``config.check`` checks a division."""
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


VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this. The padding is the same for every power of
two of tensor-parallel ranks up to 128, so that a checkpoint fits all of these layouts, and it keeps
the output GEMM aligned on a GPU."""


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Return the vocabulary size that the model allocates over all tensor-parallel ranks."""
    multiple = math.lcm(VOCAB_MULTIPLE, tensor)
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class _Family:
    """Traits that a ``model_type`` implies beyond its config.json."""

    architecture: str
    qkv_bias: bool
    qk_norm: bool


FAMILIES = {
    "qwen2": _Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False),
    "qwen3": _Family("Qwen3ForCausalLM", qkv_bias=False, qk_norm=True),
    "llama": _Family("LlamaForCausalLM", qkv_bias=False, qk_norm=False),
}

REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False, None),
    "chunk_size_feed_forward": (0, None),
}
"""Fields that change the computation, and the values this project computes (absent: the last)."""

READ_FIELDS = (
    *("architectures", "model_type", "layer_types", "tie_word_embeddings", "vocab_size"),
    *("hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)

_ROPE_NAMES = ("rope_parameters", "rope_scaling")
MAX_SIZES = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_position_embeddings": 1 << 31,
}
"""Limits far above any model, so that a damaged file is refused before it takes all memory."""

HARMLESS_FIELDS = (
    # Of a window that use_sliding_window and layer_types rule out.
    *("sliding_window", "max_window_layers"),
    # Of training from scratch, of generation, and of the file itself.
    *("initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("dtype", "torch_dtype", "transformers_version", "_name_or_path", "id2label", "label2id"),
    *("problem_type", "return_dict", "output_attentions", "output_hidden_states"),
)
"""Fields that do not change what the model computes."""


def read_fields(path: Path) -> dict[str, Any]:
    """Read the fields of a ``config.json``, whatever model it describes.

    Raises:
        ValueError: It is damaged or no JSON object; the message names the file.
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


def read_hf_config_file(path: Path) -> HfConfig:
    """Read and check a model's ``config.json``.

    Raises:
        OSError: It cannot be read.
        ValueError: It describes a model that is not supported; the message names the file, the
            field and the value.
    """
    fields = read_fields(path)
    try:
        return _understand(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _understand(fields: dict[str, Any]) -> HfConfig:
    """Translate the fields of config.json; errors name the field and its value."""
    family = FAMILIES.get(str(fields.get("model_type")))
    if family is None:
        raise _unsupported("model_type", fields.get("model_type"), f"one of {', '.join(FAMILIES)}")
    architectures = fields.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise _unsupported("architectures", architectures, f'["{family.architecture}"]')
    _refuse_other_computations(fields)
    hidden_size = _positive(fields, "hidden_size")
    num_heads = _positive(fields, "num_attention_heads")
    num_kv_heads = _positive(fields, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        divisor = f"a divisor of num_attention_heads {num_heads}"
        raise _unsupported("num_key_value_heads", num_kv_heads, divisor)
    rope_theta, rope_scaling = _rope(fields)
    return HfConfig(
        model_type=fields["model_type"],
        vocab_size=_positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(fields, "intermediate_size"),
        num_layers=_positive(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_positive(fields, "head_dim", hidden_size // num_heads),
        rms_norm_eps=_number("rms_norm_eps", fields.get("rms_norm_eps")),
        max_position_embeddings=_positive(fields, "max_position_embeddings"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tied_embeddings=_flag(fields, "tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )


def _refuse_other_computations(fields: dict[str, Any]) -> None:
    for name, allowed in REQUIRED_VALUES.items():
        if fields.get(name, allowed[-1]) not in allowed:
            raise _unsupported(name, fields[name], f"only {shown_value(allowed[0])}")
    kinds = fields.get("layer_types") or ["full_attention"]
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise _unsupported("layer_types", kinds, "only 'full_attention'")
    # A field that nobody here knows may be part of another architecture.
    known = {*REQUIRED_VALUES, *READ_FIELDS, *HARMLESS_FIELDS}
    for name, value in fields.items():
        if name not in known and value:
            raise ValueError(
                f"{name} is {shown_value(value)}, a field that is not known here and may change "
                "what the model computes; choose another model, or remove the field if it does not"
            )


def _rope(fields: dict[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Read both spellings: transformers 5 writes ``rope_parameters``, older ones two fields.

    Where a file has both, they must agree, since readers differ in which of them counts.
    """
    given = {name: fields[name] for name in _ROPE_NAMES if fields.get(name) is not None}
    for name, rope in given.items():
        if not isinstance(rope, dict):
            raise _unsupported(name, rope, "an object")
    places = {f"{name}.rope_theta": rope.get("rope_theta") for name, rope in given.items()}
    places = {"rope_theta": fields.get("rope_theta"), **places}
    found = {place: theta for place, theta in places.items() if theta is not None}
    thetas = {place: _number(place, theta) for place, theta in (found or places).items()}
    scalings = {name: _scaling(name, rope) for name, rope in given.items() if rope}
    return _agreed(thetas), _agreed(scalings) if scalings else None


def _scaling(name: str, rope: dict[str, Any]) -> Llama3Rope | None:
    partial = rope.get("partial_rotary_factor", 1)
    if partial != 1:
        raise _unsupported(f"{name}.partial_rotary_factor", partial, "only 1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise _unsupported(f"{name}.rope_type", kind, "'default' or 'llama3'")
    values = {f: _number(f"{name}.{f}", rope.get(f)) for f in Llama3Rope.__dataclass_fields__}
    return Llama3Rope(**values)


def _agreed[T](values: dict[str, T]) -> T:
    """Return the value that all places have."""
    (first, value), *others = values.items()
    for place, other in others:
        if other != value:
            raise ValueError(
                f"{place} means {shown_value(other)}, but {first} {shown_value(value)}; correct "
                "one of them"
            )
    return value


def _positive(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = default if fields.get(name) is None else fields[name]
    if type(value) is not int or not 1 <= value <= MAX_SIZES[name]:
        raise _unsupported(name, value, f"an integer from 1 to {MAX_SIZES[name]}")
    return value


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise _unsupported(name, value, "true or false")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise _unsupported(name, value, "a number above 0")
    return float(value)


def _unsupported(field: str, value: Any, supported: str) -> ValueError:
    return ValueError(
        f"{field} is {shown_value(value)}, but {supported} is supported; choose another model"
    )
