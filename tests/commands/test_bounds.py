"""Bounds of the tokens in a dump."""

import json
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron import cli
from bapo_megatron.algorithm.objectives.bapo import BapoConfig
from bapo_megatron.commands.bounds import bounds_from_dump, to_json_dict
from bapo_megatron.data.token_dump import TOKEN_COLUMNS, write_token_dump

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
        "advantage": np.array([1.0, -2.0, 100.0]),
        "mask": np.array([1, 1, 0]),
    }


def write(directory: Path, values: dict[str, np.ndarray]) -> Path:
    """Dump these columns, μ = 0, and whatever stands in the others."""
    zero, one = np.zeros(len(values["logprob"])), np.ones(len(values["logprob"]))
    others = dict.fromkeys(TOKEN_COLUMNS, zero) | {"mask": one}
    path = directory / "tokens.parquet"
    write_token_dump(path, others | values)
    return path


def test_the_report_of_a_batch_computed_by_hand(tmp_path: Path) -> None:
    result, counts = bounds_from_dump(write(tmp_path, columns()), CONFIG)
    answer = json.loads(json.dumps(to_json_dict(result)))
    candidates = answer.pop("candidates")
    assert answer == {
        "clip_low": 0.6,
        "clip_high": 1.25,
        "positive_share_start": pytest.approx(1 / 2.5, abs=1e-6),
        "positive_share": pytest.approx(1.25 / 2.75, abs=1e-6),
        "exit": "met",
    }
    path = [(pair["clip_low"], pair["clip_high"]) for pair in candidates]
    assert path == [(0.6, 1.0), (0.6, 1.25), (0.8, 1.25)]
    assert [pair["passes"] for pair in candidates] == [False, True, False]
    assert candidates[2]["positive"] == pytest.approx(1.25, abs=1e-6)
    assert candidates[2]["negative"] == pytest.approx(1.6, abs=1e-6)
    assert candidates[2]["positive_share"] == pytest.approx(1.25 / 2.85, abs=1e-6)
    assert (counts.positive_tokens, counts.negative_tokens) == (1, 1)


def test_an_empty_file_gives_the_start_and_what_is_masked_may_hold_anything(
    tmp_path: Path,
) -> None:
    values = columns()
    values["logprob"][2] = np.nan
    result, _ = bounds_from_dump(write(tmp_path, values), CONFIG)
    assert result.exit == "met"
    values = {name: column[:0] for name, column in columns().items()}
    result, _ = bounds_from_dump(write(tmp_path, values), CONFIG)
    assert result.exit == "start"


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    cli.app(["bounds", *map(str, arguments)], standalone_mode=False)
    return capsys.readouterr().out


def test_the_command_prints_the_decision_as_json_and_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "logprob": np.log([2.0, 1.0, 1.0]),
        "advantage": np.array([1.0, -1.0, -1.2]),
    }
    path = write(tmp_path, values)
    report = json.loads(printed(capsys, path, "--preset", "paper", "--json"))
    # P = min(2, c), N = 2.2: P / (P + N) >= 0.4 needs c >= 1.4667, so 1.5 on the grid.
    assert (report["clip_low"], report["clip_high"], report["exit"]) == (0.6, 1.5, "met")
    assert report["positive_share_start"] == pytest.approx(1.2 / 3.4, abs=1e-6)
    assert report["positive_share"] == pytest.approx(1.5 / 3.7, abs=1e-6)

    # Counting only unclipped tokens, the ratio of 2 counts from the bound 2.05 on.
    text = printed(capsys, path, "--contribution", "gradient")
    (chosen,) = [line for line in text.splitlines() if "→" in line]
    assert chosen.split("|")[2:4] == [" 0.6 ", " 2.05 "]
    assert text.startswith("met: c_low 0.6, c_high 2.05")
    # c_high goes up by 0.05 from 1.2: 4 rows of the start, and 7 around the chosen pair.
    rows = [line.split("|")[2:4] for line in text.splitlines() if line.startswith("|")][2:]
    assert [float(high) for _, high in rows] == pytest.approx(
        [1.2, 1.25, 1.3, 1.35, 1.9, 1.95, 2, 2.05, 2.1, 2.15, 2.2]
    )
    assert "target 0.4" in text


def test_the_command_uses_the_dual_clip_of_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "logprob": np.log([1.0, 4.0, 1.0]),
        "advantage": np.array([1.0, -1.0, -0.25]),
    }
    path = write(tmp_path, values)
    options = ("--preset", "recipe", "--contribution", "gradient", "--json")
    # The ratio of 4 is above the dual clip of 3: P = 1, N = 0.25. With it the share were 1 / 5.25.
    share = json.loads(printed(capsys, path, *options))["positive_share_start"]
    assert share == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"logprob": np.array([0.0, np.nan, 0.0])}, r"logprob\[1\] is nan"),
        ({"mask": np.array([1.0, 0.5, 0.0])}, r"mask\[1\] is 0.5"),
        ({"advantage": np.array([0, -300.0, 0])}, "advantage: .* for 1 tokens"),
    ],
)
def test_values_that_no_update_has_or_the_search_cannot_count_are_refused_by_place(
    tmp_path: Path, change: dict[str, np.ndarray], place: str
) -> None:
    with pytest.raises(ValueError, match=rf"tokens\.parquet: {place}"):
        bounds_from_dump(write(tmp_path, columns() | change), CONFIG)
