"""Which kernels ``ops.backend`` selects, and what the reference refuses as they do."""

from __future__ import annotations

import logging
import runpy
from collections.abc import Iterator

import pytest
import torch

from bapo_megatron.ops import backend, extension, reference
from bapo_megatron.ops.backend import select_kernels
from tests.ops.kernel_calls import both_kernels, random_logits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
"""A device names a kind of machine; none of these tests needs to have it."""


@pytest.fixture(autouse=True)
def no_choice_is_remembered() -> Iterator[None]:
    backend._choose.cache_clear()
    yield
    backend._choose.cache_clear()


def pretend_cuda_is(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "build_info", lambda: {"cuda": built})


def test_an_extension_of_another_version_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bapo_megatron.__version__", "0.0.9")
    with pytest.raises(ImportError, match=r"the package is 0\.0\.9; run `pip install"):
        runpy.run_path(extension.__file__)


def test_auto_takes_the_compiled_kernels_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
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


LOGITS_NV = random_logits(9, 70, torch.float32)
"""61 of the columns are true."""


@both_kernels
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
    with pytest.raises(RuntimeError, match=message):
        kernels.logprob_partials(LOGITS_NV, torch.tensor(rows), torch.tensor(target), 0, 61, 1.0)


@both_kernels
def test_a_row_selected_twice_is_refused_and_the_logits_stay(kernels: backend.Kernels) -> None:
    logits_NV = LOGITS_NV.clone()
    index_T, value_T = torch.tensor([4, 4]), torch.ones(2)
    with pytest.raises(RuntimeError, match="rows must select each row at most once"):
        kernels.logits_backward_(
            logits_NV, index_T, index_T, value_T, value_T, value_T, value_T, None, 0, 61, 1.0
        )
    assert torch.equal(logits_NV, LOGITS_NV)


def test_chunks_of_any_size_give_the_same_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_T, target_T = torch.tensor([8, 2, 0, 5, 3]), torch.tensor([60, 1, 0, 33, 4])
    whole_T4 = reference.KERNELS.logprob_partials(LOGITS_NV, rows_T, target_T, 0, 61, 0.6)
    for elements in (1, 140):
        monkeypatch.setattr(reference, "CHUNK_ELEMENTS", elements)
        split_T4 = reference.KERNELS.logprob_partials(LOGITS_NV, rows_T, target_T, 0, 61, 0.6)
        assert torch.equal(split_T4, whole_T4)
