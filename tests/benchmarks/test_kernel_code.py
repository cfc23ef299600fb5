"""Paths and counts of a small listing equal those counted by hand, and so does the roofline."""

from __future__ import annotations

import pytest

from tests.benchmarks.kernel_counts import Kernel, Streaming, shares, slots_per_element
from tests.benchmarks.machine_code import Function, count, parse

LISTING = """
	code for sm_90
		Function : _ZN4bapo10row_kernelIfEEvPf
	.headerflags	@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   S2R R0, SR_TID.X ;  /* 0x0000000000007919 */
                                   /* 0x000e2e0000002100 */
        /*0010*/              @!P0 BRA 0x30 ;  /* 0x0000001000088947 */
        /*0020*/                   HFMA2.MMA R7, -RZ, RZ, 0, 0 ;
        /*0030*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0040*/               @P1 LDG.E.EF.128 R8, desc[UR12][R48.64+-0x8000] ;
        /*0050*/               @P2 BRA 0x110 ;
        /*0060*/                   MUFU.EX2 R4, R8 ;
        /*0070*/                   MUFU.EX2 R5, R9 ;
        /*0080*/                   MUFU.EX2 R6, R10 ;
        /*0090*/                   MUFU.EX2 R7, R11 ;
        /*00a0*/              @!P3 BRA P4, 0xd0 ;
        /*00b0*/                   IMAD.WIDE R2, R3, 0x10, R4 ;
        /*00c0*/                   BRA 0x100 ;
        /*00d0*/                   FADD R4, R4, R5 ;
        /*00e0*/                   FSEL R4, R4, RZ, !P0 ;
        /*00f0*/                   FADD R4, R4, -RZ ;
        /*0100*/                   STG.E.EF.128 desc[UR18][R34.64], R4 ;
        /*0110*/                   UISETP.GE.AND UP0, UPT, UR4, UR22, UPT ;
        /*0120*/              @!P0 BRA 0x30 ;
        /*0130*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0140*/               @P0 EXIT ;
        /*0150*/                   LDS.128 R16, [UR4+0x40] ;
        /*0160*/                   FFMA R3, R4, UR5, -R3 ;
        /*0170*/                   EXIT ;
        /*0180*/                   BRA 0x180;
        /*0190*/                   NOP;
		..........
		Function : _ZN4bapo12other_kernelEv
        /*0000*/                   EXIT ;
"""


@pytest.fixture
def code() -> Function:
    return parse(LISTING)["_ZN4bapo10row_kernelIfEEvPf"]


def make_kernel(
    code: Function, *, threads: int = 64, registers: int = 32, shared: int = 0
) -> Kernel:
    return Kernel("logprob_partials", "float32", "90", threads, registers, shared, 0, code)


def test_every_line_of_every_function_is_read(code: Function) -> None:
    functions = parse(LISTING)
    assert {name: len(f.instructions) for name, f in functions.items()} == {
        "_ZN4bapo10row_kernelIfEEvPf": 26,
        "_ZN4bapo12other_kernelEv": 1,
    }
    load = code.instructions[4]
    assert (load.address, load.guard, load.name, load.suffix) == (0x40, "P1", "LDG", ".E.EF.128")
    assert count(code.instructions) == {
        "memory": 4, "control": 10, "fma": 4, "imad": 1, "alu": 2, "mufu": 4, "uniform": 1,
        "total": 26,
    }  # fmt: skip


def test_the_loop_is_the_one_with_the_loads(code: Function) -> None:
    first, last = code.main_loop() or (-1, -1)
    assert code.blocks[first][0].address == 0x30
    assert code.blocks[last][-1].address == 0x120
    assert parse(LISTING)["_ZN4bapo12other_kernelEv"].main_loop() is None


def test_a_path_takes_an_if_without_else_and_the_shorter_of_two_branches(code: Function) -> None:
    first, last = code.main_loop() or (-1, -1)
    assert [i.address for i in code.path(first, last)] == [
        0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0x100, 0x110, 0x120,
    ]  # fmt: skip
    skipped = code.path(first, last, skips=lambda body: count(body)["mufu"] == 4)
    assert [i.address for i in skipped] == [0x30, 0x40, 0x50, 0x110, 0x120]


def test_a_block_that_does_not_lead_to_the_goal_is_refused(code: Function) -> None:
    with pytest.raises(ValueError, match="no path from block"):
        code.path(len(code.blocks) - 1, 0)


def test_an_unknown_opcode_is_refused() -> None:
    (function,) = parse("Function : f\n /*0000*/ QUUX.E R0, R1 ;").values()
    with pytest.raises(ValueError, match=r"unknown opcode QUUX\.E"):
        count(function.instructions)


@pytest.mark.parametrize(
    ("columns", "passes", "total"),
    [
        # Two warps: row 2 * 3 + 2 + 5, per pass 5, per vector 8.
        (512, 4, 13 + 4 * 5 + 4 * 8),
        (384, 3, 13 + 3 * 5 + 3 * 8),  # the second pass has vectors for the first warp alone
    ],
)
def test_a_row_costs_what_its_warps_execute(
    code: Function, columns: int, passes: int, total: int
) -> None:
    parts = Streaming(make_kernel(code)).row_per_element(columns)
    assert parts["all"]["total"] == pytest.approx(total * 32 / columns)
    assert parts["all"]["mufu"] == pytest.approx(passes * 4 * 32 / columns)
    assert parts["passes"]["total"] == pytest.approx(passes * 5 * 32 / columns)


def test_a_pass_is_counted_per_logit(code: Function) -> None:
    mean = Streaming(make_kernel(code)).pass_per_element()
    assert (mean["total"], mean["mufu"], mean["imad"]) == (13 / 4, 1.0, 1 / 4)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [(256, 64, 1152, 4), (256, 48, 0, 5), (256, 17, 0, 8), (512, 40, 25732, 3), (64, 32, 60000, 3)],
)
def test_a_processor_holds_blocks_by_registers_warps_and_shared_memory(
    code: Function, threads: int, registers: int, shared: int, blocks: int
) -> None:
    kernel = make_kernel(code, threads=threads, registers=registers, shared=shared)
    assert kernel.blocks_per_processor == blocks


def test_the_memory_leaves_so_many_slots() -> None:
    assert slots_per_element(2, 4.3e12, 1.98e9) == pytest.approx(15.56, abs=0.01)
    assert slots_per_element(2, 4.8e12, 1.70e9) == pytest.approx(11.97, abs=0.01)
    assert slots_per_element(4, 4.8e12, 1.98e9) == pytest.approx(27.88, abs=0.01)


def test_slower_units_are_busy_for_longer() -> None:
    counts = {"total": 10.0, "fma": 3.0, "imad": 1.0, "alu": 3.0, "mufu": 1.0}
    expected = {"issue": 0.625, "fma": 0.25, "imad": 0.125, "alu": 0.375, "mufu": 0.5}
    assert shares(counts, 16.0) == expected
