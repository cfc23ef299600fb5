"""Bounds of tokens in a file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from bapo_megatron.algorithm.objectives.bapo import BapoConfig
from bapo_megatron.commands.bounds import bounds_from_file, print_search, to_json_dict

CONFIG = BapoConfig.model_validate(
    {
        "lower": {"start": 0.6, "max": 0.8, "step": 0.2},
        "upper": {"start": 1.0, "max": 1.25, "step": 0.25},
        "target": 0.45,
    }
)


def columns() -> dict[str, np.ndarray]:
    """P(1) = 1, P(1.25) = 1.25; N(0.6) = 2 · max(0.75, 0.6) = 1.5; the last token is masked."""
    return {
        "logprob": np.log(np.array([2.0, 0.75, 9.0])),
        "behaviour_logprob": np.zeros(3),
        "advantage": np.array([1.0, -2.0, 100.0]),
        "mask": np.array([1, 1, 0]),
    }


def write(path: Path, values: dict[str, np.ndarray]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **values)
    else:
        pq.write_table(pa.table({name: pa.array(list(v)) for name, v in values.items()}), path)
    return path


@pytest.mark.parametrize("name", ["tokens.npz", "tokens.parquet"])
def test_the_report_of_a_batch_computed_by_hand(tmp_path: Path, name: str) -> None:
    result, counts = bounds_from_file(write(tmp_path / name, columns()), CONFIG)
    answer = json.loads(json.dumps(to_json_dict(result)))
    assert set(answer) == {
        "clip_low",
        "clip_high",
        "positive_share_start",
        "positive_share",
        "exit",
        "candidates",
    }
    assert (answer["clip_low"], answer["clip_high"], answer["exit"]) == (0.6, 1.25, "met")
    assert answer["positive_share_start"] == pytest.approx(1 / 2.5, abs=1e-6)
    assert answer["positive_share"] == pytest.approx(1.25 / 2.75, abs=1e-6)
    path = [(pair["clip_low"], pair["clip_high"]) for pair in answer["candidates"]]
    assert path == [(0.6, 1.0), (0.6, 1.25), (0.8, 1.25)]
    assert [pair["passes"] for pair in answer["candidates"]] == [False, True, False]
    assert answer["candidates"][2]["negative"] == pytest.approx(1.6, abs=1e-6)
    assert (counts.positive_tokens, counts.negative_tokens) == (1, 1)


def test_without_a_mask_every_token_counts(tmp_path: Path) -> None:
    values = columns()
    del values["mask"]
    result, counts = bounds_from_file(write(tmp_path / "tokens.npz", values), CONFIG)
    assert (counts.positive_tokens, result.exit) == (2, "start")


def test_an_empty_file_gives_the_start(tmp_path: Path) -> None:
    values = {name: column[:0] for name, column in columns().items()}
    result, _ = bounds_from_file(write(tmp_path / "tokens.npz", values), CONFIG)
    assert result.exit == "start"


def test_what_is_masked_may_hold_anything(tmp_path: Path) -> None:
    values = columns()
    values["logprob"][2] = np.nan
    result, _ = bounds_from_file(write(tmp_path / "tokens.npz", values), CONFIG)
    assert result.exit == "met"


def test_the_printed_report_marks_the_chosen_pair(tmp_path: Path) -> None:
    text = io.StringIO()
    found = bounds_from_file(write(tmp_path / "tokens.npz", columns()), CONFIG)
    print_search(*found, CONFIG.target, Console(file=text, width=120))
    chosen = [line for line in text.getvalue().splitlines() if "→" in line]
    assert len(chosen) == 1
    assert "1.25" in chosen[0]
    assert f"target {CONFIG.target:g}" in text.getvalue()
    assert "met: c_low 0.6, c_high 1.25" in text.getvalue()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"advantage": None},
            "column 'advantage' is missing, found behaviour_logprob, logprob, mask;",
        ),
        (
            {"advantage": None, "prompt": np.array(["a", "b", "c"])},
            "found behaviour_logprob, logprob, mask, prompt; write the columns logprob, "
            "behaviour_logprob, advantage and optionally mask, one row per token",
        ),
        ({"advantage": np.zeros(2)}, r"column 'advantage' must have shape \[3\] .* got \[2\]"),
        ({"logprob": np.zeros((3, 1))}, r"column 'logprob' must have shape \[3\] .* got \[3, 1\]"),
        ({"logprob": np.float32(1)}, r"column 'logprob' must have shape \[0\] .* got \[\]"),
        ({"logprob": np.array(["a", "b", "c"])}, "column 'logprob' must hold numbers"),
        ({"logprob": np.array([0.0, np.nan, 0.0])}, r"logprob\[1\] is nan, must be a finite"),
        ({"advantage": np.array([np.inf, 0, 0])}, r"advantage\[0\] is inf, must be a finite"),
        ({"advantage": np.array([1e300, 0, 0])}, r"advantage\[0\] is 1e\+300, must be a finite"),
        ({"mask": np.array([1.0, 0.5, 0.0])}, r"mask\[1\] is 0.5, must be 0 or 1"),
        ({"advantage": np.array([0, -300.0, 0])}, r"advantage\[1\] is -300, .* below 256"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: dict[str, np.ndarray | None], message: str
) -> None:
    values = {k: v for k, v in {**columns(), **change}.items() if v is not None}
    path = write(tmp_path / "tokens.npz", values)
    with pytest.raises(ValueError, match=message) as caught:
        bounds_from_file(path, CONFIG)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nulls_and_nested_rows_of_parquet_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.parquet"
    table = pa.table({"logprob": [0.0, None], "behaviour_logprob": [0.0, 0], "advantage": [1.0, 1]})
    pq.write_table(table, path)
    with pytest.raises(ValueError, match=r"logprob\[1\] is nan"):
        bounds_from_file(path, CONFIG)
    pq.write_table(table.set_column(0, "logprob", [[[0.0, 1.0], [2.0]]]), path)
    with pytest.raises(ValueError, match="flatten responses into one row per token"):
        bounds_from_file(path, CONFIG)


@pytest.mark.parametrize("name", ["tokens.npz", "tokens.parquet"])
def test_a_truncated_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, columns())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"cannot be read .* write the file again") as caught:
        bounds_from_file(path, CONFIG)
    assert "\n" not in str(caught.value)


def test_other_file_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.npz or \.parquet"):
        bounds_from_file(tmp_path / "tokens.csv", CONFIG)
