"""Between the search and the loss, nothing is read back from the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
from bapo_megatron.data.dump import read_batch
from bapo_megatron.trainer.loss_stage import LossStage, UpdateContext
from bapo_megatron.trainer.plan import Layout, plan_step

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""Ways to bring a tensor's value to the host."""

CPU = torch.device("cpu")


@contextmanager
def _no_reads(device: torch.device) -> Iterator[None]:
    """Fail on any wait for the device; on the CPU, on any call that would be one on a GPU."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return

    def refuse(*args: object, **options: object) -> NoReturn:
        raise AssertionError("a value was read from the device")

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, refuse)
        yield


@pytest.mark.parametrize("scope", ["update", "micro_batch"])
@pytest.mark.parametrize(
    "device",
    [
        CPU,
        pytest.param(
            torch.device("cuda"),
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
    ids=str,
)
def test_search_and_loss_never_wait_for_the_device(
    mixed_dumps: Path, monkeypatch: pytest.MonkeyPatch, scope: str, device: torch.device
) -> None:
    config = AlgorithmConfig.model_validate({"bapo": {"target": 0.38, "scope": scope}})
    (update,) = plan_step(
        read_batch(mixed_dumps / "step_000000.parquet"), config, Layout(0, 1, 4096, 1)
    )
    micro_batch = update.micro_batches[0].to(device)
    groups: Any = SimpleNamespace(data=None, tensor=None, device=device)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, group: None)
    stage = LossStage(
        config, OpsConfig(), vocab_size=300, temperature=1.0, groups=groups, head=None
    )
    hidden_NH = torch.randn(micro_batch.num_tokens, 8, device=device, requires_grad=True)
    vocabulary_HV = torch.randn(8, 320, device=device)

    with _no_reads(device):
        bounds = None
        if scope == "update":
            current_T = stage.logprobs(hidden_NH.detach() @ vocabulary_HV, micro_batch)
            bounds = stage.search([current_T], (micro_batch,))
        loss, report = stage.loss(
            hidden_NH @ vocabulary_HV,
            micro_batch,
            bounds=bounds,
            context=UpdateContext(num_updates=0, rollout_version=None),
        )
        loss.backward()
    assert torch.isfinite(loss)
    assert hidden_NH.grad is not None
    assert hidden_NH.grad.abs().max() > 0
    assert report.bounds[0] >= 0.6
