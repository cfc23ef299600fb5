"""Where metrics go: the file, rows of the table, Prometheus, and trackers without a network."""

import json
import math
import shutil
import socket
import struct
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from bapo_megatron.config.schema import LogConfig, RunConfig
from bapo_megatron.config.settings import public_settings
from bapo_megatron.data.columns import DumpError
from bapo_megatron.runtime.versions import Software
from bapo_megatron.telemetry.console import ProgressLine
from bapo_megatron.telemetry.metrics import BEFORE_TRAINING
from bapo_megatron.telemetry.sinks import (
    MetricsSinks,
    WeightsAndBiases,
    read_metrics,
    rows_served,
)
from bapo_megatron.types import StepMetrics
from tests.config.files import run_config
from tests.launch import free_port


def write(run_dir: Path, *rows: tuple[int, dict[str, float]], first: int = 0, **log: Any) -> None:
    """A run that starts with step ``first`` + 1; 4 steps in all."""
    config = LogConfig(**{"console": False, "tensorboard": False, **log})
    sinks = MetricsSinks(run_dir, "run", config, first_step=first, total_steps=4)
    for step, values in rows:
        sinks.write(StepMetrics(step, values))
    sinks.close()


def test_rows_that_a_resumed_run_makes_again_are_dropped(tmp_path: Path) -> None:
    for first, reward in ((0, 0.1), (3, 0.9)):
        steps = range(max(first, 1), 5)
        write(tmp_path, *((n, {"reward/mean": reward, "x": math.nan}) for n in steps), first=first)
    rows = [(1, 0.1), (2, 0.1), (3, 0.9), (4, 0.9)]
    expected = [{"step": step, "reward/mean": reward} for step, reward in rows]
    assert read_metrics(tmp_path / "metrics.jsonl") == expected
    write(tmp_path, (BEFORE_TRAINING, {"reward/mean": 0.5}))  # begins anew
    write(tmp_path, (BEFORE_TRAINING, {"reward/mean": 0.9}))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "reward/mean": 0.9}]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"step": 1, "a": 1}\n{"step": 2, "a"', '{"step": 1, "a": 1}\n'),  # a torn last line
        ('{"step": 1, "a": 2, "b": 2.0, "c": 1e-07}\n',) * 2,  # whole numbers stay whole
        (  # names of an earlier version
            '{"step": 1, "bapo/clip_low": 0.6, "bapo/clip_high": 1.2, "a": 1}\n',
            '{"step": 1, "clip/low": 0.6, "clip/high": 1.2, "a": 1}\n',
        ),
    ],
)
def test_a_resumed_run_writes_the_rows_again_that_it_has(
    tmp_path: Path, before: str, after: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    write(tmp_path, (2, {"a": 2.0}), first=2)
    assert path.read_text() == f'{after}{{"step": 2, "a": 2.0}}\n'


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ('{"step": ', "not valid JSON"),
        ('{"a": 1}', "'step'"),
        ('{"step": -1}', "'step'"),
        ('{"step": 1, "a": 1e151}', r"'a' .* 1e\+150, got"),
        ('{"step": 1, "a": NaN}', "'a'"),
    ],
)
def test_a_broken_metrics_line_is_named(tmp_path: Path, line: str, place: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n')
    with pytest.raises(ValueError, match=rf"metrics\.jsonl:2: {place} .*; remove the line"):
        read_metrics(path)


def test_every_sink_counts_finished_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ((step, {"reward/mean": 0.5}) for step in (BEFORE_TRAINING, 1, 4))
    write(tmp_path, *rows, console=True, tensorboard=True)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 4]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [0, 1, 4]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "1/4", "4/4"]


def test_a_row_shows_all_clipped_tokens_and_no_time_of_evaluations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clipped = {"clip/fraction_high": 0.125, "clip/fraction_low": 0.25, "clip/fraction_dual": 0.0}
    seconds = {"time/rollout_s": 1.5, "time/training_s": 2.0, "time/evaluation_s": 60.0}
    fast = {"reward/mean": 0.5, "time/evaluation_s": 60.0, "time/training_s": 0.04}
    write(tmp_path, (1, {"reward/mean": 0.5} | clipped | seconds), (2, fast), console=True)
    names, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert first[names.index("clipped")] == "0.375"
    assert first[-2:] == ["3.50", "s"]
    assert second[names.index("clipped")] == "-"
    assert second[-2:] == ["0.04", "s"]


