"""The doctor's verdicts on machines that are described to it, and its report on this one."""

import json
import os
import re
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from bapo_megatron.tools.doctor import (
    Device,
    Diagnosis,
    Machine,
    _torch_cpu,
    diagnose,
    probe,
)
from tests.launch import run

BUILD: dict[str, Any] = {
    "git_commit": "abc",
    "compiler": "GCC 12",
    "flags": "-O3",
    "isa": "avx2",
    "available_isas": ["portable", "avx2"],
    "cuda": True,
    "cuda_streams": True,
    "cuda_archs": "80;90;100",
    "cuda_runtime": 13000,
    "cuda_driver": 13000,
}

CPU_ONLY = Machine(
    python="3.12.1",
    build={**BUILD, "cuda_driver": 0},
    torch="2.14.1+cu130",
    torch_cuda="13.0",
    torch_cpu="AVX2 kernels on AMD EPYC; MKL 2024.2",
    gpus=(),
    packages={
        "megatron-core": "0.19.2",
        "transformers": "5.19.0",
        "torchvision": "0.29.1",
        "sglang": "0.5.23",
        "transformer-engine": None,
        "apex": None,
    },
    errors={"apex": "it is not NVIDIA's"},
    sandbox="your user id; memory 512 MB by cgroup",
)

ON_A_GPU = replace(CPU_ONLY, build=BUILD, gpus=(Device("NVIDIA H200", 90),))


def diagnosis(machine: Machine, topic: str) -> Diagnosis:
    (line,) = (line for line in diagnose(machine) if line.topic == topic)
    return line


@pytest.mark.parametrize("machine", [CPU_ONLY, ON_A_GPU])
def test_a_machine_in_order_has_no_problem(machine: Machine) -> None:
    assert not [line for line in diagnose(machine) if line.verdict == "problem"]


def built(machine: Machine, **changes: Any) -> Machine:
    return replace(machine, build={**BUILD, "cuda_driver": 0, **changes})


def on_gpu(archs: str, capability: int) -> Machine:
    gpus = (Device("a GPU", capability),)
    return built(replace(ON_A_GPU, gpus=gpus), cuda_driver=13000, cuda_archs=archs)


NO_EXTENSION = replace(CPU_ONLY, build=None, errors={"extension": "no module bapo_megatron._C"})
NO_KERNELS = {"cuda": False, "cuda_archs": "", "cuda_runtime": 0}
OLD_DRIVER = "driver up to CUDA 12.8, kernels linked with CUDA 13.0; .* 580"
APEX = replace(ON_A_GPU, packages={**ON_A_GPU.packages, "apex": "0.9.10"})
NO_SANDBOX = replace(CPU_ONLY, sandbox="", errors={"sandbox": "bwrap is not installed; install it"})


@pytest.mark.parametrize(
    ("machine", "topic", "verdict", "words"),
    [
        (NO_EXTENSION, "extension", "problem", "_C; pip install --no-build-isolation -e ."),
        (built(CPU_ONLY, **NO_KERNELS), "CUDA kernels", "note", "not built"),
        (built(ON_A_GPU, **NO_KERNELS), "CUDA kernels", "problem", "not built"),
        (built(ON_A_GPU, cuda_streams=False), "CUDA kernels", "problem", "its stream; pip"),
        (built(CPU_ONLY, cuda_streams=False), "CUDA kernels", "ok", "80, 90, 100, the last"),
        (built(ON_A_GPU, cuda_driver=12080), "driver", "problem", OLD_DRIVER),
        # torch sees no GPU then, if it needs the same driver.
        (built(CPU_ONLY, cuda_driver=12080), "driver", "problem", OLD_DRIVER),
        (on_gpu("80;90;100", 86), "GPU", "ok", ""),  # a later minor version of the generation
        (on_gpu("80;90;100", 120), "GPU", "ok", ""),  # by PTX
        (on_gpu("90", 80), "GPU", "problem", ""),
        (on_gpu("80;90;100", 75), "GPU", "problem", ""),
        (on_gpu("90a", 90), "GPU", "ok", ""),
        (on_gpu("90a", 100), "GPU", "problem", ""),  # nor is its PTX for another architecture
        (APEX, "apex", "problem", "is not NVIDIA's"),
        (replace(APEX, errors={}), "apex", "ok", ""),
        (CPU_ONLY, "sandbox", "ok", "^your user id; memory 512 MB by cgroup; $"),
        (NO_SANDBOX, "sandbox", "note", "^bwrap is not installed; install it$"),
    ],
)
def test_what_does_not_fit_is_a_problem_where_it_matters_and_has_a_remedy(
    machine: Machine, topic: str, verdict: str, words: str
) -> None:
    line = diagnosis(machine, topic)
    assert line.verdict == verdict
    assert re.search(words, f"{line.text}; {line.remedy}")


