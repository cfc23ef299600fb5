"""What trackers are given, read back from what they wrote, without a network."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from bapo_megatron.config.settings import public_settings
from bapo_megatron.data.columns import DumpError
from bapo_megatron.runtime.versions import Software
from bapo_megatron.telemetry.sinks import MetricsSinks
from bapo_megatron.telemetry.trackers import SampleRow, WeightsAndBiases
from bapo_megatron.types import StepMetrics
from tests.config.files import run_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bapo_megatron.config.schema import RunConfig

SECRET = "sk-not-for-others"
KEY = "0123456789abcdef0123456789abcdef01234567"
SOFTWARE = Software("0123456789ab-dirty", {"torch": "2.13.0"})
TEXT = "<script>alert(1)</script> 1+1="


def config_of(lr: float = 0.25, **log: Any) -> RunConfig:
    return run_config(
        Path("/data/someone/runs/sums"),
        model={"path": "/data/someone/models/tiny"},
        data={"train": {"path": "/data/someone/train.jsonl"}},
        algorithm={"objective": "mine:loss", "objective_options": {"api_key": SECRET}},
        optimizer={"lr": lr},
        log={"console": False, **log},
    )


def sinks_of(run_dir: Path, config: RunConfig, first_step: int = 0) -> MetricsSinks:
    return MetricsSinks(
        run_dir,
        config.name,
        config.log,
        first_step=first_step,
        total_steps=4,
        settings=public_settings(config) | SOFTWARE.settings(),
        sample_rows=lambda step: [
            SampleRow(step, 7, 0, 0.0, 3, "stop", TEXT, "3", "2"),
            SampleRow(step, 7, 1, 1.0, 3, "stop", TEXT, "2", "2"),
        ],
    )


def hyper_parameters(run_dir: Path) -> tuple[EventAccumulator, dict[str, Any]]:
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    found = metadata.parse_session_start_info_plugin_data(content).hparams
    return events, {name: getattr(v, v.WhichOneof("kind")) for name, v in found.items()}


def test_a_tag_that_is_not_taken_there_is_refused_before_the_run() -> None:
    for tag in ("", "a" * 65):
        with pytest.raises(ValueError, match=f"1 to 64 characters each, got '{tag}'"):
            config_of(wandb_tags=("bapo", tag))
    assert config_of(wandb_tags=("a" * 64,)).log.wandb_tags == ("a" * 64,)


def test_tensorboard_compares_runs_by_every_setting_and_their_last_metrics(tmp_path: Path) -> None:
    config = config_of()
    sinks = sinks_of(tmp_path, config)
    for step, accuracy in ((1, 0.25), (2, 0.75)):
        sinks.write(StepMetrics(step, {"eval/sums/avg_at_k": accuracy}))
    sinks.close()

    events, found = hyper_parameters(tmp_path)
    assert found.keys() == public_settings(config).keys() | {"commit", "versions.torch"}
    assert found["optimizer.lr"] == 0.25
    assert found["algorithm.objective"] == "mine:loss"
    assert found["resume"] is False
    assert found["commit"] == "0123456789ab-dirty"
    assert found["algorithm.objective_options.api_key"] == "not shown"
    # Without an experiment of its own, TensorBoard makes one of all runs' settings and curves.
    assert metadata.EXPERIMENT_TAG not in events.Tags()["tensors"]
    assert events.Scalars("eval/sums/avg_at_k")[-1].value == 0.75


def test_tensorboard_shows_the_settings_of_the_last_start(tmp_path: Path) -> None:
    for first_step, lr in ((0, 0.25), (2, 0.5)):
        sinks = sinks_of(tmp_path, config_of(lr), first_step)
        sinks.write(StepMetrics(first_step + 1, {"reward/mean": lr}))
        sinks.close()
    events, found = hyper_parameters(tmp_path)
    assert found["optimizer.lr"] == 0.5
    assert [(each.step, each.value) for each in events.Scalars("reward/mean")] == [
        (1, 0.25),
        (3, 0.5),
    ]
    # It reads a directory's files by name, and none again once it has gone on to the next.
    names = sorted(path.name for path in (tmp_path / "tensorboard").iterdir())
    assert [name.endswith(".settings") for name in names] == [False, True, False]


@pytest.fixture
def end_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Have the real client send nothing; its own files stay in ``tmp_path``.

    Returns what waits until it has written everything.
    """
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("API_KEY", KEY)):
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    monkeypatch.setattr("sys.argv", ["bapo-megatron", "train", f"mine.token={SECRET}"])
    import wandb

    yield wandb.teardown
    wandb.teardown()


