"""Rewards through the collector process: from the configuration to the batch that trains."""

import os
import re
from pathlib import Path

import pytest

from bapo_megatron.data.dump import decode_batch
from bapo_megatron.errors import RolloutError
from bapo_megatron.runtime.processes import request_stacks
from tests.engine.helpers import MakeConfig, descendants
from tests.fakes.fake_sglang import FakeSglang
from tests.rollout.conftest import Open, changed

OWN = "tests.reward.own_functions"


@pytest.mark.slow
def test_a_batch_carries_the_parts_of_its_rewards_after_all_processes_wrote_their_stacks(
    make_config: MakeConfig, open_client: Open, tmp_path: Path
) -> None:
    with FakeSglang(stop_at=20) as fake:
        config = changed(
            make_config(servers=(fake.address,), max_response_tokens=40, keep_dumps=1),
            "reward",
            functions=[
                {"name": "length", "function": f"{OWN}:length"},
                {"name": "bad", "function": f"{OWN}:raises"},
            ],
            on_error="zero",
            overlong={"buffer_tokens": 40},
        )
        old = config.run_dir / "rollouts" / "step_000000.parquet"
        old.parent.mkdir(parents=True)
        old.touch()
        client = open_client(config)
        client.sync_weights(tmp_path, 1)
        # An earlier test may have had this process handle the signal.
        asked = [pid for pid in request_stacks() if pid != os.getpid()]
        encoded = client.collect(1)

    # The collector and its worker, in the collector's log.
    log = (config.run_dir / "logs" / "collector.log").read_text()
    _, collector, worker = re.split(r"--- stacks of process \d+ ---\n", log)
    assert len(asked) >= 2  # earlier tests may have left processes of their own
    assert re.search(r"rollout/collector.py\", line \d+ in main\n", collector)
    assert re.search(r"bapo_megatron/runtime/worker.py\", line \d+ in main\n", worker)
    assert encoded is not None
    assert [path.name for path in old.parent.glob("*.parquet")] == ["step_000001.parquet"]
    batch = decode_batch(encoded)
    assert batch.stats.reward_errors == len(batch.samples)
    for sample in batch.samples:
        overlong = pytest.approx(-len(sample.response_token_ids) / 40)
        length = sample.reward_components["length"]
        assert sample.reward_components == {"length": length, "bad": 0.0, "overlong": overlong}
        assert sample.reward == pytest.approx(length - len(sample.response_token_ids) / 40)


@pytest.mark.parametrize("section", ["reward", "eval"])
def test_a_function_that_is_not_there_ends_the_run_before_a_server_is_started(
    make_config: MakeConfig, open_client: Open, section: str
) -> None:
    functions = [{"name": "mine", "function": "not_there:grade"}]
    config = changed(make_config(), section, functions=functions)
    before = descendants()
    with pytest.raises(RolloutError, match="reward function 'not_there:grade' cannot import"):
        open_client(config).wait_ready()
    names = {" ".join(process.cmdline()) for process in descendants() - before}
    assert not any("sglang" in name for name in names)
    assert not (config.run_dir / "logs" / "server.log").exists()
