"""Which kernels ``ops.backend`` selects, and that the reference computes what they compute."""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bapo_megatron.ops import backend, extension, reference
from bapo_megatron.ops.backend import select_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
"""A device names a kind of machine; none of these tests needs to have it."""


@pytest.fixture(autouse=True)
def no_choice_is_remembered() -> Iterator[None]:
    backend._choose.cache_clear()
    yield
    backend._choose.cache_clear()


def pretend_cuda_is(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "build_info", lambda: {"cuda": built})


def test_an_old_torch_is_refused_before_the_extension_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.1.0")
    with pytest.raises(
        ImportError, match=r"needs torch >= 2\.\d+, this is 2\.1\.0; install a newer"
    ):
        runpy.run_path(extension.__file__)


def test_a_second_copy_of_the_extension_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bapo_megatron._C")
    with pytest.raises(ImportError, match=r"^torch\.ops\.bapo is registered already"):
        runpy.run_path(extension.__file__)


def test_auto_takes_the_compiled_kernels_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="bapo_megatron.ops.backend"):
        assert select_kernels("auto", CPU) is backend.CPU_KERNELS
        assert select_kernels("auto", CPU) is backend.CPU_KERNELS
    assert caplog.messages == ["ops.backend: auto runs the compiled cpu kernels"]


def test_auto_takes_the_cuda_kernels_for_a_gpu_where_they_were_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_cuda_is(True, monkeypatch)
    assert select_kernels("auto", torch.device("cuda", 3)).name == "cuda"
    assert select_kernels("cuda", CUDA) is backend.CUDA_KERNELS


def test_auto_warns_once_that_a_gpu_runs_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend_cuda_is(False, monkeypatch)
    for index in (0, 1):
        assert select_kernels("auto", torch.device("cuda", index)) is reference.KERNELS
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "slow reference on cuda" in record.message
    assert "pip install --no-build-isolation -e ." in record.message


def test_a_named_backend_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert select_kernels("cpu", CPU).name == "cpu"
        assert select_kernels("reference", CPU).name == "reference"
        assert select_kernels("reference", CUDA).name == "reference"
    assert caplog.messages == []


def test_cuda_kernels_that_were_not_built_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_cuda_is(False, monkeypatch)
    with pytest.raises(ValueError, match=r"cuda was asked for, but .* without CUDA; install nvcc"):
        select_kernels("cuda", CUDA)


@pytest.mark.parametrize(("name", "device"), [("cpu", CUDA), ("cuda", CPU)])
def test_a_backend_of_another_device_is_refused(
    name: backend.Backend, device: torch.device
) -> None:
    message = f"{name} needs tensors on that device, but they are on {device.type}"
    with pytest.raises(ValueError, match=message):
        select_kernels(name, device)


