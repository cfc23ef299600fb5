"""``train.dump_tokens``: the tokens of an update, whole on any layout, as ``bounds`` reads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import pytest

from bapo_megatron.data.dump import read_batch
from bapo_megatron.telemetry.sinks import read_metrics
from tests.launch import run
from tests.trainer.runs import train

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

COLUMNS = ["logprob", "behaviour_logprob", "advantage", "entropy", "mask"]
PLACES = ["group_id", "index", "position"]
LAYOUTS = {
    "one rank": (1, []),
    "TP 2": (2, ["parallel.tensor=2"]),
    "CP 2": (2, ["parallel.context=2"]),
    "PP 2": (2, ["parallel.pipeline=2"]),
    "DP 2, chunks": (2, ["ops.logits_chunk_tokens=13"]),
}
COMMON = ("optimizer.schedule=constant", "checkpoint.at_end=false")
"""The schedule does not depend on the number of steps."""


def _train(
    config: Path, run_dir: Path, layout: str, *settings: str, steps: int, dump_every: int
) -> dict[str, pa.Table]:
    ranks, overrides = LAYOUTS[layout]
    sizes = (f"train.steps={steps}", f"train.dump_tokens={dump_every}")
    train(config, run_dir, *overrides, *COMMON, *sizes, *settings, ranks=ranks)
    return {path.name: pq.read_table(path) for path in sorted((run_dir / "tokens").iterdir())}


def _rows(table: pa.Table, names: list[str]) -> np.ndarray:
    """[tokens, columns]."""
    return np.stack([table[name].to_numpy() for name in names], axis=1)


@pytest.fixture(scope="module")
def whole(replay_config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pa.Table]:
    return _train(
        replay_config, tmp_path_factory.mktemp("whole") / "run", "one rank", steps=4, dump_every=2
    )


def test_every_update_of_every_nth_step_has_a_file_with_its_tokens(
    whole: dict[str, pa.Table], mixed_dumps: Path
) -> None:
    assert list(whole) == [
        f"step_{step:06d}_update_{update:03d}.parquet" for step in (2, 4) for update in (0, 1)
    ]
    for step in (2, 4):
        samples = read_batch(mixed_dumps / f"step_{step:06d}.parquet").samples
        for update in (0, 1):
            table = whole[f"step_{step:06d}_update_{update:03d}.parquet"]
            assert table.column_names == [*PLACES, *COLUMNS]
            update_samples = samples[:8] if update == 0 else samples[8:]
            behaviour = np.concatenate([sample.behaviour_logprobs for sample in update_samples])
            assert np.array_equal(table["behaviour_logprob"].to_numpy(), behaviour)
            places = [
                (sample.group_id, sample.index, position)
                for sample in update_samples
                for position in np.flatnonzero(sample.loss_mask).tolist()
            ]
            assert list(map(tuple, _rows(table, PLACES).tolist())) == places
            assert set(table["mask"].to_pylist()) == {1.0}
            assert (table["entropy"].to_numpy() > 0).all()


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one rank"])
def test_layouts_dump_the_same_tokens(
    replay_config: Path, whole: dict[str, pa.Table], tmp_path: Path, layout: str
) -> None:
    tables = _train(replay_config, tmp_path / "run", layout, steps=2, dump_every=2)
    assert list(tables) == [f"step_000002_update_{update:03d}.parquet" for update in (0, 1)]
    for name, table in tables.items():
        assert np.array_equal(_rows(table, PLACES), _rows(whole[name], PLACES))
        values, expected = _rows(table, COLUMNS), _rows(whole[name], COLUMNS)
        np.testing.assert_allclose(values, expected, rtol=0, atol=2e-5)


def test_bounds_of_the_file_are_those_that_the_update_had(
    replay_config: Path, tmp_path: Path
) -> None:
    settings = ["algorithm.updates_per_batch=1", "algorithm.bapo.target=0.4"]
    tables = _train(
        replay_config, tmp_path / "run", "DP 2, chunks", *settings, steps=2, dump_every=1
    )
    rows = {row["step"]: row for row in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    assert len(tables) == 2
    for name in tables:
        result = run(["bounds", str(tmp_path / "run" / "tokens" / name), "--json"])
        assert result.returncode == 0, result.stderr
        bounds = json.loads(result.stdout)
        row = rows[int(name[5:11])]
        assert bounds["clip_low"] == pytest.approx(row["clip/low"])
        assert bounds["clip_high"] == pytest.approx(row["clip/high"])
        assert bounds["positive_share"] == pytest.approx(row["bapo/positive_share"], abs=1e-12)
        assert row[f"bapo/exit_{bounds['exit']}_share"] == 1.0
