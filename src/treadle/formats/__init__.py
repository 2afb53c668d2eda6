"""Weight formats: one file each, one row each in FORMATS."""

from __future__ import annotations

from treadle.errors import UnsupportedError
from treadle.formats.bf16 import BF16
from treadle.formats.f16 import F16
from treadle.formats.f32 import F32
from treadle.formats.f64 import F64
from treadle.formats.format import Format
from treadle.formats.ggml_types import GGML_TYPES, REMOVED, GGMLType
from treadle.formats.iq1_m import IQ1_M
from treadle.formats.iq1_s import IQ1_S
from treadle.formats.iq2_s import IQ2_S
from treadle.formats.iq2_xs import IQ2_XS
from treadle.formats.iq2_xxs import IQ2_XXS
from treadle.formats.iq3_s import IQ3_S
from treadle.formats.iq3_xxs import IQ3_XXS
from treadle.formats.iq4_nl import IQ4_NL
from treadle.formats.iq4_xs import IQ4_XS
from treadle.formats.mlx import mlx, named
from treadle.formats.mxfp4 import MXFP4
from treadle.formats.nvfp4 import NVFP4
from treadle.formats.q1_0 import Q1_0
from treadle.formats.q2_0 import Q2_0
from treadle.formats.q2_k import Q2_K
from treadle.formats.q3_k import Q3_K
from treadle.formats.q4_0 import Q4_0
from treadle.formats.q4_1 import Q4_1
from treadle.formats.q4_k import Q4_K
from treadle.formats.q5_0 import Q5_0
from treadle.formats.q5_1 import Q5_1
from treadle.formats.q5_k import Q5_K
from treadle.formats.q6_k import Q6_K
from treadle.formats.q8_0 import Q8_0
from treadle.formats.tq1_0 import TQ1_0
from treadle.formats.tq2_0 import TQ2_0

__all__ = [
    "FORMATS",
    "GGML_TYPES",
    "REMOVED",
    "Format",
    "GGMLType",
    "by_name",
    "mlx",
    "type_of",
]

ROWS = (
    F32,
    F16,
    BF16,
    F64,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    TQ1_0,
    TQ2_0,
    Q1_0,
    Q2_0,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
)
FORMATS: dict[int, Format] = {f.ggml_id: f for f in ROWS}


def by_name(name: str) -> Format:
    """The format called ``name`` in either case; UnsupportedError names those there are.

    MLX's have no number in ggml's table, and are made by their names.
    """
    for fmt in FORMATS.values():
        if fmt.name == name.upper():
            return fmt
    if (made := named(name.upper())) is not None:
        return made
    known = ", ".join(fmt.name for fmt in FORMATS.values())
    raise UnsupportedError(f"no weight format {name!r} (treadle has {known})")


def type_of(ggml_id: int) -> GGMLType | None:
    """Name and block size of a ggml type: that of its row, else of ggml's own table."""
    fmt = FORMATS.get(ggml_id)
    if fmt is not None:
        return GGMLType(fmt.name, fmt.block, fmt.dtype.itemsize)
    return GGML_TYPES.get(ggml_id)
