"""``bapo-megatron bounds``: the bound search over the tokens in a file, by the code that trains.

Shape legend: T = tokens of the file.
"""

import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer
from rich.console import Console
from rich.table import Table

from bapo_megatron.commands.options import JsonOption
from bapo_megatron.config.load import parse_section
from bapo_megatron.config.schema import AlgorithmConfig, BapoConfig
from bapo_megatron.ops.contributions import BoundSearch, count_tokens
from bapo_megatron.ops.extension import SearchResult
from bapo_megatron.telemetry.console import uncut_console

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]

COLUMNS = ("logprob", "behaviour_logprob", "advantage")
"""Columns that a file must have; ``mask`` may be left out where every token counts."""


def command(
    file: Annotated[Path, typer.Argument(help="npz or parquet with the tokens of one update.")],
    preset: Annotated[str, typer.Option(help="paper or recipe")] = "paper",
    contribution: Annotated[
        str | None, typer.Option(help="surrogate (Eq. 8) or gradient (Eq. 5)")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Search the clip bounds for the tokens in FILE, by the code that trains.

    FILE has the columns logprob, behaviour_logprob, advantage and, optionally, mask.
    """
    given = {"preset": preset} | ({"contribution": contribution} if contribution else {})
    # The preset sets dual_clip as well, which is beside the search's own section.
    config = parse_section(AlgorithmConfig, {"bapo": given}, place="options")
    report = bounds_from_file(file, config.bapo, config.dual_clip)
    if as_json:
        typer.echo(json.dumps(report.to_json_dict(), indent=2))
    else:
        report.print(uncut_console())


@dataclass(frozen=True, slots=True)
class BoundsReport:
    """What the bound search found in a file."""

    result: SearchResult
    """The chosen pair, and the whole path in the order of the search."""
    positive_tokens: int
    """Tokens with mask 1 and A > 0."""
    negative_tokens: int
    """Tokens with mask 1 and A < 0."""

    def to_json_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "clip_low": _shortest(self.result.clip_low),
            "clip_high": _shortest(self.result.clip_high),
            "positive_share_start": self.result.positive_share_start,
            "positive_share": self.result.positive_share,
            "exit": self.result.exit,
            "candidates": [
                {
                    "clip_low": _shortest(pair.clip_low),
                    "clip_high": _shortest(pair.clip_high),
                    "positive": pair.positive,
                    "negative": pair.negative,
                    "positive_share": pair.positive_share,
                    "passes": pair.passes,
                }
                for pair in self.result.candidates
            ],
        }

    def print(self, console: Console) -> None:
        """Print the path as a table, the chosen pair marked, and the outcome below."""
        result = self.result
        table = Table("", "c_low", "c_high", "P", "N", "P/(P+N)", "target")
        for index, pair in enumerate(result.candidates):
            is_chosen = index == result.index
            table.add_row(
                "→" if is_chosen else "",
                f"{pair.clip_low:g}",
                f"{pair.clip_high:g}",
                f"{pair.positive:.6g}",
                f"{pair.negative:.6g}",
                f"{pair.positive_share:.6f}",
                "reached" if pair.passes else "",
                style="bold" if is_chosen else None,
            )
        console.print(table)
        console.print(
            f"{result.exit}: c_low {result.clip_low:g}, c_high {result.clip_high:g}; positive "
            f"share {result.positive_share_start:.4f} at the start, {result.positive_share:.4f} at "
            f"the chosen pair; {self.positive_tokens} positive and {self.negative_tokens} negative "
            "tokens",
            highlight=False,
        )


def bounds_from_file(
    path: Path, config: BapoConfig, dual_clip: float | None = None
) -> BoundsReport:
    """Search the bounds for the tokens of one update in a file.

    Args:
        path: ``.npz`` or ``.parquet`` with columns logprob, behaviour_logprob and advantage, each
            [T] of numbers, and optionally mask (1: the token counts, 0: it does not).
        config: The bound search.
        dual_clip: ``algorithm.dual_clip``; used by ``contribution: gradient`` only.

    Raises:
        ValueError: A column is missing or misshapen, or a value is not finite or too large.
        OSError: The file cannot be read.
    """
    columns = _read_tokens(path)
    search = BoundSearch(config, dual_clip)
    table = search.contributions(*(torch.from_numpy(column) for column in columns.values()))
    counted = count_tokens(table)
    if counted.out_of_range_tokens:
        _fail_out_of_range(path, columns, config)
    result = search.path(table)
    return BoundsReport(result, counted.positive_tokens, counted.negative_tokens)


def _read_tokens(path: Path) -> dict[str, FloatArray]:
    """The four columns as [T] float32, checked, in the order of ``contributions``."""
    raw, found = _read_columns(path)
    for name in COLUMNS:
        if name not in raw:
            raise ValueError(
                f"{path}: column '{name}' is missing, found {', '.join(sorted(found)) or 'none'}; "
                f"write the columns {', '.join(COLUMNS)} and optionally mask, one row per token "
                "(the dumps in rollouts/ have no log-probs of the trainer)"
            )
    length = raw[COLUMNS[0]].shape[0] if raw[COLUMNS[0]].ndim else 0
    raw.setdefault("mask", np.ones(length, dtype=np.float32))
    columns = {name: _to_float32(path, name, raw[name], length) for name in (*COLUMNS, "mask")}
    mask = columns["mask"]
    for index in np.flatnonzero((mask != 0) & (mask != 1))[:1]:
        raise ValueError(
            f"{path}: mask[{index}] is {mask[index]}, must be 0 or 1; repair the column"
        )
    for name in COLUMNS:
        for index in np.flatnonzero((mask == 1) & ~np.isfinite(columns[name]))[:1]:
            raise ValueError(
                f"{path}: {name}[{index}] is {raw[name][index]}, must be a finite float32; "
                "repair the value or set its mask to 0"
            )
    return columns


def _read_columns(path: Path) -> tuple[dict[str, Array], list[str]]:
    """The wanted columns that exist, and the names of all columns."""
    wanted = (*COLUMNS, "mask")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {name: archive[name] for name in wanted if name in archive}, archive.files
        if path.suffix == ".parquet":
            found = list(pq.read_schema(path).names)
            names = [name for name in found if name in wanted]
            table = pq.read_table(path, columns=names)
            return {name: table[name].to_numpy() for name in names}, found
    except (zipfile.BadZipFile, zlib.error, pa.ArrowInvalid, EOFError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); write the file again") from error
    raise ValueError(f"{path}: must end in .npz or .parquet; save the columns as one of these")


def _to_float32(path: Path, name: str, column: Array, length: int) -> FloatArray:
    if column.dtype.kind not in "fiub":
        raise ValueError(
            f"{path}: column '{name}' must hold numbers, got {column.dtype}; flatten "
            "responses into one row per token"
        )
    if column.shape != (length,):
        raise ValueError(
            f"{path}: column '{name}' must have shape [{length}] like '{COLUMNS[0]}', got "
            f"{list(column.shape)}; write one value per token"
        )
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(column, dtype=np.float32)


def _fail_out_of_range(path: Path, columns: dict[str, FloatArray], config: BapoConfig) -> None:
    advantage = columns["advantage"].astype(np.float64)
    weight = np.ones_like(advantage)
    if config.weight == "behaviour_prob":
        weight = np.exp(columns["behaviour_logprob"].astype(np.float64))
    size = np.where(columns["mask"] == 1, np.abs(weight * advantage), 0.0)
    index = int(np.argmax(size))
    raise ValueError(
        f"{path}: advantage[{index}] is {advantage[index]:g}, |weight · advantage| must stay below "
        "256; scale the advantages down"
    )


def _shortest(bound: float) -> float:
    """The shortest decimal of this float32: 0.6, not 0.6000000238418579."""
    return float(str(np.float32(bound)))
