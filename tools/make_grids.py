"""Print the literal of ``BITS`` in formats/grids.py, from the tables of the ``gguf`` package.

Each codebook of the IQ formats is a subset of a cubic lattice, in the order of the points' digits
read as a number with the first coordinate least significant. So the subset alone says everything:
one bit for each point of the lattice. Usage: ``python tools/make_grids.py``.
"""

from __future__ import annotations

import base64
import textwrap

import gguf.quants
import numpy as np

CODEBOOKS = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def bits(name: str) -> bytes:
    """The lattice's points in order, a bit each, the first in the lowest bit of the first byte."""
    table = getattr(gguf.quants, name)
    table.init_grid()
    points = table.grid.reshape(table.grid_shape)
    digits = np.searchsorted(np.array(table.grid_map, np.float32), points)
    base = len(table.grid_map)
    dim = points.shape[1]
    order = digits @ base ** np.arange(dim)
    if not (np.diff(order) > 0).all():
        raise SystemExit(f"{name}: its points are not in order, so a set cannot stand for them")
    chosen = np.zeros(base**dim, bool)
    chosen[order] = True
    return np.packbits(chosen, bitorder="little").tobytes()


if __name__ == "__main__":
    print("BITS = {")
    for name in CODEBOOKS:
        lines = textwrap.wrap(base64.b85encode(bits(name)).decode(), 88, break_on_hyphens=False)
        print(f'    "{name}": (')
        print("\n".join(f'        "{line}"' for line in lines))
        print("    ),")
    print("}")
