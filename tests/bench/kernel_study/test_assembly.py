"""What is read out of assembly and of qemu's log, on texts of the test's own."""

from __future__ import annotations

from pathlib import Path

from bench.kernel_study import assembly, emulator

# The block in front of the loop is where a jump back leads that is no loop.
KERNEL = """
f:
\tbge\ta2, a3, .LBB0_7
.LBB0_2:
\tvsetivli\tzero, 8, e32, m1, ta, ma
\tvmv.v.i\tv8, 0
\tvse32.v\tv8, (a1)
\tvse32.v\tv9, (a1)
\tvse32.v\tv9, (a1)
\tvse32.v\tv9, (a1)
.LBB0_4:
\tblez\ta6, .LBB0_2
\tvsetvli\tzero, a6, e16, m2, ta, ma
.LBB0_6:
\tvle16.v\tv20, (a4)
\tvl4re32.v\tv24, (a5)
\tsd\ta0, 8(sp)
\tvfwmacc.vv\tv16, v20, v22
\tblt\tt2, a7, .LBB0_6
\tj\t.LBB0_4
.LBB0_7:
\tret
"""


def test_the_loop_is_of_one_block() -> None:
    loop = assembly.find_loop(KERNEL)
    assert [line.split()[0] for line in loop.lines] == [
        "vle16.v",
        "vl4re32.v",
        "sd",
        "vfwmacc.vv",
        "blt",
    ]
    assert (loop.element, loop.lmul, loop.spills) == ("16", "m2", 2)


def test_a_text_without_a_loop_is_one_round() -> None:
    loop = assembly.find_loop("f:\n\tvle8.v\tv8, (a0)\n\tret\n")
    assert len(loop.lines) == 2
    assert loop.lmul == ""


def test_cycles_are_of_all_rounds(tmp_path: Path) -> None:
    """Of many rounds a hundred are walked; the types that hold at the loop's beginning are told."""
    mca = tmp_path / "llvm-mca"
    mca.write_text(
        "#!/bin/sh\n"
        f'for last; do :; done; cp "$last" {tmp_path}/seen; echo "$@" > {tmp_path}/args\n'
        "echo 'Total Cycles:      250'\n"
    )
    mca.chmod(0o755)
    loop = assembly.find_loop(KERNEL)
    assert assembly.cycles(loop, 400, "X60", str(mca)) == 1000
    assert assembly.cycles(loop, 10, "X60", str(mca)) == 250
    assert "-iterations=10" in (tmp_path / "args").read_text()
    assert "-mcpu=spacemit-x60" in (tmp_path / "args").read_text()
    seen = (tmp_path / "seen").read_text()
    assert seen.startswith("# LLVM-MCA-RISCV-SEW E16\n# LLVM-MCA-RISCV-LMUL M2\n")
    assert ".LBB0_6" not in seen
    mca.write_text("#!/bin/sh\necho unknown target >&2; exit 1\n")
    assert assembly.cycles(loop, 10, "X60", str(mca)) is None


LOG = """----------------
IN: f
0x10001000:  00000013          addi a0,a0,1
0x10001004:  00000013          vle8.v v8,(a0)

----------------
IN: f
0x10001008:  00000013          bne a0,a1,0x10001000

Trace 0: 0x7f00 [00000000/0000000010001000/00000000/ff000000] f
Trace 0: 0x7f80 [00000000/0000000010001008/00000000/ff000000] f
Trace 0: 0x7f00 [00000000/0000000010001000/00000000/ff000000] f
"""


def test_a_log_is_counted_by_blocks() -> None:
    assert emulator.instructions(LOG) == 5
