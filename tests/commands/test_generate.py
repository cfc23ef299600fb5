"""Generation without a trainer, as a user starts it."""

import statistics
from pathlib import Path
from unittest import mock

import pytest

from bapo_megatron import cli
from bapo_megatron.commands.generate import generate_batches
from bapo_megatron.config.load import load_config
from bapo_megatron.data.dump import encode_batch, read_batch
from bapo_megatron.errors import RolloutError
from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.types import EncodedBatch, Group, RolloutBatch
from tests.data.samples import make_sample
from tests.fakes.fake_sglang import FakeSglang
from tests.launch import run
from tests.rollout.forked_collector import forked_collectors
from tests.tools.sweep.files import write_base

SETTINGS = (
    *("rollout.engine=sglang", "rollout.groups_per_step=4", "rollout.samples_per_group=3"),
    *("rollout.max_response_tokens=40", "rollout.oversample_groups=2"),
    *("parallel.tensor=7", "train.max_tokens_per_micro_batch=8"),  # would fit no trainer
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("generate"))


def test_batches_are_dumped_and_counted(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    with FakeSglang(stop_at=60, token_interval_s=0.005) as fake, forked_collectors():
        typed = ["generate", str(config), *SETTINGS, f"run_dir={run_dir}"]
        typed.append(f"rollout.servers=['{fake.address}']")
        assert not cli.app([*typed, "--steps", "2"], standalone_mode=False)
    names = ["step_000001.parquet", "step_000002.parquet"]
    files = sorted(str(p.relative_to(run_dir / "rollouts")) for p in run_dir.rglob("*.parquet"))
    assert files == [*names, *(f"texts/{name}" for name in names)]
    batches = [read_batch(run_dir / "rollouts" / name) for name in names]
    assert len({group.group_id for batch in batches for group in batch.groups}) == 8
    versions = [span.version for batch in batches for s in batch.samples for span in s.versions]
    assert {*versions} == {0}
    rows = read_metrics(run_dir / "metrics.jsonl")
    for step, (row, batch) in enumerate(zip(rows, batches, strict=True), 1):
        lengths = [len(sample.response_token_ids) for sample in batch.samples]
        assert (row["step"], len(lengths)) == (step, 12)
        assert row["rollout/response_tokens_mean"] == pytest.approx(statistics.fmean(lengths))
        assert row["time/rollout_s"] > 0
    written = capsys.readouterr().out
    for shown in ("1/2", "2/2", f"the metrics of each batch are in {run_dir}/metrics.jsonl\n"):
        assert shown in written

    again = run(typed)
    assert again.returncode == 1
    assert f"{run_dir} already holds a run" in again.stderr


def test_weights_are_loaded_before_the_first_batch_and_into_servers_that_restarted(
    config: Path, tmp_path: Path
) -> None:
    batch = RolloutBatch(1, 0, (Group(0, (make_sample(2, 1),)),))
    encoded = EncodedBatch("made", bytearray(encode_batch(batch)))
    run_config = load_config(config, [*SETTINGS, f"run_dir={tmp_path / 'run'}", "replay.batches=4"])
    with mock.patch("bapo_megatron.commands.generate.CollectorClient") as make_source:
        source = make_source.return_value
        # Its servers restart once, then they are gone for good.
        source.collect.side_effect = [encoded, None, RolloutError("no server is left")]
        with pytest.raises(RolloutError, match="no server is left"):
            generate_batches(run_config, steps=3)
    assert source.method_calls == [
        mock.call.launch(),
        mock.call.ensure_weights(),
        mock.call.collect(1),
        mock.call.collect(2),
        mock.call.load_weights(),
        mock.call.collect(2),
        mock.call.close(),
    ]
    (used,), _ = make_source.call_args
    assert used.train.steps == 3  # and not those of a training: nothing is generated beyond them
    assert used.replay.batches == 0  # a group would be in several dumps
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1]
