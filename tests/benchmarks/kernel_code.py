"""Counts what the compiled CUDA kernels execute per logit, beside an H200's memory bandwidth.

    python -m tests.benchmarks.kernel_code --out docs/benchmarks/kernel_code_sm90_202611

Compiles csrc/cuda as setup.py does and lists the machine code with cuobjdump. Needs both tools and
no GPU; nothing is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.benchmarks import machine_code
from tests.benchmarks.harness import REPOSITORY, machine, write_report
from tests.benchmarks.kernel_counts import (
    BOOST_HZ,
    COPY_BYTES_PER_S,
    COUNTED,
    ELEMENT_BYTES,
    NUM_PROCESSORS,
    PASSES,
    PEAK_BYTES_PER_S,
    Kernel,
    Streaming,
    shares,
    slots_per_element,
)

ARCH = "90"
COLUMNS = (19_008, 152_064)
CLOCKS_HZ = (BOOST_HZ, 1.85e9, 1.7e9, 1.5e9)
METHOD = """
Nothing here was measured: these are counts of compiled instructions, set against data sheets. A
warp's path executes every if without else; of two branches it takes the one with more memory
accesses, then the shorter one; loops beside the main one are passed once. So all vectors exist and
none holds the target or padding, and every warp pays for the single elements at a row's ends, which
most warps skip. All logits come from memory, none from the cache. Rates per clock and processor:
128 instructions issued, 128 FMA, 64 IMAD, 64 ALU and 16 MUFU lanes. A share says how busy a unit
is, not how well latency is hidden. Occupancy is that of sm_90."""
PASS_REMARK = """
Instructions per logit where all vectors of the pass exist. FMA counts float32 and packed 16-bit
arithmetic, IMAD the integer products and moves that only half of these units do."""
ROW_REMARK = """
Instructions per logit of a whole row: of its vectors, of the passes over the loop besides (loads,
maximum, branches), of each row besides. Slots: what four schedulers issue at {clock:.2f} GHz while
a logit moves at {bandwidth:.1f} TB/s. Shares are of that time; the busiest unit limits if it
exceeds 100 %, else the memory does."""
SLOT_REMARK = """
128 lanes × {processors} processors × clock × bytes / bandwidth."""


def find_cuobjdump(nvcc: Path) -> Path:
    """Return the tool that lists machine code: beside nvcc, on PATH, or the one triton brings.

    Raises:
        FileNotFoundError: It is in none of the places.
    """
    on_path = shutil.which("cuobjdump")
    triton = importlib.util.find_spec("triton")
    places = [nvcc.resolve().parent / "cuobjdump", Path(on_path) if on_path else None]
    if triton is not None and triton.origin is not None:
        places.append(Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump")
    for place in places:
        if place is not None and place.is_file():
            return place
    raise FileNotFoundError(
        "cuobjdump was not found beside nvcc, on PATH or in triton; install triton or the CUDA "
        "toolkit's binary utilities"
    )


def compile_kernels() -> tuple[dict[str, list[Kernel]], dict[str, str]]:
    """Compile csrc/cuda for each configured architecture; the kernels, and who compiled them.

    Raises:
        FileNotFoundError: There is no nvcc or no cuobjdump.
        ValueError: sm_90 is not configured.
    """
    with mock.patch("setuptools.setup"):
        setup = runpy.run_path(str(REPOSITORY / "setup.py"))
    toolkit = setup["CudaToolkit"].find()
    if toolkit is None:
        raise FileNotFoundError("nvcc was not found; install the CUDA toolkit or set CUDA_HOME")
    if ARCH not in toolkit.archs:
        raise ValueError(f"BAPO_CUDA_ARCHS lacks {ARCH}, which this page is about; add it")
    cuobjdump = find_cuobjdump(toolkit.nvcc)
    kernels: dict[str, list[Kernel]] = {arch: [] for arch in toolkit.archs}
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted((REPOSITORY / "csrc/cuda").glob("*.cu")):
            for arch in toolkit.archs:
                cubin = Path(folder) / f"{source.stem}.{arch}.cubin"
                target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
                command = [str(toolkit.nvcc), *setup["NVCC_FLAGS"], target]
                command += [f"-I{REPOSITORY / 'csrc'}", "-cubin", str(source), "-o", str(cubin)]
                subprocess.run(command, check=True)
                if "__global__" in source.read_text():
                    kernels[arch] += _read_kernels(source, arch, cuobjdump, cubin)
    versions = {
        "nvcc": _version(toolkit.nvcc),
        "cuobjdump": _version(cuobjdump),
        "flags": " ".join(setup["NVCC_FLAGS"]),
    }
    return kernels, versions


def _version(tool: Path) -> str:
    text = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"V(\d+\.\d+\.\d+)", text)[-1]


def _read_kernels(source: Path, arch: str, cuobjdump: Path, cubin: Path) -> list[Kernel]:
    def list_(*what: str) -> str:
        command = [cuobjdump, *what, cubin]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    functions = machine_code.parse(list_("-sass"))
    text = source.read_text()
    result = []
    usage = r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)"
    for mangled, registers, stack, shared in re.findall(usage, list_("-res-usage")):
        found = re.search(r"\d([a-z_]+)_kernel(?:I(6__half|13__nv_bfloat16|f)E)?", mangled)
        assert found is not None, mangled
        bounds = re.search(rf"__launch_bounds__\((\w+)[^)]*\)\s+{found[1]}_kernel\(", text)
        assert bounds is not None, f"{found[1]} has no launch bounds"
        threads = re.search(rf"constexpr int {bounds[1]} = (\d+);", text)
        assert threads is not None, bounds[1]
        types = {"6__half": "float16", "13__nv_bfloat16": "bfloat16", "f": "float32", None: None}
        result.append(
            Kernel(
                name=found[1],
                element=types[found[2]],
                arch=arch,
                num_threads=int(threads[1]),
                registers=int(registers),
                shared_bytes=int(shared),
                stack_bytes=int(stack),
                code=functions[mangled],
            )
        )
    return sorted(result, key=lambda kernel: (kernel.name, str(kernel.element)))


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def _label(kernel: Kernel) -> str:
    return f"`{kernel.name}` {kernel.element or ''}".strip()


def _resources(kernels: dict[str, list[Kernel]]) -> list[str]:
    rows = []
    for index, kernel in enumerate(kernels[ARCH]):
        same = [of_arch[index] for of_arch in kernels.values()]
        assert {_label(k) for k in same} == {_label(kernel)}
        rows.append(
            [
                _label(kernel),
                str(kernel.num_threads),
                " / ".join(str(k.registers) for k in same),
                " / ".join(str(k.num_spills) for k in same),
                " / ".join(str(k.stack_bytes) for k in same),
                f"{kernel.shared_bytes:,}",
                str(kernel.blocks_per_processor),
                f"{kernel.occupancy_share:.1%}",
            ]
        )
    archs = " / ".join(f"sm_{arch}" for arch in kernels)
    head = ["kernel", "threads", f"registers ({archs})", "spilling instructions", "stack bytes"]
    return _table([*head, "shared bytes", "blocks per processor", "occupancy"], rows)


def _passes(streams: list[Streaming]) -> list[str]:
    head = ["kernel", "logits per thread", "bytes per logit", "FMA", "IMAD", "ALU", "MUFU"]
    head += ["memory", "uniform", "control", "all", "bytes in flight per processor"]
    rows = []
    for stream in streams:
        mean = stream.pass_per_element()
        rows.append([_label(stream.kernel), str(stream.num_vectors * stream.vector_length)])
        rows[-1] += [str(stream.bytes_per_element), *(f"{mean[pipe]:.2f}" for pipe in COUNTED)]
        rows[-1] += [f"{stream.bytes_in_flight:,}"]
    return _table(head, rows)


def _rows(figures: list[dict[str, Any]]) -> list[str]:
    head = ["kernel", "columns", "vectors", "passes", "row", "all", "slots"]
    head += ["issue", "FMA", "ALU", "MUFU", "limit"]
    rows = []
    for figure in figures:
        busy, parts = figure["shares"], figure["instructions_per_element"]
        worst = max(busy, key=lambda pipe: busy[pipe])
        rows.append([figure["kernel"], f"{figure['columns']:,}"])
        rows[-1] += [f"{parts[part]['total']:.2f}" for part in ("vectors", "passes", "row", "all")]
        rows[-1] += [f"{figure['slots']:.1f}"]
        rows[-1] += [f"{busy[pipe]:.0%}" for pipe in ("issue", "fma", "alu", "mufu")]
        rows[-1] += ["memory" if busy[worst] < 1 else worst]
    return _table(head, rows)


def _slots() -> list[str]:
    head = ["clock"]
    for how in ("read once", "read and written"):
        head += [f"{x / 1e12} TB/s, {how}" for x in (PEAK_BYTES_PER_S, COPY_BYTES_PER_S)]
    rows = [
        [f"{hz / 1e9:.2f} GHz"]
        + [
            f"{slots_per_element(2 * passes, bandwidth, hz):.1f}"
            for passes in PASSES.values()
            for bandwidth in (PEAK_BYTES_PER_S, COPY_BYTES_PER_S)
        ]
        for hz in CLOCKS_HZ
    ]
    return _table(head, rows)


def report(kernels: dict[str, list[Kernel]]) -> tuple[list[str], dict[str, Any]]:
    """Return the lines of the page below its heading, and its figures."""
    streams = [
        Streaming(kernel)
        for name in PASSES
        for element in ELEMENT_BYTES
        for kernel in kernels[ARCH]
        if (kernel.name, kernel.element) == (name, element)
    ]
    figures: list[dict[str, Any]] = []
    for stream in streams:
        slots = slots_per_element(stream.bytes_per_element)
        for columns in COLUMNS:
            parts = stream.row_per_element(columns)
            figure = {"kernel": _label(stream.kernel), "columns": columns, "slots": slots}
            figure |= {"instructions_per_element": parts, "shares": shares(parts["all"], slots)}
            figures.append(figure)
    row_remark = ROW_REMARK.format(clock=BOOST_HZ / 1e9, bandwidth=COPY_BYTES_PER_S / 1e12)
    slot_remark = SLOT_REMARK.format(processors=NUM_PROCESSORS)
    lines = [*METHOD.splitlines(), "", "## Resources", "", *_resources(kernels), ""]
    lines += ["## One pass of the loop", *PASS_REMARK.splitlines(), "", *_passes(streams), ""]
    lines += ["## Whole rows", *row_remark.splitlines(), "", *_rows(figures), ""]
    lines += ["## Slots per 16-bit logit", *slot_remark.splitlines(), "", *_slots()]
    resources = [
        {name: value for name, value in vars(kernel).items() if name != "code"}
        | {"num_spills": kernel.num_spills, "num_instructions": len(kernel.code.instructions)}
        for of_arch in kernels.values()
        for kernel in of_arch
    ]
    passes = {_label(stream.kernel): stream.pass_per_element() for stream in streams}
    return lines, {"resources": resources, "passes": passes, "rows": figures}


def main() -> None:
    """Compile, count, print; write with --out."""
    parser = argparse.ArgumentParser(description="Counts what the compiled CUDA kernels execute.")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json (no suffix)")
    options = parser.parse_args()
    kernels, compiler = compile_kernels()
    lines, figures = report(kernels)
    where = machine(torch.device("cpu"))
    title = "Machine code of the CUDA kernels, sm_90"
    head = [f"# {title}", "", f"{where['date']}, commit {where['commit']}; nvcc "]
    head[-1] += f"{compiler['nvcc']} `{compiler['flags']}`, cuobjdump {compiler['cuobjdump']}."
    text = "\n".join([*head, "", f"    {where['command']}", *lines]) + "\n"
    print(text)  # noqa: T201
    about = {"title": title, "date": where["date"], "commit": where["commit"]} | compiler
    write_report(options.out, text, {**about, "command": where["command"], **figures})


if __name__ == "__main__":
    main()