def test_a_row_of_demonstrations_shows_their_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"demonstrations/epoch": 0.5, "loss/policy": 1.25, "policy/grad_norm": 2.0}
    write(tmp_path, (1, values), console=True)
    names, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert names == ["step", "epoch", "loss", "entropy", "grad", "tok/s", "time"]
    assert row == ["1/4", "0.50", "1.2500", "-", "2.000", "-", "0.00", "s"]


def test_without_a_terminal_progress_does_not_stand_between_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bapo_megatron.telemetry.console._PLAIN_INTERVAL_S", 0.0)
    with ProgressLine() as progress:
        progress.update("server 0: loading")
        progress.update("server 0: loading")  # nothing new
        progress.move_to(tmp_path / "progress")
        progress.update("rollout 1: 3/4 groups")
        write(tmp_path, (1, {"reward/mean": 0.5}), console=True)
    output = capsys.readouterr()
    assert output.err == "server 0: loading\n"
    assert [line.split()[0] for line in output.out.splitlines()] == ["step", "1/4"]
    assert (tmp_path / "progress").read_text() == "rollout 1: 3/4 groups\n"


def test_gauges_keep_their_last_value_under_names_that_prometheus_allows() -> None:
    config = LogConfig(prometheus_port=free_port())
    with rows_served(config) as show:
        show({"step": 3, "reward/mean": 1.5, "eval/a.b/avg_at_k": 0.5})
        show({"step": 4, "reward/mean": 0.25})
        with urllib.request.urlopen(f"http://127.0.0.1:{config.prometheus_port}/metrics") as page:
            families = list(text_string_to_metric_families(page.read().decode()))
    assert {sample.name: sample.value for family in families for sample in family.samples} == {
        "bapo_step": 4.0,
        "bapo_reward_mean": 0.25,
        "bapo_eval_a_b_avg_at_k": 0.5,
    }


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = rf"^log\.prometheus_port: .*127\.0\.0\.1:{port} \(Address already in use\); "
        config = LogConfig(prometheus_port=port)
        with pytest.raises(ValueError, match=message), rows_served(config):
            pass


SECRET = "sk-not-for-others"
KEY = "0123456789abcdef0123456789abcdef01234567"
SOFTWARE = Software("0123456789ab-dirty", {"torch": "2.13.0"})
OPTIONS = {"api_key": SECRET, "pin_key": 271828}
TEXT = "<script>alert(1)</script> 1+1="


def config_of(lr: float = 0.25, **log: Any) -> RunConfig:
    return run_config(
        Path("/data/someone/runs/sums"),
        model={"path": "/data/someone/models/tiny"},
        data={"train": {"path": "/data/someone/train.jsonl"}},
        algorithm={"objective": "mine:loss", "objective_options": OPTIONS},
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
            {"step": step, "sample": 0, "reward": 0.0, "prompt": TEXT},
            {"step": step, "sample": 1, "reward": 1.0, "prompt": TEXT},
        ],
    )


def test_tensorboard_compares_runs_by_every_setting_and_their_last_metrics(tmp_path: Path) -> None:
    config = config_of()
    sinks = sinks_of(tmp_path, config)
    for step, accuracy in ((1, 0.25), (2, 0.75)):
        sinks.write(StepMetrics(step, {"eval/sums/avg_at_k": accuracy}))
    sinks.close()

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    fields = metadata.parse_session_start_info_plugin_data(content).hparams
    settings = {name: getattr(value, value.WhichOneof("kind")) for name, value in fields.items()}
    assert settings.keys() == public_settings(config).keys() | {"commit", "versions.torch"}
    expected = {
        "optimizer.lr": 0.25,
        "algorithm.objective": "mine:loss",
        "resume": False,
        "commit": "0123456789ab-dirty",
        "algorithm.objective_options.api_key": "not shown",
        "algorithm.objective_options.pin_key": "not shown",
        "replay.dumps": "none",
    }
    assert {name: settings[name] for name in expected} == expected
    # Without an experiment of its own, TensorBoard makes one of all runs' settings and curves.
    assert metadata.EXPERIMENT_TAG not in events.Tags()["tensors"]
    assert events.Scalars("eval/sums/avg_at_k")[-1].value == 0.75


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


