"""Weight formats, one row each in FORMATS."""

from __future__ import annotations

from treadle.errors import UnsupportedError
from treadle.formats.blocks32 import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from treadle.formats.floats import BF16, F16, F32, F64
from treadle.formats.format import Format
from treadle.formats.fp4 import MXFP4, NVFP4
from treadle.formats.ggml_types import OTHERS, REMOVED, GGMLType
from treadle.formats.iq1 import IQ1_M, IQ1_S
from treadle.formats.iq2 import IQ2_S, IQ2_XS, IQ2_XXS
from treadle.formats.iq3 import IQ3_S, IQ3_XXS
from treadle.formats.iq4 import IQ4_NL, IQ4_XS
from treadle.formats.k_low import Q2_K, Q3_K
from treadle.formats.k_quants import Q4_K, Q5_K, Q6_K
from treadle.formats.mlx import mlx, named
from treadle.formats.ternary import Q1_0, Q2_0, TQ1_0, TQ2_0

__all__ = [
    "FORMATS",
    "GGML_TYPES",
    "REMOVED",
    "Format",
    "GGMLType",
    "by_name",
    "mlx",
    "number_of",
    "type_of",
]

ROWS = (
    *(F32, F16, BF16, F64),
    *(Q8_0, Q4_0, Q4_1, Q5_0, Q5_1),
    *(Q2_K, Q3_K, Q4_K, Q5_K, Q6_K),
    *(TQ1_0, TQ2_0, Q1_0, Q2_0),
    *(IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS),
    *(MXFP4, NVFP4),
)
FORMATS: dict[int, Format] = {f.ggml_id: f for f in ROWS}
# Every ggml type by number. The reader checks sizes with it, so that files in formats that treadle
# cannot compute with can still be opened and inspected.
GGML_TYPES = OTHERS | {f.ggml_id: GGMLType(f.name, f.block, f.dtype.itemsize) for f in ROWS}


def by_name(name: str) -> Format:
    """Return the format ``name`` (case-insensitive). UnsupportedError lists the known formats.

    MLX formats have no ggml type number; they are built from their names.
    """
    for fmt in FORMATS.values():
        if fmt.name == name.upper():
            return fmt
    if (result := named(name.upper())) is not None:
        return result
    known = ", ".join(fmt.name for fmt in FORMATS.values())
    raise UnsupportedError(f"unknown weight format {name!r}; choose one of {known}")


def number_of(name: str) -> int:
    """Return the ggml type number of ``name`` (case-insensitive), supported or not; -1 if none."""
    kinds: dict[int, Format | GGMLType] = {**GGML_TYPES, **FORMATS}
    return next((n for n, kind in kinds.items() if kind.name == name.upper()), -1)


def type_of(ggml_id: int) -> GGMLType | None:
    """Return name and block size of a ggml type, from FORMATS or ggml's table; None if unknown."""
    fmt = FORMATS.get(ggml_id)
    if fmt is not None:
        return GGMLType(fmt.name, fmt.block, fmt.dtype.itemsize)
    return GGML_TYPES.get(ggml_id)