def random_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [9, 70], of which 61 columns are true, and five selected rows with their targets."""
    generator = torch.Generator().manual_seed(5)
    logits_NV = (5 * torch.randn(9, 70, generator=generator)).to(dtype)
    logits_NV[2, 7:40] = -torch.inf
    return logits_NV, torch.tensor([8, 2, 0, 5, 3]), torch.tensor([60, 1, 0, 33, 4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_and_compiled_kernels_agree_on_logprobs(dtype: torch.dtype) -> None:
    logits_NV, rows_T, target_T = random_rows(dtype)
    results = []
    for kernels in (reference.KERNELS, backend.CPU_KERNELS):
        partials_T4 = kernels.logprob_partials(logits_NV, rows_T, target_T, 0, 61, 0.6)
        results.append((partials_T4, *kernels.logprob_combine(partials_T4[None], 0.6)))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
    # Maximum and target of a row are raw logits, not computed values.
    assert torch.equal(results[0][0][:, [0, 3]], results[1][0][:, [0, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_and_compiled_kernels_agree_on_the_gradient(dtype: torch.dtype) -> None:
    logits_NV, rows_T, target_T = random_rows(dtype)
    logits_NV[5, 3] = torch.nan  # of token 3, which has no gradient
    logits_NV[3, 9] = torch.nan  # of token 4, which has one
    grad_logprob_T = torch.tensor([1.0, -0.5, 0.0, 0.0, 1.0])
    grad_entropy_T = torch.tensor([0.0, 0.25, -2.0, 0.0, 0.0])
    results = []
    for kernels in (reference.KERNELS, backend.CPU_KERNELS):
        partials_T4 = kernels.logprob_partials(logits_NV, rows_T, target_T, 0, 61, 0.6)
        _, entropy_T, max_T, log_sum_T = kernels.logprob_combine(partials_T4[None], 0.6)
        grad_NV = logits_NV.clone()
        kernels.logits_backward_(
            grad_NV,
            rows_T,
            target_T,
            max_T,
            log_sum_T,
            entropy_T,
            grad_logprob_T,
            grad_entropy_T,
            0,
            61,
            0.6,
        )
        results.append(grad_NV)
    expected_NV, actual_NV = results
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(actual_NV, expected_NV, rtol=tolerance, atol=2e-6, equal_nan=True)
    for grad_NV in results:
        assert torch.count_nonzero(grad_NV[[1, 4, 6, 7]]) == 0  # no token selects them
        assert torch.count_nonzero(grad_NV[:, 61:]) == 0  # padding
        assert torch.count_nonzero(grad_NV[5]) == 0
        assert bool(torch.isnan(grad_NV[3, :61]).all())


@pytest.mark.parametrize("kernels", [reference.KERNELS, backend.CPU_KERNELS], ids=lambda k: k.name)
@pytest.mark.parametrize(
    ("rows", "target", "message"),
    [
        ([0, 9], [0, 0], r"rows must lie in \[0, N\) = \[0, 9\), got 9"),
        ([0, -1], [0, 0], r"rows must lie in \[0, N\) = \[0, 9\), got -1"),
        ([0, 1], [0, 61], r"target must lie in \[0, vocab_size\) = \[0, 61\), got 61"),
        ([0, 1], [-1, 0], r"target must lie in \[0, vocab_size\) = \[0, 61\), got -1"),
    ],
)
def test_rows_and_targets_that_do_not_exist_are_refused_on_the_cpu(
    kernels: backend.Kernels, rows: list[int], target: list[int], message: str
) -> None:
    logits_NV, _, _ = random_rows(torch.float32)
    with pytest.raises(RuntimeError, match=message):
        kernels.logprob_partials(logits_NV, torch.tensor(rows), torch.tensor(target), 0, 61, 1.0)


@pytest.mark.parametrize("kernels", [reference.KERNELS, backend.CPU_KERNELS], ids=lambda k: k.name)
def test_a_row_selected_twice_is_refused_and_the_logits_stay(kernels: backend.Kernels) -> None:
    logits_NV, _, _ = random_rows(torch.float32)
    before_NV = logits_NV.clone()
    index_T, value_T = torch.tensor([4, 4]), torch.ones(2)
    with pytest.raises(RuntimeError, match="rows must select each row at most once"):
        kernels.logits_backward_(
            logits_NV, index_T, index_T, value_T, value_T, value_T, value_T, None, 0, 61, 1.0
        )
    assert torch.equal(logits_NV, before_NV)


def test_chunks_of_any_size_give_the_same_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_NV, rows_T, target_T = random_rows(torch.float32)
    whole_T4 = reference.KERNELS.logprob_partials(logits_NV, rows_T, target_T, 0, 61, 0.6)
    for elements in (1, 140):
        monkeypatch.setattr(reference, "CHUNK_ELEMENTS", elements)
        split_T4 = reference.KERNELS.logprob_partials(logits_NV, rows_T, target_T, 0, 61, 0.6)
        assert torch.equal(split_T4, whole_T4)
