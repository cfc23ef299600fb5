"""``bapo-megatron bounds``: the trainer's bound search on the tokens in a file.

Shape legend: T = tokens of the file.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
import typer
from rich.console import Console

from bapo_megatron.algorithm.objectives.bapo import BapoConfig
from bapo_megatron.commands.options import JsonOption
from bapo_megatron.config.load import parse_section
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.errors import first_line
from bapo_megatron.ops.contributions import TokenCounts, count_tokens
from bapo_megatron.ops.extension import SearchResult
from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.runtime.files import open_regular
from bapo_megatron.telemetry.console import print_table, uncut_console

COLUMNS = ("logprob", "behaviour_logprob", "advantage")
"""Required columns; ``mask`` may be left out if every token counts."""
_RESULT_FIELDS = ("clip_low", "clip_high", "positive_share_start", "positive_share", "exit")
_CANDIDATE_FIELDS = (*_RESULT_FIELDS[:2], "positive", "negative", "positive_share", "passes")

_NEAR_ROWS = 4
"""Rows printed from the start on, and on each side of the chosen pair."""


def command(
    file: Annotated[Path, typer.Argument(help="npz or parquet with the tokens of one update.")],
    preset: Annotated[str, typer.Option(help="paper or recipe")] = "paper",
    contribution: Annotated[
        str | None, typer.Option(help="surrogate (Eq. 8) or gradient (Eq. 5)")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Search the clip bounds for the tokens in FILE, with the trainer's code.

    FILE has the columns logprob, behaviour_logprob, advantage and, optionally, mask.
    """
    options = {"preset": preset} | ({"contribution": contribution} if contribution else {})
    # The preset also sets dual_clip, which is outside the section ``bapo``.
    config = parse_section(AlgorithmConfig, {"bapo": options}, place="options")
    bapo = config.options(BapoConfig)
    result, counts = bounds_from_file(file, bapo, config.dual_clip)
    if as_json:
        typer.echo(json.dumps(to_json_dict(result), indent=2))
    else:
        print_search(result, counts, bapo.target, uncut_console())


def to_json_dict(result: SearchResult) -> dict[str, Any]:
    """Return what ``--json`` prints: the chosen pair, and the candidates in search order."""
    candidates = [_fields(pair, _CANDIDATE_FIELDS) for pair in result.candidates]
    return _fields(result, _RESULT_FIELDS) | {"candidates": candidates}


def _fields(record: Any, names: Sequence[str]) -> dict[str, Any]:
    """Fields by name; bounds as the shortest decimal of their float32: 0.6, not 0.60000002384."""
    values = {name: getattr(record, name) for name in names}
    bounds = {name: float(str(np.float32(values[name]))) for name in ("clip_low", "clip_high")}
    return values | bounds


def print_search(
    result: SearchResult, counts: TokenCounts, target: float, console: Console
) -> None:
    """Print the outcome, then the first pairs and those around the chosen one."""
    console.print(
        f"{result.exit}: c_low {result.clip_low:g}, c_high {result.clip_high:g}; positive "
        f"share {result.positive_share_start:.4f} at the start, {result.positive_share:.4f} at the "
        f"chosen pair; {counts.positive_tokens} positive and {counts.negative_tokens} negative "
        f"tokens; {len(result.candidates)} pairs were tried (all: --json), among them",
        highlight=False,
    )
    headings = ("", "c_low", "c_high", "P", "N", "P/(P+N)", f"target {target:g}")
    rows = [
        (
            "→" if index == result.index else "",
            f"{pair.clip_low:g}",
            f"{pair.clip_high:g}",
            f"{pair.positive:.6g}",
            f"{pair.negative:.6g}",
            f"{pair.positive_share:.6f}",
            "reached" if pair.passes else "",
        )
        for index, pair in enumerate(result.candidates)
        if index < _NEAR_ROWS or abs(index - result.index) < _NEAR_ROWS
    ]
    print_table(console, "Search path", headings, rows, num_left=1)


def bounds_from_file(
    path: Path, config: BapoConfig, dual_clip: float | None = None
) -> tuple[SearchResult, TokenCounts]:
    """Search the bounds for the tokens of one update in a file.

    ``path`` is ``.npz`` or ``.parquet`` with columns logprob, behaviour_logprob and advantage, [T]
    numbers each, and optionally mask (1: the token counts, 0: it does not). ``dual_clip`` is used
    by ``contribution: gradient`` only.

    Raises:
        ValueError: A column is missing or misshapen, or a value is not finite or too large.
        OSError: The file cannot be read.
    """
    columns = _read_tokens(path)
    search = config.search(dual_clip)
    table = search.contributions(*(torch.from_numpy(column) for column in columns.values()))
    counts = count_tokens(table)
    if counts.out_of_range_tokens:
        raise ValueError(
            f"{path}: advantage: |weight · advantage| must be below 256, got 256 or more for "
            f"{counts.out_of_range_tokens} tokens; scale the advantages down"
        )
    return search.path(table), counts


def _read_tokens(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The four columns as [T] float32, checked, in the order of ``contributions``."""
    raw = _read_columns(path)
    if missing := [name for name in COLUMNS if name not in raw]:
        raise ValueError(f"{path}: column '{missing[0]}' is missing; write one row per token")
    length = raw[COLUMNS[0]].size
    raw.setdefault("mask", np.ones(length, dtype=np.float32))
    columns: dict[str, npt.NDArray[np.float32]] = {}
    for name in (*COLUMNS, "mask"):
        if raw[name].dtype.kind not in "fiub" or raw[name].shape != (length,):
            raise ValueError(
                f"{path}: column '{name}' must hold {length} numbers, one per token, got "
                f"{raw[name].dtype} of shape {list(raw[name].shape)}; write one row per token"
            )
        with np.errstate(over="ignore"):
            columns[name] = np.ascontiguousarray(raw[name], dtype=np.float32)
    is_counted = columns["mask"] == 1
    wrong = {"mask": ~is_counted & (columns["mask"] != 0)}
    wrong |= {name: is_counted & ~np.isfinite(columns[name]) for name in COLUMNS}
    for name, is_wrong in wrong.items():
        for index in np.flatnonzero(is_wrong)[:1]:
            rule = "0 or 1" if name == "mask" else "a finite float32"
            raise ValueError(
                f"{path}: {name}[{index}] is {raw[name][index]}, must be {rule}; repair the value, "
                "or set its mask to 0"
            )
    return columns


def _read_columns(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The columns of the file that are used."""
    if path.suffix not in (".npz", ".parquet"):
        raise ValueError(f"{path}: must end in .npz or .parquet; save the columns as one of these")
    names = (*COLUMNS, "mask")
    with open_regular(path) as stream:
        try:
            if path.suffix == ".npz":
                with np.lib.npyio.NpzFile(stream, allow_pickle=False) as archive:
                    return {name: archive[name] for name in names if name in archive.files}
            table = pq.ParquetFile(stream)
            present = [name for name in names if name in table.schema_arrow.names]
            return {name: table.read([name])[name].to_numpy() for name in present}
        except Exception as error:  # parsers of zip, npy and parquet raise any type
            problem = shown_value(first_line(error))
            if "allow_pickle" in problem:  # NumPy's advice, which would run code
                problem = "it holds Python objects"
            raise ValueError(f"{path}: cannot be read ({problem}); write the file again") from error
