"""What was built, what will run on this machine, and what does not fit together.

``probe`` looks at the machine, ``diagnose`` judges what it saw; ``ask_servers`` asks servers.
"""

import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.version import Version

from bapo_megatron import __version__
from bapo_megatron.config.rollout import ENGINES
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.load import load_kind
from bapo_megatron.errors import RolloutError
from bapo_megatron.runtime.processes import nccl_settings
from bapo_megatron.runtime.stack import REMEDY, error_of, stack_errors
from bapo_megatron.runtime.versions import installed_version

MEGATRON_VERSION = "0.19.2"
"""The version that pyproject.toml asks for."""
_ANSWER_S = 30.0
TRANSFORMER_ENGINE_VERSION = "2.20.2"
"""The version whose sources the tests import; Megatron-core declares none."""
_NETWORK = Path("/sys/class/net")
"""A directory per interface, and files of drivers such as bonding."""
REBUILD = "pip install --no-build-isolation -e ."

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
    load_error: str
    torch: str
    torch_cuda: str | None
    """The CUDA that torch was built with."""
    gpus: tuple[Device, ...]
    packages: dict[str, str | None]
    """Installed version by distribution name."""
    apex_has_kernels: bool
    """Whether this apex is NVIDIA's (``amp_C``), not the web framework of the package index."""
    errors: dict[str, str]
    """Why a package does not work, by distribution name; also of some that are not installed."""
    tools: dict[str, str | None]
    """Version line of each compiler."""
    interfaces: tuple[str, ...]
    """Network interfaces that are up, without the loopback."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    topic: str
    verdict: Verdict
    text: str
    remedy: str = ""


def probe() -> Machine:
    """Look at this machine; imports the extension and packages, and calls an operator."""
    build, load_error = None, ""
    try:
        build = import_module("bapo_megatron.ops.extension").build_info()
    except ImportError as error:
        load_error = str(error)
    names = ("megatron-core", "transformers", "torchvision", "transformer-engine", "apex")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(num_gpus)]
    return Machine(
        python=platform.python_version(),
        build=build,
        load_error=load_error,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        gpus=tuple(Device(gpu.name, 10 * gpu.major + gpu.minor) for gpu in gpus),
        packages={name: installed_version(name) for name in (*names, *_engine_packages())},
        apex_has_kernels=importlib.util.find_spec("amp_C") is not None,
        errors={
            **stack_errors(),
            "transformer-engine": error_of(lambda: import_module("transformer_engine.pytorch")),
        },
        tools={"c++": _version_line("c++", 0), "nvcc": _version_line("nvcc", -1)},
        interfaces=tuple(
            sorted(
                path.parent.name
                for path in _NETWORK.glob("*/operstate")
                if path.parent.name != "lo" and path.read_text().strip() != "down"
            )
        ),
    )


def diagnose(machine: Machine) -> list[Finding]:
    """Judge what ``probe`` saw, in the order of the report."""
    return [
        Finding("python", "ok", machine.python),
        *_judge_extension(machine),
        *_judge_gpus(machine),
        _judge_backend(machine),
        _judge_version("megatron-core", machine, MEGATRON_VERSION, "problem"),
        *(_judge_version(name, machine, v, "note") for name, v in _engine_packages().items()),
        _judge_version("transformers", machine, None, "problem"),
        _judge_version("torchvision", machine, None, "note"),
        _judge_transformer_engine(machine),
        _judge_apex(machine),
        Finding("NCCL", "ok", f"{_nccl()} in the trainer, and in servers that are started here"),
        *(
            Finding(name, "ok" if line else "note", line or "not found")
            for name, line in machine.tools.items()
        ),
        _judge_network(machine),
    ]


async def ask_servers(config: RunConfig) -> list[Finding]:
    """Ask each of ``rollout.servers`` whether a trainer here could form an NCCL group with it."""
    findings = []
    backend = load_kind(config.rollout.engine).open(config, "cpu", awaits_weights=True)
    for address in backend.addresses():
        engine = await backend.connect(address)
        try:
            capabilities = await engine.capabilities(_ANSWER_S)
            capabilities.check_nccl(engine.address)
        except RolloutError as error:
            found = Finding(engine.address, "problem", str(error))
        else:
            found = Finding(engine.address, "ok", f"{_nccl()}, as here")
            if not capabilities.nccl_settings:  # it was not started by this project
                remedy = f"start it with {_nccl()}"
                found = Finding(engine.address, "note", "NCCL settings unknown", remedy)
        findings.append(found)
        await engine.close()
    return findings


def _nccl() -> str:
    return " ".join(f"{name}={value}" for name, value in nccl_settings().items())


def _engine_packages() -> dict[str, str]:
    """The distributions that engines need, with the versions they were measured with."""
    return {name: v for kind in map(load_kind, ENGINES) for name, v in kind.packages.items()}


def _judge_extension(machine: Machine) -> Iterator[Finding]:
    build = machine.build
    if build is None:
        yield Finding("extension", "problem", machine.load_error, REBUILD)
        return
    made = f"commit {build['git_commit']}, {build['compiler']}, {build['flags']}"
    yield Finding("extension", "ok", f"version {__version__}, {made}")
    yield Finding("CPU kernels", "ok", f"{build['isa']} of {', '.join(build['available_isas'])}")
    if build["cuda"]:
        text = f"compute capabilities {build['cuda_archs'].replace(';', ', ')}, the last as PTX too"
        yield Finding("CUDA kernels", "ok", text)
    else:
        remedy = f"install nvcc or set CUDA_HOME, then {REBUILD}"
        yield Finding("CUDA kernels", "problem" if machine.gpus else "note", "not built", remedy)


def _judge_gpus(machine: Machine) -> Iterator[Finding]:
    cuda = f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "without CUDA"
    yield Finding("torch", "ok", f"{machine.torch}, {cuda}")
    build = machine.build or {}
    archs = [arch for arch in build.get("cuda_archs", "").split(";") if arch]
    if not machine.gpus:
        yield Finding("GPU", "note", "none that torch can use")
    for gpu in machine.gpus:
        text = f"{gpu.name}, compute capability {gpu.capability / 10:.1f}"
        if archs and not _runs_on(archs, gpu.capability):
            remedy = f"BAPO_CUDA_ARCHS='{gpu.capability}' {REBUILD}"
            yield Finding("GPU", "problem", f"{text}: no kernels for it", remedy)
        else:
            yield Finding("GPU", "ok", text)
    runtime, driver = build.get("cuda_runtime", 0), build.get("cuda_driver", 0)
    if not runtime or not (driver or machine.gpus):
        return
    text = f"driver up to CUDA {_cuda(driver)}, kernels linked with CUDA {_cuda(runtime)}"
    if driver // 1000 >= runtime // 1000:
        yield Finding("driver", "ok", text)
    else:
        wanted = f"install a driver for CUDA {runtime // 1000} (13 needs 580 or newer)"
        remedy = f"{wanted}, or build with an older CUDA_HOME"
        yield Finding("driver", "problem", text, remedy)


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


def _judge_backend(machine: Machine) -> Finding:
    topic, build = "ops.backend: auto", machine.build
    if build is None:
        return Finding(topic, "problem", "nothing can run", REBUILD)
    if not machine.gpus:
        return Finding(topic, "ok", f"runs cpu ({build['isa']})")
    if not build["cuda"]:
        return Finding(topic, "problem", "runs the slow reference on the GPU", "see CUDA kernels")
    if not build["cuda_streams"]:
        text = "would run cuda, but the kernels cannot ask this torch for its stream"
        return Finding(topic, "problem", text, REBUILD)
    return Finding(topic, "ok", "runs cuda")


def _judge_version(name: str, machine: Machine, wanted: str | None, missing: Verdict) -> Finding:
    version = machine.packages[name]
    remedy = f"pip install {name}" + (f"=={wanted}" if wanted else "")
    if version is None:
        text = "not installed" if missing == "problem" else "not installed; needed where it serves"
        return Finding(name, missing, text, remedy)
    if wanted is not None and version != wanted:
        text = f"{version}, but this code was measured with {wanted}"
        return Finding(name, missing, text, remedy)
    if error := machine.errors.get(name):
        return Finding(name, "problem", f"{version} does not work: {error}", REMEDY)
    return Finding(name, "ok", version)


def _judge_transformer_engine(machine: Machine) -> Finding:
    name = "transformer-engine"
    version, error = machine.packages[name], machine.errors.get(name)
    if version is None and machine.gpus:
        remedy = f"install {TRANSFORMER_ENGINE_VERSION} (docs/launch.md)"
        return Finding(name, "note", "not installed; layers are the slower local ones", remedy)
    if version is None:
        return Finding(name, "ok", "not installed, and of no use without a GPU")
    if not error and Version(version).public == TRANSFORMER_ENGINE_VERSION:
        return Finding(name, "ok", version)
    if not error:
        text = f"{version}, but the tests import {TRANSFORMER_ENGINE_VERSION}"
        return Finding(name, "note", text, f"install {TRANSFORMER_ENGINE_VERSION} (docs/launch.md)")
    text = f"{version} cannot be imported: {error}"
    if not machine.gpus:
        return Finding(name, "note", text)
    return Finding(name, "problem", text, "build it for this torch and CUDA, or uninstall it")


def _judge_apex(machine: Machine) -> Finding:
    version = machine.packages["apex"]
    if version is None:
        return Finding("apex", "ok", "not installed; the optimizer is torch's AdamW")
    if machine.apex_has_kernels:
        return Finding("apex", "ok", f"{version} with fused kernels")
    return Finding(
        "apex",
        "problem",
        f"{version} is not NVIDIA's: the package index has an unrelated web framework of this "
        "name, or the CUDA extensions were not built",
        "pip uninstall apex, or build NVIDIA's from its repository with APEX_CUDA_EXT=1",
    )


def _judge_network(machine: Machine) -> Finding:
    if not machine.interfaces:
        return Finding("network", "ok", "no interface but the loopback")
    return Finding(
        "network",
        "note",
        f"{', '.join(machine.interfaces)}: ranks on several nodes listen there without a key, as "
        "torchrun itself does even on one node, and who reaches them runs code as you",
        "start ranks by python -m bapo_megatron.torchrun; close the network around their nodes "
        "(docs/security.md)",
    )


def _version_line(tool: str, index: int) -> str | None:
    path = shutil.which(tool) or shutil.which(tool, path="/usr/local/cuda/bin")
    if path is None:
        return None
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    lines = answer.stdout.strip().splitlines()
    return lines[index] if lines else None
