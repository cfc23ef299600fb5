"""What was built, what will run on this machine, and what is incompatible.

``probe`` looks at the machine, ``diagnose`` judges what it saw.
"""

import importlib.util
import json
import platform
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch

from bapo_megatron import __version__
from bapo_megatron.config.rollout import ENGINES
from bapo_megatron.config.sandbox import SandboxConfig
from bapo_megatron.engine.load import load_kind
from bapo_megatron.policy.families import FAMILIES, TITLES
from bapo_megatron.runtime.stack import REMEDY, error_of, stack_errors
from bapo_megatron.runtime.versions import installed_version
from bapo_megatron.sandbox.base import SandboxError
from bapo_megatron.sandbox.bubblewrap import open_sandbox

_MEGATRON_VERSION = "0.19.2"
"""The version that pyproject.toml asks for."""
_TRANSFORMER_ENGINE_VERSION = "2.20.2"
"""The version whose sources the tests import; Megatron-core declares none."""
_REBUILD = "pip install --no-build-isolation -e ."

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Device:
    """One device that torch sees."""

    name: str
    capability: int
    """Compute capability without the dot: 90."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is installed here."""

    python: str
    build: dict[str, Any] | None
    """``build_info()`` of the extension; None where it does not load."""
    torch: str
    torch_cuda: str | None
    """The CUDA that torch was built with."""
    torch_cpu: str
    """The processor, and the kernels of torch that its results depend on."""
    gpus: tuple[Device, ...]
    packages: dict[str, str | None]
    """Installed version by distribution name."""
    errors: dict[str, str]
    """Why a package, ``extension`` or ``sandbox`` does not work, by name; also for some not
    installed."""
    sandbox: str
    """What limits programs of the policy; empty if the sandbox does not work."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of the report."""

    topic: str
    verdict: Verdict
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class SupportedModel:
    """What ``doctor --models`` says of a family."""

    architecture: str
    model_type: str
    title: str
    only_with: str
    """Fields of config.json of which other values are refused."""
    engines: str


def supported_models() -> list[SupportedModel]:
    """Describe every family of ``policy.families``."""
    models, sampled = [], load_kind("local").model_types or ()
    for model_type, family in FAMILIES.items():
        only = [
            f"{name}: {' or '.join(json.dumps(value) for value in get_args(kind))}"
            for name, field in family.fields.model_fields.items()
            for kind in (field.annotation, *get_args(field.annotation))
            if get_origin(kind) is Literal
        ]
        title = TITLES[model_type].rstrip(".")
        engines = "SGLang, local" if model_type in sampled else "SGLang"
        models.append(
            SupportedModel(family.architecture, model_type, title, "; ".join(only), engines)
        )
    return models


def probe() -> Machine:
    """Look at this machine; imports the extension and packages, and calls an operator."""
    build, errors = None, stack_errors()
    try:
        build = import_module("bapo_megatron.ops.extension").build_info()
    except ImportError as error:
        errors["extension"] = str(error)
    errors["transformer-engine"] = error_of(lambda: import_module("transformer_engine.pytorch"))
    if importlib.util.find_spec("amp_C") is None:
        errors["apex"] = "it is not NVIDIA's, or was built without CUDA extensions"
    names = ("megatron-core", "transformers", "torchvision", "transformer-engine", "apex")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(num_gpus)]
    return Machine(
        python=platform.python_version(),
        build=build,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        torch_cpu=_torch_cpu(torch.__config__.show()),
        gpus=tuple(Device(gpu.name, 10 * gpu.major + gpu.minor) for gpu in gpus),
        packages={name: installed_version(name) for name in (*names, *_engine_packages())},
        sandbox=_sandbox(errors),
        errors=errors,
    )


def _torch_cpu(built: str) -> str:
    """Describe the processor, and torch's kernels on it by ``torch.__config__.show()``."""
    cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    pattern = r"(Math Kernel Library) Version (\S+?)-|(MKL-DNN) v(\S+)|(BLAS)_INFO=(\w+)"
    libraries = [" ".join(filter(None, found)) for found in re.findall(pattern, built)]
    kernels = torch.backends.cpu.get_cpu_capability()
    return f"{kernels} kernels on {cpu[1] if cpu else platform.machine()}; {', '.join(libraries)}"


def _sandbox(errors: dict[str, str]) -> str:
    try:
        with closing(open_sandbox(SandboxConfig())) as sandbox:
            return sandbox.describe()
    except SandboxError as error:
        errors["sandbox"] = str(error)
        return ""


def diagnose(machine: Machine) -> list[Diagnosis]:
    """Judge what ``probe`` saw, in the order of the report."""
    return [
        Diagnosis("python", "ok", machine.python),
        *_judge_extension(machine),
        *_judge_gpus(machine),
        _judge_package("megatron-core", machine, _MEGATRON_VERSION, "problem"),
        *(_judge_package(name, machine, v, "note") for name, v in _engine_packages().items()),
        _judge_package("transformers", machine, None, "problem"),
        _judge_package("torchvision", machine, None, "note"),
        _judge_transformer_engine(machine),
        _judge_apex(machine),
        _judge_sandbox(machine),
    ]


def _engine_packages() -> dict[str, str]:
    """The distributions that engines need, with the versions they were measured with."""
    return {name: v for kind in map(load_kind, ENGINES) for name, v in kind.packages.items()}


