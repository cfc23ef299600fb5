"""Reads machine code as ``cuobjdump -sass`` lists it, and follows the path that a warp takes.

No GPU is needed, and none is modelled: an instruction is a line, a path is a list of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

PIPES: dict[str, str] = {
    "fma": "FFMA FADD FMUL HFMA2 HADD2 HMUL2",
    "imad": "IMAD",
    "alu": "F2FP FMNMX FMNMX3 FSEL FSETP HMNMX2 I2FP IADD IADD3 IMNMX ISETP LEA LOP3 MOV P2R PLOP3 "
    "PRMT R2P SEL SHF VHMNMX VIADD VIADDMNMX VIMNMX",
    "mufu": "BREV CREDUX F2F F2I FCHK FLO FRND I2F MUFU POPC REDUX",
    "fp64": "DADD DFMA DMUL DSETP",
    "memory": "ATOM ATOMG ATOMS LDC LDCU LDG LDL LDS MEMBAR RED REDG S2R CS2R SHFL STG STL STS "
    "VOTE",
    "uniform": "R2UR S2UR VOTEU",
    "control": "B2R BAR BMOV BRA BREAK BSSY BSYNC CALL DEPBAR EXIT NOP RET WARPSYNC YIELD",
}
"""Who executes an opcode. ``imad`` is the half of the FMA units that can also do integers."""

_PIPE_OF = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes.split()}
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?PT?\d*)\s+)?([A-Z0-9]+)(\S*)\s*([^;]*?)\s*;")
_FUNCTION = re.compile(r"Function : (\S+)")
_TARGET = re.compile(r"0x([0-9a-f]+)$")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a listing."""

    address: int
    guard: str | None
    """The predicate without ``@``; None: always executed."""
    name: str
    """Up to the first dot: ``LDG``."""
    suffix: str
    """From the first dot on: ``.E.EF.128``."""
    operands: str

    @property
    def pipe(self) -> str:
        """The key of ``PIPES`` that executes it.

        Raises:
            ValueError: The opcode is in no list.
        """
        if self.name in _PIPE_OF:
            return _PIPE_OF[self.name]
        if self.name.startswith("U"):
            return "uniform"
        raise ValueError(f"unknown opcode {self.name}{self.suffix}; add it to PIPES in {__file__}")

    @property
    def is_wide_load(self) -> bool:
        """Whether a lane loads 16 bytes from global memory."""
        return self.name == "LDG" and ".128" in self.suffix

    @property
    def target(self) -> int | None:
        """Where a branch goes; None for everything else.

        A branch taken by diverged shuffles (``BRA.DIV``) leads out of the line and back, and is
        taken for no branch.
        """
        if self.name in ("BRX", "JMP", "JMX"):
            raise ValueError(f"{self.name} at {self.address:#x}: such branches are not followed")
        found = _TARGET.search(self.operands)
        if self.name != "BRA" or ".DIV" in self.suffix or found is None:
            return None
        return int(found[1], 16)

    @property
    def is_conditional(self) -> bool:
        """Whether the next line may be executed after a branch or exit."""
        return self.guard is not None or re.search(r"\bU?P\d", self.operands) is not None


Path = tuple[Instruction, ...]


def parse(listing: str) -> dict[str, Function]:
    """Return the functions of a listing of ``cuobjdump -sass`` by their mangled names."""
    lines: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    for text in listing.splitlines():
        if heading := _FUNCTION.search(text):
            current = lines.setdefault(heading[1], [])
        elif found := _LINE.search(text):
            assert current is not None, "an instruction before the first function"
            address, guard, name, suffix, operands = found.groups()
            current.append(Instruction(int(address, 16), guard, name, suffix, operands))
    return {name: Function(tuple(instructions)) for name, instructions in lines.items()}


@dataclass(frozen=True, eq=False)
class Function:
    """The machine code of a kernel."""

    instructions: Path

    @cached_property
    def blocks(self) -> list[Path]:
        """Runs of instructions that are entered at their start and left at their end."""
        starts = {self.instructions[0].address}
        for this, following in zip(self.instructions, self.instructions[1:], strict=False):
            if this.target is not None or this.name in ("EXIT", "RET"):
                starts.add(following.address)
            if this.target is not None:
                starts.add(this.target)
        blocks: list[list[Instruction]] = []
        for instruction in self.instructions:
            if instruction.address in starts:
                blocks.append([])
            blocks[-1].append(instruction)
        return [tuple(block) for block in blocks]

    @cached_property
    def successors(self) -> list[tuple[int, ...]]:
        """Blocks that may follow each block, without those before it: loops are cut."""
        index_of = {block[0].address: index for index, block in enumerate(self.blocks)}
        result = []
        for index, block in enumerate(self.blocks):
            last = block[-1]
            ends = last.target is not None or last.name in ("EXIT", "RET")
            following = [] if ends and not last.is_conditional else [index + 1]
            if last.target is not None:
                following.append(index_of[last.target])
            result.append(tuple({n for n in following if index < n < len(self.blocks)}))
        return result

    def block_at(self, address: int) -> int:
        """The block that holds an address."""
        return max(i for i, block in enumerate(self.blocks) if block[0].address <= address)

    def main_loop(self) -> tuple[int, int] | None:
        """First and last block of the smallest loop with the most 16-byte loads; None without."""
        loops = []
        for index, block in enumerate(self.blocks):
            target = block[-1].target
            if target is None or target >= block[-1].address:
                continue
            first = self.block_at(target)
            body = [i for b in self.blocks[first : index + 1] for i in b]
            loops.append((sum(i.is_wide_load for i in body), -len(body), first, index))
        best = max(loops, default=(0, 0, 0, 0))
        return (best[2], best[3]) if best[0] else None

    def path(
        self, start: int, goal: int, skips: Callable[[Path], bool] = lambda body: False
    ) -> Path:
        """What a warp executes from one block to the end of another.

        An if without else is executed unless ``skips`` says no to its body. Of two branches the one
        with more memory accesses is taken, then the shorter one. Loops in between are passed once.

        Raises:
            ValueError: The goal cannot be reached.
        """
        best: dict[int, Path] = {goal: self.blocks[goal]}
        after: dict[int, set[int]] = {goal: {goal}}  # blocks on every way to the goal
        for index in range(goal - 1, start - 1, -1):
            following = [n for n in self.successors[index] if n in best]
            if not following:
                continue
            after[index] = {index} | set.intersection(*(after[n] for n in following))
            best[index] = self.blocks[index] + self._choose(following, best, after, skips)
        if start not in best:
            raise ValueError(f"no path from block {start} to block {goal}")
        return best[start]

    @staticmethod
    def _choose(
        following: Sequence[int],
        best: dict[int, Path],
        after: dict[int, set[int]],
        skips: Callable[[Path], bool],
    ) -> Path:
        for body, join in (following, following[::-1]) if len(following) == 2 else ():
            if join in after[body]:
                skipped = skips(best[body][: len(best[body]) - len(best[join])])
                return best[join] if skipped else best[body]
        return max((best[n] for n in following), key=lambda p: (count(p)["memory"], -len(p)))


def count(path: Path) -> Counter[str]:
    """Instructions by pipe; ``total`` is their sum."""
    result = Counter(instruction.pipe for instruction in path)
    result["total"] = len(path)
    return result
