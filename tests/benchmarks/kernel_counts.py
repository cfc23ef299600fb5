"""What a compiled kernel executes per logit, and what an H200 leaves time for.

Paths are those of machine_code.py; nothing is measured.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bapo_megatron.gpus import find_gpu
from tests.benchmarks import machine_code
from tests.benchmarks.machine_code import Function, count

WARP = 32
NUM_PROCESSORS = 132
WARPS_PER_PROCESSOR, BLOCKS_PER_PROCESSOR, REGISTERS_PER_PROCESSOR = 64, 32, 65536
SHARED_BYTES_PER_PROCESSOR = 228 * 1024  # cuobjdump counts the 1 kB that each block has besides
PEAK_BYTES_PER_S = find_gpu("H200").memory_bytes_per_s
COPY_BYTES_PER_S = 4.3e12  # an estimate of what a copy reaches, 90 %
BOOST_HZ = 1.98e9  # the highest clock of an H200 SXM
LANES = {"issue": 128, "fma": 128, "imad": 64, "alu": 64, "mufu": 16}
"""Lanes per clock and processor: four schedulers; the rates of the CUDA programming guide's table
of arithmetic throughput for compute capability 9.0."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PASSES = {"logprob_partials": 1, "logits_backward": 2}
"""How often the kernels that stream logits move each of them."""
COUNTED = ("fma", "imad", "alu", "mufu", "memory", "uniform", "control", "total")


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel."""

    name: str
    element: str | None
    """Of a template, the type of the logits."""
    arch: str
    num_threads: int
    """Of a block, as it is launched."""
    registers: int
    shared_bytes: int
    stack_bytes: int
    code: Function

    @property
    def num_spills(self) -> int:
        """Accesses to local memory in the machine code."""
        return sum(i.name in ("LDL", "STL") for i in self.code.instructions)

    @property
    def blocks_per_processor(self) -> int:
        """How many blocks one processor of sm_90 holds. Registers are given to warps by 256."""
        warps = self.num_threads // WARP
        registers_per_warp = -(-self.registers * WARP // 256) * 256
        limits = [BLOCKS_PER_PROCESSOR, WARPS_PER_PROCESSOR // warps]
        limits.append(REGISTERS_PER_PROCESSOR // registers_per_warp // warps)
        if self.shared_bytes:
            limits.append(SHARED_BYTES_PER_PROCESSOR // self.shared_bytes)
        return min(limits)

    @property
    def occupancy_share(self) -> float:
        """Warps that fit, of those that a processor can hold."""
        return self.blocks_per_processor * self.num_threads / WARP / WARPS_PER_PROCESSOR


class Streaming:
    """The paths of a kernel that walks rows of logits, a block per row."""

    def __init__(self, kernel: Kernel) -> None:
        loop = kernel.code.main_loop()
        assert loop is not None, f"{kernel.name} has no loop with 16-byte loads"
        assert kernel.element is not None
        self.kernel = kernel
        self.element_bytes = ELEMENT_BYTES[kernel.element]
        self.vector_length = 16 // self.element_bytes
        full = kernel.code.path(*loop)
        besides = kernel.code.path(*loop, skips=self._is_vector)
        self.num_vectors = sum(i.is_wide_load for i in full)
        self.besides = count(besides)
        """A pass over the loop without the arithmetic of its vectors."""
        self.vectors = count(full)
        """The arithmetic of all vectors of a pass."""
        self.vectors.subtract(self.besides)
        if self.vectors["mufu"] != self.num_vectors * self.vector_length:
            raise ValueError(f"{kernel.name}: the loop's path has not one exponential per element")
        self.before = count(kernel.code.path(0, loop[0]))
        self.before.subtract(count(kernel.code.blocks[loop[0]]))
        after = kernel.code.path(loop[1] + 1, self._last_block(loop[1] + 1))
        self.after_last = count(after)
        exits = [index for index, i in enumerate(after) if i.name == "EXIT"]
        self.after = count(after[: exits[0] + 1])
        """Behind the loop, for all warps but the one that finishes the row."""

    def _is_vector(self, body: machine_code.Path) -> bool:
        return count(body)["mufu"] >= self.vector_length

    def _last_block(self, start: int) -> int:
        for index, block in enumerate(self.kernel.code.blocks):
            if index >= start and block[-1].name == "EXIT" and not block[-1].is_conditional:
                return index
        raise ValueError(f"{self.kernel.name} does not end")

    @property
    def bytes_per_element(self) -> int:
        """Memory traffic of a logit."""
        return PASSES[self.kernel.name] * self.element_bytes

    @property
    def bytes_in_flight(self) -> int:
        """What a processor has asked for when all its blocks have made a pass's loads."""
        kernel = self.kernel
        return kernel.blocks_per_processor * kernel.num_threads * self.num_vectors * 16

    def pass_per_element(self) -> dict[str, float]:
        """Instructions per logit of a pass whose vectors all exist, by pipe."""
        elements = self.num_vectors * self.vector_length
        return {pipe: (self.besides[pipe] + self.vectors[pipe]) / elements for pipe in COUNTED}

    def row_per_element(self, columns: int) -> dict[str, dict[str, float]]:
        """Instructions per logit of a whole aligned row, by part and pipe.

        A vector is executed by a warp if one of its lanes has it.
        """
        step = self.kernel.num_threads
        num_vectors = columns // self.vector_length
        warps = step // WARP
        passes = warp_vectors = 0
        for begin in range(0, num_vectors, step * self.num_vectors):
            for warp in range(warps):
                first = range(begin + warp * WARP, num_vectors, step)[: self.num_vectors]
                passes += bool(first)
                warp_vectors += len(first)
        parts = {
            "row": _scaled(self.before, warps) + _scaled(self.after, warps - 1) + self.after_last,
            "passes": _scaled(self.besides, passes),
            "vectors": _scaled(self.vectors, warp_vectors / self.num_vectors),
        }
        per_element = {
            name: {pipe: part[pipe] * WARP / columns for pipe in COUNTED}
            for name, part in parts.items()
        }
        per_element["all"] = {
            pipe: sum(part[pipe] for part in per_element.values()) for pipe in COUNTED
        }
        return per_element


def _scaled(counts: Counter[str], factor: float) -> Counter[str]:
    return Counter({pipe: number * factor for pipe, number in counts.items()})


def slots_per_element(
    bytes_per_element: float, bytes_per_s: float = COPY_BYTES_PER_S, clock_hz: float = BOOST_HZ
) -> float:
    """Lanes that the schedulers issue while memory moves one element."""
    return LANES["issue"] * NUM_PROCESSORS * clock_hz * bytes_per_element / bytes_per_s


def shares(per_element: dict[str, float], slots: float) -> dict[str, float]:
    """How much of the memory's time the schedulers and each pipe are busy."""
    lanes = {
        "issue": per_element["total"],
        "fma": per_element["fma"] + per_element["imad"],
        "imad": per_element["imad"],
        "alu": per_element["alu"],
        "mufu": per_element["mufu"],
    }
    return {pipe: number * LANES["issue"] / LANES[pipe] / slots for pipe, number in lanes.items()}
