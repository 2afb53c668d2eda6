"""Every tensor type that ggml ever numbered: its name, weights a block, bytes a block.

The reader checks sizes by this table, so that files in formats that treadle cannot compute
with still open and can be inspected. A format treadle computes with has a row in FORMATS too.
"""

from __future__ import annotations

from typing import NamedTuple


class GGMLType(NamedTuple):
    """The size of one ggml type."""

    name: str
    block: int  # weights in a block
    n_bytes: int  # bytes of a block


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 36),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
    42: GGMLType("Q2_0", 64, 18),
}

# Numbers that ggml took back; no current program writes or reads them.
REMOVED: dict[int, tuple[str, str]] = {
    4: ("Q4_2", "ggml dropped this format in 2023"),
    5: ("Q4_3", "ggml dropped this format in 2023"),
    31: ("Q4_0_4_4", "a repacked Q4_0 that ggml dropped; quantise the model to Q4_0 again"),
    32: ("Q4_0_4_8", "a repacked Q4_0 that ggml dropped; quantise the model to Q4_0 again"),
    33: ("Q4_0_8_8", "a repacked Q4_0 that ggml dropped; quantise the model to Q4_0 again"),
    36: ("IQ4_NL_4_4", "a repacked IQ4_NL that ggml dropped; quantise the model to IQ4_NL again"),
    37: ("IQ4_NL_4_8", "a repacked IQ4_NL that ggml dropped; quantise the model to IQ4_NL again"),
    38: ("IQ4_NL_8_8", "a repacked IQ4_NL that ggml dropped; quantise the model to IQ4_NL again"),
}