def records_of(path: Path) -> list[Any]:
    """Records of a ``.wandb`` file: LevelDB's log, in blocks of 32 KiB, after a header of 7 bytes.

    Each piece of a record has a checksum of 4 bytes, its length and its kind: whole 1, first 2,
    middle 3, last 4. Less than 7 bytes at a block's end are padding.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        length, kind = struct.unpack_from("<HB", content, position + 4)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(parts))
            parts = b""
    return records


def test_samples_that_cannot_be_read_end_no_run_and_are_told_once(
    tmp_path: Path, end_client: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(step: int) -> list[SampleRow]:
        raise DumpError(f"step_{step:06d}.texts.parquet: format 4")

    config = config_of(wandb_project="p", wandb_samples_every=1).log
    tracker = WeightsAndBiases(tmp_path, "run", config, {}, rows)
    for step in (1, 2):
        tracker.write(step, {"reward/mean": 0.5})
    tracker.close()
    end_client()
    assert capsys.readouterr().err == (
        "no table of samples at Weights & Biases from now on: step_000001.texts.parquet: format 4\n"
    )


def test_weights_and_biases_gets_settings_group_tags_and_samples_but_no_secret(
    tmp_path: Path, end_client: Callable[[], None]
) -> None:
    log = {"wandb_project": "p", "wandb_group": "seeds", "wandb_tags": ("bapo", "tiny")}
    files = []
    for first_step, lr in ((0, 0.25), (3, 0.5)):
        run_dir = tmp_path / f"run_{first_step}"  # else both could be of one second, and one file
        run_dir.mkdir()
        if first_step:
            shutil.copy(tmp_path / "run_0" / "wandb_id", run_dir)
        config = config_of(lr, wandb_samples_every=2, tensorboard=False, **log)
        sinks = sinks_of(run_dir, config, first_step)
        for step in (first_step, first_step + 1, first_step + 2):
            sinks.write(StepMetrics(step, {"reward/mean": step / 4, "x": math.nan}))
        sinks.close()
        files += (run_dir / "wandb").glob("offline-run-*/*.wandb")

    end_client()
    first, second = files
    records = records_of(first)
    (about,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (about.project, about.display_name, about.run_group) == ("p", "sums", "seeds")
    assert sorted(about.tags) == ["bapo", "tiny"]
    settings = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for item in about.config.update
    }
    expected = public_settings(config_of(0.25, wandb_samples_every=2, tensorboard=False, **log))
    assert {key: settings.get(key) for key in expected} == expected
    assert settings["commit"] == "0123456789ab-dirty"
    assert settings["algorithm.objective_options.api_key"] == "not shown"

    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    assert [(row["_step"], row["reward/mean"]) for row in rows] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert ["samples/path" in row for row in rows] == [False, False, True]
    assert not any("x" in row for row in rows)
    table = json.loads((first.parent / "files" / rows[2]["samples/path"]).read_text())
    assert table["columns"] == list(SampleRow._fields)
    assert table["data"] == [
        [2, 7, 0, 0.0, 3, "stop", TEXT, "3", "2"],
        [2, 7, 1, 1.0, 3, "stop", TEXT, "2", "2"],
    ]

    again = next(r.run for r in records_of(second) if r.WhichOneof("record_type") == "run")
    assert again.run_id == about.run_id
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert TEXT.encode() in content
    for private in (SECRET, KEY, "/data/someone"):
        assert private.encode() not in content
