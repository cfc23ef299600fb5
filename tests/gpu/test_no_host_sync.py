"""Between prediction, search and loss, nothing is read back from the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bapo_megatron.algorithm.advantage import Advantages
from bapo_megatron.config.rollout import StalenessConfig
from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
from bapo_megatron.data.micro_batch import on_device
from bapo_megatron.data.packing import PackingRules, SequenceFlops
from bapo_megatron.ops.chunked import OutputHead
from bapo_megatron.policy.model import PolicyOutput
from bapo_megatron.trainer.loss import LossInputs, LossStage, UpdateContext
from bapo_megatron.trainer.speculation import predict, remember
from bapo_megatron.trainer.split import SplitShape, split_step
from bapo_megatron.trainer.step import NUM_FAULTS, check
from tests.gpu.training import read_batch_arrays, write_batch_arrays

METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""Ways to bring a tensor's value to the host that no operator shows on a CPU."""

OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")
"""Operators whose result on the host, or whose size, depends on values."""

ONE_RANK = SplitShape(PackingRules(data_size=1, max_tokens=4096, flops=SequenceFlops(1, 0)))

CPU = torch.device("cpu")
GPU = pytest.param(
    torch.device("cuda", 0),  # tensors know their number, as those of a rank do
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


class _RefuseReads(TorchDispatchMode):
    """Fails on operators that would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(OPERATORS), f"{name} reads the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_reads(device: torch.device) -> Iterator[None]:
    """Fail on any wait for the device; on the CPU, on what would be one on a GPU."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return

    def refuse(*args: object, **options: object) -> NoReturn:
        raise AssertionError("a value was read from the device")

    with pytest.MonkeyPatch.context() as patch, _RefuseReads():
        for name in METHODS:
            patch.setattr(torch.Tensor, name, refuse)
        yield


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("chunk_tokens", [0, 50], ids=["logits", "chunks"])
@pytest.mark.parametrize(
    "objective",
    [
        {"bapo": {"target": 0.38}},
        {"bapo": {"target": 0.38, "scope": "micro_batch"}},
        {"objective": "clip", "dual_clip": 3.0},
        {"objective": "none"},
        {"objective": "tests.algorithm.own_objectives:Gspo"},
        {"objective": "tests.algorithm.own_objectives:HighEntropy"},
        {"objective": "ce_gppo", "dual_clip": 3.0},
        {"objective": "opsm"},
        {"objective": "m2po", "entropy_share": 0.2},
    ],
    ids=[
        *("update", "micro_batch", "clip", "none", "response sums", "selection"),
        *("ce_gppo", "opsm", "m2po"),
    ],
)
@pytest.mark.parametrize("correction", ["none", "token", "icepop"])
def test_search_and_loss_never_wait_for_the_device(
    tmp_path: Path,
    objective: dict[str, Any],
    correction: str,
    chunk_tokens: int,
    device: torch.device,
) -> None:
    config = AlgorithmConfig.model_validate(
        {
            **objective,
            "behaviour": "recomputed",
            "correction": {"kind": correction},
        }
    )
    searches = "bapo" in objective
    write_batch_arrays(tmp_path / "batch.npz", 300, num_groups=4, group_size=4, max_tokens=24)
    batch = read_batch_arrays(tmp_path / "batch.npz")
    (update,) = split_step(
        batch,
        Advantages(config.advantage),
        config,
        StalenessConfig(),
        ONE_RANK,
        zero_advantage="left_out",
    )
    micro_batch = on_device(update.micro_batches[0], device)
    groups: Any = SimpleNamespace(
        data=SimpleNamespace(size=lambda: 1),
        pipeline=SimpleNamespace(size=lambda: 1),
        tensor=None,
        device=device,
        is_last_stage=True,
    )
    hidden_NH = torch.randn(micro_batch.num_tokens, 8, device=device, requires_grad=True)
    weight_VH = torch.randn(320, 8, device=device)
    policy = PolicyOutput(
        OpsConfig(logits_chunk_tokens=chunk_tokens),
        vocab_size=300,
        temperature=1.0,
        groups=groups,
        head=OutputHead(weight_VH) if chunk_tokens else None,
    )
    stage = LossStage(config, policy, groups)
    context = UpdateContext(num_updates=0, rollout_version=None, num_samples=16)

    def output() -> torch.Tensor:
        return hidden_NH.view_as(hidden_NH) if chunk_tokens else hidden_NH @ weight_VH.t()

    with _no_reads(device):
        decided = LossInputs((micro_batch,))
        if stage.loaded.collects:
            current = policy.read(output().detach(), micro_batch)
            decided = stage.collect([current], [micro_batch], context)
            (micro_batch,) = decided.micro_batches
        loss, report = stage.loss(output(), micro_batch, decision=decided.decision, context=context)
        loss.backward()
        _, _, verdict = check([report], decided, stage, groups)
        stage.numbers.add([report], device)
        if stage.objective.decisive is not None:
            recent_K = None
            for _ in range(2):  # without earlier updates, and with one
                known_UK = stage.known_statistics([[micro_batch]], context)
                prediction = predict(stage.objective, known_UK[0], recent_K)
                _, predicted = stage.loss(
                    output(),
                    micro_batch,
                    decision=prediction,
                    context=context,
                    with_statistics=True,
                )
                relied = LossInputs((micro_batch,), prediction=prediction, is_predicted=True)
                settled, _, _ = check([predicted], relied, stage, groups)
                recent_K = remember(recent_K, settled.total)
            trial = replace(decided, prediction=prediction, is_trial=True)
            _, _, verdict = check([predicted], trial, stage, groups)
    assert verdict[:NUM_FAULTS].tolist() == [0.0] * NUM_FAULTS
    assert verdict[-1] == 0.0  # the statistics of both passes are the same
    assert torch.isfinite(loss)
    assert hidden_NH.grad is not None
    assert hidden_NH.grad.abs().max() > 0
    if searches:
        assert report.decision[0] >= 0.6
