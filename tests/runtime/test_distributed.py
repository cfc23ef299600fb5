"""Joining process groups; the collectives are tested with the policy, on two ranks."""

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.runtime.distributed import (
    barrier,
    broadcast_answer,
    init_distributed,
    record_collectives,
    shutdown_distributed,
)
from tests.distributed_launch import joined, run_ranks


def alone() -> tuple[tuple[int, ...], dict[str, float]]:
    """One process that torchrun did not start: its place, and the time-outs of all its groups."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    groups = init_distributed(ParallelConfig(timeout_s=77.0))
    try:
        time_outs = {
            group.group_desc: group._get_backend(torch.device("cpu")).options._timeout
            for group in dist.distributed_c10d._world.pg_map
        }
        assert groups.is_first_stage
        assert groups.is_last_stage
        assert groups.device.type == "cpu"
        place = (groups.rank, groups.world_size, groups.tensor.size(), groups.data_size)
        return place, {name: time_out.total_seconds() for name, time_out in time_outs.items()}
    finally:
        shutdown_distributed()
        shutdown_distributed()


def test_nccl_is_told_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class JoinedError(Exception):
        pass

    def join(*backend: str, **place: object) -> None:
        raise JoinedError(*backend, place)

    ranks = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16"}
    for name, value in {**ranks, "MASTER_ADDR": "node0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr("torch.distributed.init_process_group", join)
    with pytest.raises(JoinedError) as joined_:
        init_distributed(ParallelConfig())
    backend, place = joined_.value.args
    assert (backend, place["device_id"]) == ("nccl", torch.device("cuda", 1))


@pytest.mark.distributed
def test_a_process_without_torchrun_is_the_only_rank_and_groups_have_the_configured_time_out() -> (
    None
):
    [(place, time_outs)] = run_ranks(alone, 1)
    assert place == (0, 1, 1, 1)
    del time_outs["EXPERT_DATA_PARALLEL_GROUP_GLOO"]  # Megatron's default; there are no experts
    assert time_outs["default_pg"] == 77.0
    assert set(time_outs.values()) == {77.0}


def answered_late() -> bytes:
    """Rank 0 answers after more than the time-out of all ranks."""

    def answer() -> bytes:
        time.sleep(9)
        return b"late"

    with joined() as groups:
        barrier(groups)  # whoever was slow to start has caught up
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
        groups = replace(groups, control=control)
        answer_here = answer if groups.rank == 0 else None
        return broadcast_answer(
            answer_here, groups, interval_s=0.5, on_wait=lambda: barrier(groups)
        )


@pytest.mark.distributed
def test_ranks_wait_longer_than_their_time_out_while_rank_zero_says_so() -> None:
    assert run_ranks(answered_late, 2) == [b"late", b"late"]


def test_half_of_torchruns_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="LOCAL_RANK"):  # without it all would take GPU 0
        init_distributed(ParallelConfig())
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        init_distributed(ParallelConfig())


def test_nccl_keeps_its_last_collectives_unless_the_user_has_said_otherwise() -> None:
    with mock.patch.dict(os.environ, {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, clear=True):
        record_collectives(Path("/runs/a/logs"))
        assert dict(os.environ) == {
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
            "TORCH_FR_DUMP_TEMP_FILE": "/runs/a/logs/nccl_trace_rank_",
        }