def records_of(path: Path) -> dict[str, list[Any]]:
    """Records of a ``.wandb`` file by kind.

    The file is LevelDB's log, in blocks of 32 KiB, after a header of 7 bytes. Each piece of a
    record has a checksum of 4 bytes, its length and its kind: whole 1, first 2, middle 3, last 4.
    Less than 7 bytes at a block's end are padding.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts = path.read_bytes(), 7, b""
    records: dict[str, list[Any]] = defaultdict(list)
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        length, kind = struct.unpack_from("<HB", content, position + 4)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = Record.FromString(parts)
            name = record.WhichOneof("record_type")
            records[name].append(getattr(record, name))
            parts = b""
    return records


def values_of(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_samples_that_cannot_be_read_end_no_run_and_are_told_once(
    tmp_path: Path, end_client: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(step: int) -> list[dict[str, Any]]:
        raise DumpError(f"step_{step:06d}.texts.parquet: format 4")

    config = config_of(wandb_project="p", wandb_samples_every=1).log
    tracker = WeightsAndBiases(tmp_path, "run", config, {}, rows)
    for step in (1, 2):
        tracker.write(step, {"reward/mean": 0.5})
    tracker.close()
    end_client()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("from now on: step_000001.texts.parquet: format 4")


def test_weights_and_biases_gets_settings_group_tags_and_samples_but_no_secret(
    tmp_path: Path, end_client: Callable[[], None]
) -> None:
    tags = ("bapo", "t" * 64)  # the longest that is taken there
    log = {"wandb_project": "p", "wandb_group": "seeds", "wandb_tags": tags}
    files = []
    for first_step, lr in ((0, 0.25), (3, 0.5)):
        run_dir = tmp_path / f"run_{first_step}"  # else both could be of one second, and one file
        run_dir.mkdir()
        if first_step:
            shutil.copy(tmp_path / "run_0" / "wandb_id", run_dir)
        config = config_of(lr, wandb_samples_every=2, tensorboard=False, **log)
        sinks = sinks_of(run_dir, config, first_step)
        # After a crash steps are trained again.
        for step in (first_step, first_step + 1, first_step + 2, first_step + 1):
            sinks.write(StepMetrics(step, {"reward/mean": step / 4, "x": math.nan}))
        sinks.close()
        files += (run_dir / "wandb").glob("offline-run-*/*.wandb")

    end_client()
    first, second = files
    records = records_of(first)
    (about,) = records["run"]
    assert (about.project, about.display_name, about.run_group) == ("p", "sums", "seeds")
    assert tuple(sorted(about.tags)) == tags
    settings = values_of(about.config.update)
    expected = public_settings(config_of(0.25, wandb_samples_every=2, tensorboard=False, **log))
    assert {key: settings.get(key) for key in expected} == expected
    assert settings["commit"] == "0123456789ab-dirty"
    assert settings["algorithm.objective_options.api_key"] == "not shown"

    rows = [values_of(record.item) for record in records["history"]]
    expected_rows = [(0, 0.0), (1, 0.25), (2, 0.5), (1, 0.25)]
    assert [(row["step"], row["reward/mean"]) for row in rows] == expected_rows
    assert ["samples/path" in row for row in rows] == [False, False, True, False]
    axes = [(axis.glob_name, axis.step_metric) for axis in records["metric"]]
    assert ("*", "step") in axes
    assert not any("x" in row for row in rows)
    table = json.loads((first.parent / "files" / rows[2]["samples/path"]).read_text())
    assert table["columns"] == ["step", "sample", "reward", "prompt"]
    assert table["data"] == [[2, 0, 0.0, TEXT], [2, 1, 1.0, TEXT]]

    assert records_of(second)["run"][0].run_id == about.run_id
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert TEXT.encode() in content
    for private in (SECRET, KEY, "/data/someone"):
        assert private.encode() not in content
