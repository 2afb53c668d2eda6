"""``python -m bench.kernel_study``: counts kernels in an emulator, or times them here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from bench.kernel_study import clock, published, sweep
from bench.kernel_study.emulator import EmulatorError, find
from bench.kernel_study.plot import draw
from bench.kernel_study.sweep import SweepResult
from treadle.base.fast_classes import dataclass
from treadle.base.humanize import counted
from treadle.cli.options import Picture
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.svg import check_place, origin
from treadle.cli.ui.table import heading, print_json, print_table, remark, say
from treadle.errors import TreadleError, printable
from treadle.files.target import write_text
from treadle.machine.topology import cpu_name
from treadle.profiling.report import row_in_use

RISCV = "rv64gcv"
NATIVE = "native"
MCA = ("llvm-mca", "llvm-mca-22", "llvm-mca-23")
OPTIONAL = (  # columns, in the order in which they are omitted
    "products a cycle of P670 ",
    "P670 cycles ",
    "X60 ns ",
    "right at ",
    "products an instruction ",
)
CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class StudyOptions:
    """The options of a study."""

    isa: str
    vlen: int | None
    emulator: str | None
    repeat: int
    plot: Path | None
    as_json: bool


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("kernel", type=click.Choice([k.name for k in sweep.KERNELS]), required=False)
@click.option(
    "--isa",
    type=click.Choice([RISCV, NATIVE]),
    default=RISCV,
    show_default=True,
    help="RISC-V's vectors, or those of this machine.",
)
@click.option(
    "--emulator",
    type=click.Choice(["qemu"]),
    help="Count instructions in the emulator; time nothing.",
)
@click.option(
    "--vlen",
    type=click.Choice([str(vlen) for vlen in sweep.LENGTHS]),
    help="Bits of an emulated register.  [default: 256]",
)
@click.option(
    "-r",
    "--repeat",
    type=click.IntRange(1),
    default=12,
    metavar="N",
    help="Runs of each setting, hot and cold; the shortest time counts.",
)
@click.option("--plot", type=Picture(), help="Draw a chart (SVG).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    kernel: str | None,
    isa: str,
    emulator: str | None,
    vlen: str | None,
    repeat: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Sweep the settings of KERNEL, or of all kernels: see docs/riscv.md.

    Instructions are counted in an emulator, or times are measured on this machine. The exit code is
    1 if a result is wrong.
    """
    study(kernel, StudyOptions(isa, int(vlen) if vlen else None, emulator, repeat, plot, as_json))