def test_the_kernels_find_the_stream_of_a_torch_that_has_cuda() -> None:
    build = probe().build
    assert build is not None
    if build["cuda"]:
        # True without a GPU too: it takes a torch that was built with CUDA, and the right link.
        assert build["cuda_streams"] == (torch.version.cuda is not None)


@pytest.mark.parametrize(
    ("name", "version", "error", "on_cpu", "on_gpu"),
    [
        ("megatron-core", "0.16.1", "", "problem", "problem"),
        ("megatron-core", None, "", "problem", "problem"),
        ("sglang", "0.4.0", "", "note", "note"),
        ("sglang", None, "", "note", "note"),
        ("torchvision", None, "", "note", "note"),
        ("torchvision", "0.29.1", "operator nms does not exist", "problem", "problem"),
        ("transformers", "5.19.0", "operator nms does not exist", "problem", "problem"),
        ("transformer-engine", None, "No module named 'transformer_engine'", "ok", "note"),
        ("transformer-engine", "2.20.2", "", "ok", "ok"),
        ("transformer-engine", "2.20.2+abc", "", "ok", "ok"),
        ("transformer-engine", "2.12.0", "", "note", "note"),
        ("transformer-engine", "2.20.2", "undefined symbol", "note", "problem"),
    ],
)
def test_a_package_is_judged_by_its_version_and_by_whether_it_works(
    name: str, version: str | None, error: str, on_cpu: str, on_gpu: str
) -> None:
    for machine, verdict in ((CPU_ONLY, on_cpu), (ON_A_GPU, on_gpu)):
        changed = replace(
            machine, packages={**machine.packages, name: version}, errors={name: error}
        )
        line = diagnosis(changed, name)
        assert line.verdict == verdict
        assert (version or "not installed") in line.text
        assert version is None or error in line.text
        assert bool(line.remedy) == (verdict != "ok")


def test_the_kernels_that_results_depend_on_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    built = (
        "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for …\n"
        "  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa7)\n"
        "  - Build settings: BLAS_INFO=mkl, BUILD_TYPE=Release\n"
    )
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr("pathlib.Path.read_text", lambda _: "model name\t: AMD EPYC 9B14\n")
    assert _torch_cpu(built) == (
        "AVX512 kernels on AMD EPYC 9B14; Math Kernel Library 2024.2, MKL-DNN 3.12.0, BLAS mkl"
    )


@pytest.mark.slow
def test_the_command_reports_this_machine_as_json() -> None:
    result = run(["doctor", "--json"])
    assert result.returncode == 0, result.stdout + result.stderr
    topics = [row["topic"] for row in json.loads(result.stdout)]
    assert {
        "extension",
        "CPU kernels",
        "CUDA kernels",
        "torch",
        "torch on the CPU",
        "sglang",
    } <= set(topics)


@pytest.mark.skipif(
    shutil.which("nvcc") is None
    or bool(os.environ.get("BAPO_SKIP_CUDA_BUILD") or os.environ.get("BAPO_CUDA_ARCHS")),
    reason="needs nvcc (no GPU), and a build that was left to its defaults",
)
def test_with_nvcc_the_cuda_kernels_are_built_for_three_architectures() -> None:
    build = probe().build
    assert build is not None
    assert build["cuda"]
    assert build["cuda_archs"] == "80;90;100"
    assert build["cuda_runtime"] > 0


def test_overrides_need_the_configuration_of_a_cluster() -> None:
    result = run(["doctor", "train.steps=3"])
    assert result.returncode == 2
    assert result.stderr == (
        "bapo-megatron: Invalid value for KEY=VALUE: only with --cluster CONFIG; see --help\n"
    )
