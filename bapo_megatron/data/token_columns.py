"""Token columns: what scorers or engines compute for each sampled token, declared once.

``Sample.columns`` [Q], ``MicroBatch.columns`` [T] and ``TokenBatch.columns`` [T] hold a column
under its name. Dumps, checkpoints, packing, context parallelism and the report's reader follow the
declaration: a new column needs an entry here and something that fills it.

Shape legend: Q = tokens of a response that the policy sampled, T = those of a micro-batch,
K = values per token of a wide column.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bapo_megatron.config.schema import AlgorithmConfig


class Sampled(Protocol):
    """Sampled tokens and their columns: a ``Sample``, or the ``Completion`` of a call."""

    @property
    def num_sampled(self) -> int:
        """Q."""

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """[Q] or [Q, K] by name."""


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """One value per sampled token, or K of them."""

    name: str
    dtype: type[np.float32 | np.int32]
    default: float
    """Value of tokens for which nothing was computed."""
    filled_by: str
    """Section of the configuration that needs it, and whose scorer or engine fills it."""
    label: str = ""
    """Name in the report's reader and in messages; empty: not shown."""
    is_wide: bool = False
    """Whether it is [Q, K]; K is the same in all samples of a batch."""
    is_sampled: bool = False
    """Whether the engine fills it while it samples, so that unfinished calls have it too."""

    def of(self, tokens: Sampled) -> np.ndarray:
        """Return its values, [Q] or [Q, K]; the default where the tokens have none."""
        values = tokens.columns.get(self.name)
        if values is None:
            shape = (tokens.num_sampled, 0) if self.is_wide else (tokens.num_sampled,)
            values = np.full(shape, self.default, self.dtype)
        return values


DEMONSTRATION = "demonstration_weight"
"""Weight of −ℓ in the loss of the update, [T], in micro-batches of demonstrations mixed into
updates. Not in files."""
REFERENCE, TEACHER = "reference_logprob", "teacher_logprob"
TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"
SAMPLER_TOP_IDS, SAMPLER_TOP_LOGPROBS = "sampler_top_ids", "sampler_top_logprobs"
TEACHER_HIDDEN = "teacher_hidden"
"""[T, H] input of the teacher's head: on the last stage only, never dumped, so not declared."""

_CENTERING = "algorithm.centering"
_DECLARED = (
    TokenColumn(REFERENCE, np.float32, np.nan, "algorithm.kl", "log-prob of the reference"),
    TokenColumn(TEACHER, np.float32, np.nan, "algorithm.distillation", "log-prob of the teacher"),
    TokenColumn(TEACHER_TOP_IDS, np.int32, -1, "algorithm.distillation", is_wide=True),
    TokenColumn(TEACHER_TOP_LOGPROBS, np.float32, np.nan, "algorithm.distillation", is_wide=True),
    TokenColumn(SAMPLER_TOP_IDS, np.int32, -1, _CENTERING, is_wide=True, is_sampled=True),
    TokenColumn(
        SAMPLER_TOP_LOGPROBS, np.float32, np.nan, _CENTERING, is_wide=True, is_sampled=True
    ),
)
COLUMNS: dict[str, TokenColumn] = {column.name: column for column in _DECLARED}
"""All of them, by name. Log-probs are at the sampling temperature."""


def scored(config: AlgorithmConfig) -> dict[str, tuple[type, int | None]]:
    """Return the columns that every batch of a run has: dtype, and K of a wide one, by name."""
    kinds: dict[str, tuple[type, int | None]] = {}
    for name, column in COLUMNS.items():
        section = getattr(config, column.filled_by.removeprefix("algorithm."))
        width = section.num_top if column.is_wide else None
        if section.is_used and width != 0:
            kinds[name] = column.dtype, width
    return kinds


def present(parts: Iterable[Sampled]) -> list[TokenColumn]:
    """Return the columns that any of the parts has."""
    names = {name for part in parts for name in part.columns}
    return [column for name, column in COLUMNS.items() if name in names]


def concatenated(column: TokenColumn, parts: Sequence[Sampled]) -> np.ndarray:
    """Concatenate a column, [T] or [T, K]; tokens for which nothing is known have its default."""
    values = [column.of(part) for part in parts]
    if column.is_wide:
        width = max((value.shape[1] for value in values), default=0)
        values = [
            value if value.shape[1] == width else np.full((len(value), width), column.default)
            for value in values
        ]
        return np.concatenate([np.empty((0, width)), *values]).astype(column.dtype)
    return np.concatenate([np.empty(0, column.dtype), *values])


def row_columns() -> dict[str, tuple[Any, Callable[[Sampled], Any]]]:
    """Return the Arrow type and the values of each column, for a file with a row per sample."""
    import pyarrow as pa  # training without dumps does not need it

    kinds = {np.float32: pa.float32(), np.int32: pa.int32()}
    return {
        name: (pa.list_(kinds[column.dtype]), _flat(column)) for name, column in COLUMNS.items()
    }


def _flat(column: TokenColumn) -> Callable[[Sampled], np.ndarray]:
    return lambda tokens: column.of(tokens).reshape(-1)


def read_columns(row: dict[str, Any], num_sampled: int) -> dict[str, np.ndarray]:
    """Read the columns of a sample of ``num_sampled`` tokens from a row of such a file.

    Raises:
        ValueError: A column's length is not a multiple of ``num_sampled``, or not equal to it.
    """
    columns = {}
    for name, column in COLUMNS.items():
        if (values := row.get(name)) is None:
            continue
        width = len(values) // max(num_sampled, 1) if column.is_wide else 1
        if len(values) != num_sampled * width:
            raise ValueError(f"{name}: {len(values)} values for {num_sampled} sampled tokens")
        columns[name] = values.reshape(num_sampled, width) if column.is_wide else values
    return columns