def main(args: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 failed with one clear line, 2 wrong usage."""
    try:
        command(args, prog_name="python -m bench.kernel_study")
    except TreadleError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)


def study(kernel: str | None, asked: StudyOptions) -> None:
    """Sweep KERNEL, or all; print a table for each, and plot them."""
    if asked.plot is not None:
        check_place(asked.plot)
    wanted = [k for k in sweep.KERNELS if kernel in (None, k.name)]
    about, found = (emulated if asked.emulator else timed)(wanted, asked)
    if asked.as_json:
        print_json({**about, "cpu": cpu_name(), "settings": [row_of(f) for f in found]})
    else:
        say(", ".join(f"{name} {value}" for name, value in about.items()))
        for each in wanted:
            print()
            heading(f"{each.name}, {counted(each.size, 'value')} of K")
            print_found([f for f in found if f.kernel == each.name])
    for one in found:
        for vlen, why in one.wrong.items():
            if why is not None:
                remark(f"{one.spec.name} computes wrong results at VLEN {vlen}: {why}")
    if asked.plot is not None:
        facts = [str(value) for value in about.values()]
        write_text(asked.plot, draw(found, ", ".join(facts), origin(facts[:1])))
    if not all(f.is_right for f in found):
        raise click.exceptions.Exit(1)


def emulated(
    wanted: Sequence[Any], asked: StudyOptions
) -> tuple[dict[str, Any], list[SweepResult]]:
    """Count instructions at one VLEN, and check the results at each VLEN."""
    if asked.isa != RISCV:
        raise click.UsageError(f"--emulator needs --isa {RISCV}")
    places = folders()
    qemu = find("qemu-riscv64", places)
    vlen = asked.vlen or 256
    mca = next((path for name in MCA if (path := available(name, places))), None)
    if mca is None:
        remark(
            "llvm-mca is not installed, so cycles are missing (tools/fetch_emulators.py --mca "
            "fetches it)"
        )
    found: list[SweepResult] = []
    total = sum(len(kernel.specs) for kernel in wanted)
    with ProgressBar() as progress:
        for kernel in wanted:
            first = len(found)
            for one in sweep.emulate(kernel, vlen, sweep.LENGTHS, qemu, mca):
                found.append(one)
                progress("measure", len(found), total)
            sweep.mark_best(found[first:])
    return {"isa": RISCV, "vlen": vlen, "emulator": asked.emulator}, found


def timed(wanted: Sequence[Any], asked: StudyOptions) -> tuple[dict[str, Any], list[SweepResult]]:
    """Time the kernels on this machine."""
    row = row_in_use()
    if asked.vlen is not None:
        raise click.UsageError("--vlen needs --emulator: the vector length of hardware is fixed")
    if asked.isa == RISCV and not row.triple.startswith("riscv64"):
        raise click.UsageError(
            f"this machine runs {row.name}: --emulator qemu counts {RISCV}'s instructions, "
            f"--isa {NATIVE} times the same kernels on this machine's vectors"
        )
    found: list[SweepResult] = []
    with ProgressBar() as progress:
        for done, kernel in enumerate(wanted):
            progress("measure", done, len(wanted))
            found += clock.measure(kernel, row, asked.repeat)
    return {"isa": row.name}, found


def folders() -> list[Path]:
    """Return the folder of tools/fetch_emulators.py's programs."""
    return [Path(os.environ.get("TREADLE_EMULATORS", CHECKOUT / ".emulators")) / "bin"]


def available(name: str, places: Sequence[Path]) -> str | None:
    """Return the path of a program, or None."""
    try:
        return find(name, places)
    except EmulatorError:
        return None


def row_of(found: SweepResult) -> dict[str, Any]:
    """Return one setting as JSON."""
    row = {name: value for name, value in asdict(found).items() if name != "spec"}
    fields = {name: value for name, value in vars(found.spec).items()}
    return {**row, "fields": fields, "published_hot_ns": published.hot_ns(found.spec)}


def print_found(found: Sequence[SweepResult]) -> None:
    """Print a line for each setting; columns without data are omitted."""
    cores = [core for core in found[0].cycles if any(f.cycles[core] for f in found)]
    columns: dict[str, list[str]] = {
        "setting": [f.spec.setting for f in found],
        "right at": [right_at(f) for f in found],
        "instructions ": [number(f.instructions) for f in found],
        "products an instruction ": [
            f"{f.products / f.instructions:.2f}" if f.instructions else "" for f in found
        ],
        "spills ": [number(f.spills) for f in found],
    }
    for core in cores:
        columns[f"{core} cycles "] = [number(f.cycles[core]) for f in found]
        columns[f"products a cycle of {core} "] = [
            f"{f.products / cycles:.1f}" if (cycles := f.cycles[core]) else "" for f in found
        ]
    if "X60" in cores:
        columns["X60 ns "] = [
            f"{f.cycles['X60'] / published.X60_GHZ:.0f}" if f.cycles["X60"] else "" for f in found
        ]
    columns["hot ns "] = [f"{f.hot_ns:.1f}" if f.hot_ns else "" for f in found]
    columns["cold ns "] = [f"{f.cold_ns:.1f}" if f.cold_ns else "" for f in found]
    columns["published ns "] = [number(published.hot_ns(f.spec)) for f in found]
    columns[""] = ["best" if f.best else "" for f in found]
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    print_table(list(shown), list(zip(*shown.values(), strict=True)), optional=OPTIONAL)


def number(value: int | None) -> str:
    """Format a count, or nothing for None."""
    return "" if value is None else str(value)


def right_at(found: SweepResult) -> str:
    """Return the VLENs at which the results are right, with WRONG if any are not."""
    right = " ".join(str(vlen) for vlen in sorted(found.wrong) if found.wrong[vlen] is None)
    return right if found.is_right else f"WRONG; right at {right or 'none'}"
