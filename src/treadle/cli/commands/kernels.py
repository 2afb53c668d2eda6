"""``treadle kernels``: the compiled kernels of this machine, and their code."""

from __future__ import annotations

from difflib import get_close_matches

import click

from treadle.base.humanize import n_bytes
from treadle.cli.ui.table import print_json, print_table
from treadle.errors import TreadleError


@click.command()
@click.argument("name", required=False)
@click.option("--ir", is_flag=True, help="Print the kernel's LLVM IR.")
@click.option("--asm", is_flag=True, help="Print the kernel's machine code, disassembled.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print a list of objects: name, n_bytes, isa."
)
def command(name: str | None, ir: bool, asm: bool, as_json: bool) -> None:
    """List the compiled kernels in this machine's cache, or show the code of the kernel NAME."""
    if name is None and (ir or asm):
        raise click.UsageError("--ir and --asm need the NAME of a kernel")
    if as_json and (ir or asm):
        raise click.UsageError("--json excludes --ir and --asm")

    from treadle.jit import cache
    from treadle.profiling import kernel_inspect

    entries = cache.entries()
    if name is not None:
        entries = [entry for entry in entries if entry.name == name]
        if not entries:
            near = get_close_matches(name, {entry.name for entry in cache.entries()})
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise TreadleError(f"no kernel '{name}' in the cache{hint}")
        if ir or asm:
            for wanted, code in ((ir, kernel_inspect.ir), (asm, kernel_inspect.asm)):
                if wanted:
                    print(code(name))
            return
    if as_json:
        print_json([entry._asdict() for entry in entries])
        return

    print_table(
        ["kernel", "code ", "isa"],
        [(kernel, n_bytes(size), isa) for kernel, size, isa in sorted(entries)],
        folding="kernel",
    )
