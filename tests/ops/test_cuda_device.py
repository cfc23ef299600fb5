"""What only a device shows: long rows and many, streams, and that nothing waits for it.

The fixture ``kernels`` brings it to the other tests.

Shape legend: N = rows of logits, V = local columns, T = tokens.
"""

from typing import Any

import pytest
import torch

from tests.ops.kernel_calls import (
    DTYPES,
    assert_token_results,
    random_logits,
    random_targets,
    strided_logits,
    token_results,
)

pytestmark = pytest.mark.gpu
OPS = torch.ops.bapo


@pytest.fixture
def device(cuda_kernels: Any) -> Any:
    if hasattr(cuda_kernels, "library"):
        pytest.skip("the emulator takes minutes for it, or has no streams")
    return cuda_kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "columns"), [(33, 152064), (4097, 50), (70_000, 16)])
def test_more_rows_than_a_grid_dimension_other_than_x_holds_and_long_ones_match_float64(
    device: Any, num_tokens: int, columns: int, dtype: torch.dtype
) -> None:
    logits_NV = strided_logits(num_tokens, columns, dtype).view_NV
    target_T = random_targets(num_tokens, columns)
    assert_token_results(token_results(device, logits_NV, target_T), logits_NV, target_T)


@pytest.mark.usefixtures("device")
def test_rows_and_targets_out_of_range_give_nan_without_waiting_for_the_device() -> None:
    logits_NV = random_logits(5, 20, torch.bfloat16).cuda()[1:4]
    rows_T = torch.tensor([0, -1, 3, 1 << 40, 1, 2, 2]).cuda()
    target_T = torch.tensor([4, 4, 4, 4, -1, 20, 4]).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got_T4 = OPS.logprob_partials(logits_NV, rows_T, target_T, 0, 20, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got_T4.isnan().any(dim=1).tolist() == [False, True, True, True, True, True, False]


@pytest.mark.usefixtures("device")
def test_kernels_run_on_the_current_stream() -> None:
    # The copy on the side stream is queued behind a long wait; a kernel on another stream would
    # read the zeros from before.
    source_NV = torch.randn(64, 512).cuda()
    logits_NV = torch.zeros(64, 512, device="cuda")
    target_T = torch.zeros(64, dtype=torch.int64, device="cuda")
    expected_T4 = OPS.logprob_partials(source_NV, None, target_T, 0, 512, 1.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        logits_NV.copy_(source_NV)
        got_T4 = OPS.logprob_partials(logits_NV, None, target_T, 0, 512, 1.0)
    stream.synchronize()
    assert torch.equal(got_T4, expected_T4)
