"""The experts that an engine chose for the tokens of a batch: a file beside its dump.

Every rank gets the whole dump, but reads only the rows of its own micro-batches here, so that 4
million tokens of a model with 48 layers and 8 experts per token (1.5 GB) are in no rank's memory.
The file is a safetensors tensor ``routes``, [ΣT, L · K] in the order of the batch's sequences.

Shape legend: P = prompt tokens of a sequence, R = its response tokens, T = P + R, L = layers of the
model, M = those of them that a rank wants, K = experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.runtime.files import atomic_write_bytes
from bapo_megatron.types import Sample

FREE = -1
"""In place of an expert: the engine's choice is not known, and the trainer's router chooses."""
_NAME = "routes"
_REMEDY = "write the dump again, or set algorithm.router_replay=none"


def routes_path(directory: Path, step: int) -> Path:
    """Return where the routes of a step's batch are, in a run's directory of dumps."""
    return directory / "routes" / f"step_{step:06d}.safetensors"


def narrowed(routes: np.ndarray) -> np.ndarray:
    """Return routes as int8 if no expert is above 127, else int16; perhaps the same array."""
    dtype = np.int16 if routes.max(initial=0) > np.iinfo(np.int8).max else np.int8
    return routes.astype(dtype, copy=False)


def write_routes(path: Path, sequences: Sequence[Sample]) -> None:
    """Write the routes of a batch's sequences, complete or not at all.

    Raises:
        ValueError: No sequence has any, or one has those of another model.
        OSError: The file cannot be written.
    """
    from safetensors.numpy import save

    widths = {s.routes.shape[1] for s in sequences if s.routes is not None}
    if not widths:
        raise ValueError(
            "algorithm.router_replay: rollout needs an engine that returns the experts of tokens, "
            "got none for any; set it to none, or use another engine"
        )
    parts: list[np.ndarray] = []
    for sequence in sequences:
        num_tokens = sequence.sequence_tokens
        # An episode may fail before its first token, and a server after the last one.
        known = np.empty((0, max(widths)), np.int8) if sequence.routes is None else sequence.routes
        if len(known) > num_tokens or len(widths) > 1:
            raise ValueError(
                f"{sequence.place}: the engine returned "
                f"{sorted(widths)} experts per token for {len(known)} of {num_tokens} tokens; all "
                "engines must sample with model.path"
            )
        parts += [known, np.full((num_tokens - len(known), max(widths)), FREE, np.int8)]
    atomic_write_bytes(path, save({_NAME: narrowed(np.concatenate(parts))}))


@dataclass(frozen=True, slots=True)
class RouteFiles:
    """The route files of a run's dumps, as one rank reads them."""

    directory: Path
    """Directory of the dumps."""
    num_layers: int
    """L."""
    num_experts: int
    per_token: int
    """K."""
    layers: tuple[int, ...]
    """[M], from 0."""

    def open(self, step: int, sequences: Sequence[Sample]) -> "BatchRoutes":
        """Open the file of a step's batch, which has these sequences.

        Raises:
            ValueError: It is missing, damaged, or of another batch or model.
        """
        from safetensors import SafetensorError, safe_open

        path = routes_path(self.directory, step)
        lengths = [sequence.sequence_tokens for sequence in sequences]
        expected = [sum(lengths), self.num_layers * self.per_token]
        try:
            file: Any = safe_open(path, framework="numpy")
            rows = file.get_slice(_NAME)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); {_REMEDY}") from error
        if (shape := rows.get_shape()) != expected:
            raise ValueError(
                f"{path}: must have {expected[1]} experts for each of the batch's {expected[0]} "
                f"tokens, got {shape}; {_REMEDY}"
            )
        return BatchRoutes(self, path, rows, [0, *accumulate(lengths)])


@dataclass(frozen=True, slots=True)
class BatchRoutes:
    """The routes of one batch; made by ``RouteFiles.open``."""

    files: RouteFiles
    path: Path
    _rows: Any
    _starts: Sequence[int] = field(repr=False)

    def of(self, sequence: int) -> np.ndarray:
        """Read the routes of a sequence, [T, M, K] int8 or int16.

        Raises:
            ValueError: A token has an expert twice, or one that the model lacks.
        """
        first, end = self._starts[sequence], self._starts[sequence + 1]
        size = (end - first, self.files.num_layers, self.files.per_token)
        whole: np.ndarray = self._rows[first:end].reshape(size)
        routes = whole[:, list(self.files.layers)]
        ordered = np.sort(routes, axis=-1)
        is_free = (routes == FREE).all(axis=-1)
        is_fit = (ordered[..., 0] >= 0) & (ordered[..., -1] < self.files.num_experts)
        is_fit &= (ordered[..., 1:] != ordered[..., :-1]).all(axis=-1)
        if not (is_free | is_fit).all():
            row, layer = np.argwhere(~(is_free | is_fit))[0].tolist()
            raise ValueError(
                f"{self.path}: token {row} of sequence {sequence} in layer "
                f"{self.files.layers[layer]}: must have {self.files.per_token} different experts "
                f"from 0 to {self.files.num_experts - 1}, got {routes[row, layer].tolist()}; "
                f"{_REMEDY}"
            )
        return routes
