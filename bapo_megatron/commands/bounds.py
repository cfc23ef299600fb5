"""``bapo-megatron bounds``: the trainer's bound search on the tokens of an update."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from bapo_megatron.algorithm.objectives.bapo import BapoConfig
from bapo_megatron.commands.options import JsonOption
from bapo_megatron.config.load import parse_section
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.token_dump import read_token_dump
from bapo_megatron.ops.contributions import TokenCounts, count_tokens
from bapo_megatron.ops.extension import SearchResult
from bapo_megatron.telemetry.console import print_table, uncut_console

_RESULT_FIELDS = ("clip_low", "clip_high", "positive_share_start", "positive_share", "exit")
_CANDIDATE_FIELDS = (*_RESULT_FIELDS[:2], "positive", "negative", "positive_share", "passes")

_NEAR_ROWS = 4
"""Rows printed from the start on, and on each side of the chosen pair."""


def command(
    file: Annotated[Path, typer.Argument(help="token dump of one update")],
    preset: Annotated[str, typer.Option(help="paper or recipe")] = "paper",
    contribution: Annotated[
        str | None, typer.Option(help="surrogate (Eq. 8) or gradient (Eq. 5)")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Search the clip bounds for the tokens of an update, in a file of train.dump_tokens."""
    options = {"preset": preset} | ({"contribution": contribution} if contribution else {})
    # The preset also sets dual_clip, which is outside the section ``bapo``.
    config = parse_section(AlgorithmConfig, {"bapo": options}, place="options")
    bapo = config.options(BapoConfig)
    result, counts = bounds_from_dump(file, bapo, config.dual_clip)
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


def bounds_from_dump(
    path: Path, config: BapoConfig, dual_clip: float | None = None
) -> tuple[SearchResult, TokenCounts]:
    """Search the bounds for the tokens of one update in its token dump.

    ``dual_clip`` is used by ``contribution: gradient`` only.

    Raises:
        DumpError: The file is damaged, not a token dump, or has values that no update has.
        ValueError: An advantage is too large.
        OSError: The file cannot be read.
    """
    columns = read_token_dump(path)
    search = config.search(dual_clip)
    names = ("logprob", "behaviour_logprob", "advantage", "mask")
    is_counted = columns["mask"] == 1
    wrong = {"mask": ~is_counted & (columns["mask"] != 0)}
    wrong |= {name: is_counted & ~np.isfinite(columns[name]) for name in names[:3]}
    for name, is_wrong in wrong.items():
        for index in np.flatnonzero(is_wrong)[:1]:
            rule = "0 or 1" if name == "mask" else "finite where the mask is 1"
            raise DumpError(
                f"{path}: {name}[{index}] is {columns[name][index]}, must be {rule}; dump it again"
            )
    table = search.contributions(*(torch.from_numpy(columns[name]) for name in names))
    counts = count_tokens(table)
    if counts.out_of_range_tokens:
        raise ValueError(
            f"{path}: advantage: |weight · advantage| must be below 256, got 256 or more for "
            f"{counts.out_of_range_tokens} tokens; scale the advantages down"
        )
    return search.path(table), counts