def _judge_extension(machine: Machine) -> Iterator[Diagnosis]:
    build = machine.build
    if build is None:
        yield Diagnosis("extension", "problem", machine.errors["extension"], _REBUILD)
        return
    text = f"commit {build['git_commit']}, {build['compiler']}, {build['flags']}"
    yield Diagnosis("extension", "ok", f"version {__version__}, {text}")
    yield Diagnosis("CPU kernels", "ok", f"{build['isa']} of {', '.join(build['available_isas'])}")
    if not build["cuda"]:
        remedy = f"install nvcc or set CUDA_HOME, then {_REBUILD}"
        yield Diagnosis("CUDA kernels", "problem" if machine.gpus else "note", "not built", remedy)
    elif machine.gpus and not build["cuda_streams"]:
        yield Diagnosis("CUDA kernels", "problem", "cannot ask this torch for its stream", _REBUILD)
    else:
        text = f"compute capabilities {build['cuda_archs'].replace(';', ', ')}, the last as PTX too"
        yield Diagnosis("CUDA kernels", "ok", text)


def _judge_gpus(machine: Machine) -> Iterator[Diagnosis]:
    cuda = f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "without CUDA"
    yield Diagnosis("torch", "ok", f"{machine.torch}, {cuda}")
    yield Diagnosis("torch on the CPU", "ok", machine.torch_cpu)
    build = machine.build or {}
    archs = [arch for arch in build.get("cuda_archs", "").split(";") if arch]
    if not machine.gpus:
        yield Diagnosis("GPU", "note", "none that torch can use")
    for gpu in machine.gpus:
        text = f"{gpu.name}, compute capability {gpu.capability / 10:.1f}"
        if archs and not _runs_on(archs, gpu.capability):
            remedy = f"BAPO_CUDA_ARCHS='{gpu.capability}' {_REBUILD}"
            yield Diagnosis("GPU", "problem", f"{text}: no kernels for it", remedy)
        else:
            yield Diagnosis("GPU", "ok", text)
    runtime, driver = build.get("cuda_runtime", 0), build.get("cuda_driver", 0)
    if not runtime or not (driver or machine.gpus):
        return
    text = f"driver up to CUDA {_cuda(driver)}, kernels linked with CUDA {_cuda(runtime)}"
    if driver // 1000 >= runtime // 1000:
        yield Diagnosis("driver", "ok", text)
    else:
        remedy = f"install a driver for CUDA {runtime // 1000} (13 needs 580 or newer)"
        yield Diagnosis("driver", "problem", text, remedy)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}" if version else "none"


def _runs_on(archs: list[str], capability: int) -> bool:
    """Whether code for these architectures, the last one as PTX too, runs on a GPU.

    A binary runs on later minor versions of its generation, PTX on everything later; with the
    suffix ``a`` both run on that one architecture only, with ``f`` on its generation.
    """
    for arch in archs:
        number = int(arch.rstrip("af"))
        same = number // 10 == capability // 10 and number <= capability
        if number == capability or (same and not arch.endswith("a")):
            return True
    return archs[-1].isdigit() and int(archs[-1]) <= capability


def _judge_package(
    name: str, machine: Machine, wanted: str | None, missing: Verdict, remedy: str = ""
) -> Diagnosis:
    """Judge a version; ``missing`` is the verdict without the package, or with another version."""
    version = machine.packages[name]
    remedy = remedy or f"pip install {name}" + (f"=={wanted}" if wanted else "")
    if version is None:
        return Diagnosis(name, missing, "not installed", remedy)
    if wanted is not None and version.partition("+")[0] != wanted:
        text = f"{version}, but this code was tested with {wanted}"
        return Diagnosis(name, missing, text, remedy)
    if error := machine.errors.get(name):
        return Diagnosis(name, "problem", f"{version} does not work: {error}", REMEDY)
    return Diagnosis(name, "ok", version)


def _judge_transformer_engine(machine: Machine) -> Diagnosis:
    name, remedy = "transformer-engine", f"install {_TRANSFORMER_ENGINE_VERSION} (docs/launch.md)"
    version, error = machine.packages[name], machine.errors.get(name)
    if version is None and not machine.gpus:
        return Diagnosis(name, "ok", "not installed; only GPUs use it")
    if version is not None and error:
        verdict: Verdict = "problem" if machine.gpus else "note"
        return Diagnosis(name, verdict, f"{version} does not work: {error}", remedy)
    return _judge_package(name, machine, _TRANSFORMER_ENGINE_VERSION, "note", remedy)


def _judge_sandbox(machine: Machine) -> Diagnosis:
    if machine.sandbox:
        return Diagnosis("sandbox", "ok", machine.sandbox)
    error, _, remedy = machine.errors["sandbox"].partition("; ")
    return Diagnosis("sandbox", "note", error, remedy)


def _judge_apex(machine: Machine) -> Diagnosis:
    version, error = machine.packages["apex"], machine.errors.get("apex")
    if version is None:
        return Diagnosis("apex", "ok", "not installed; the optimizer is torch's AdamW")
    if not error:
        return Diagnosis("apex", "ok", f"{version} with fused kernels")
    remedy = "pip uninstall apex, or build NVIDIA's from its repository with APEX_CUDA_EXT=1"
    return Diagnosis("apex", "problem", f"{version} has no fused kernels: {error}", remedy)
