"""The instruction set that a start has chosen, on disk beside the stored plans: a later start that
compiles nothing needs no module of instruction sets.

An entry's name is a hash of what the choice depends on: the CPU's features, the name that the user
has forced, and the sources.
"""

from __future__ import annotations

import json
import os
from collections.abc import Set
from typing import TYPE_CHECKING

from treadle.base.fast_classes import cached_property
from treadle.files.stored_entries import are_stored, key_of, read_entry, write_entry
from treadle.jit.cache import source_hash

if TYPE_CHECKING:
    from treadle.isa.isa import Isa

SUFFIX = ".isa"


class ChosenIsa:
    """The part of the row ``name`` of the table of instruction sets that a start needs: the fields
    that name its kernels in the cache (``Isa``), and the batch sizes that have plans of their own,
    for models of floats and for others (``kernels.matmul.sizes.batch_sizes``).
    """

    def __init__(
        self,
        name: str,
        triple: str,
        cpu: str,
        features: str,
        sizes_of_floats: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> None:
        self.name = name
        self.triple = triple
        self.cpu = cpu
        self.features = features
        self.sizes_of_floats = tuple(sizes_of_floats)
        self.sizes = tuple(sizes)

    @cached_property
    def row(self) -> Isa:
        """The row itself, imported on first use."""
        from treadle.isa import ROWS

        return ROWS[self.name]


# The row of any machine (``isa/portable.py``), for kernels that are compiled once for all.
PORTABLE = ChosenIsa("portable", "", "", "", (), ())


def row_of(isa: Isa | ChosenIsa) -> Isa:
    """Return the row of an instruction set."""
    return isa.row if isinstance(isa, ChosenIsa) else isa


def choose_stored(features: Set[str], forced: str | None = None) -> ChosenIsa:
    """Return what ``treadle.isa.choose`` returns for a CPU with these features (LLVM's names), with
    the same errors: stored by an earlier process, or chosen and then stored.
    """
    name = forced or os.environ.get("TREADLE_ISA")
    key = key_of(source_hash(), sorted(features), name) if are_stored() else None
    if key is not None and (body := read_entry(key + SUFFIX)) is not None:
        return ChosenIsa(*json.loads(bytes(body)))
    from treadle.isa import choose
    from treadle.kernels.matmul.sizes import batch_sizes

    row = choose(features, forced)
    sizes = batch_sizes(row, True), batch_sizes(row, False)
    about = row.name, row.triple, row.cpu, row.features, *sizes
    if key is not None:
        write_entry(key + SUFFIX, json.dumps(about).encode())
    return ChosenIsa(*about)
