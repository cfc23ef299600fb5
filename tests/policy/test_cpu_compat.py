"""The shims put CUDA on the CPU, and change nothing where CUDA is available."""

import subprocess
import sys

import pytest

from bapo_megatron.policy import cpu_compat

INSTALLED = """
import torch
from bapo_megatron.policy import cpu_compat
cpu_compat.install(); cpu_compat.install()
print(torch.zeros(1, device='cuda').device, torch.zeros(1).cuda().device)
print(torch.tensor([1], device='cuda', pin_memory=True).device, torch.cuda.current_device())
print(torch.zeros(1).type(), torch.zeros(1).type(torch.int64).dtype)
state = torch.cuda.get_rng_state(); torch.cuda.manual_seed(7); a = torch.rand(1)
torch.manual_seed(7); print(torch.equal(a, torch.rand(1)))
from megatron.core.tensor_parallel import random
random._set_cuda_rng_state(state); print(torch.equal(torch.get_rng_state(), state))
print(torch.compile(lambda x: torch.max(x), backend="eager")(torch.ones(2)).item())
"""


@pytest.mark.slow
def test_shims_put_cuda_on_the_cpu_and_seed_its_generator() -> None:
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INSTALLED],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    ).stdout
    assert printed.splitlines() == [
        *("cpu cpu", "cpu cpu", "torch.cuda.FloatTensor torch.int64"),
        *("True", "True"),
        "1.0",  # of torch.compile
    ]


def test_shims_refuse_a_machine_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(RuntimeError, match="for machines without CUDA"):
        cpu_compat.install.__wrapped__()  # as in a fresh process
