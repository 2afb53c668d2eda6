"""ggml's tensor types: those that treadle computes with, others, and removed ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from treadle.base.fast_classes import NamedTuple


class GGMLType(NamedTuple):
    """Name and sizes of one of ggml's tensor types."""

    name: str
    block: int  # weights in a block
    n_bytes: int  # bytes of a block
    head: int = 0  # bytes of a row before its first block

    def row_bytes(self, k: int) -> int:
        """Return the bytes of a row of ``k`` weights."""
        return k // self.block * self.n_bytes + self.head

    def tensor_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a tensor, ``shape`` slowest dimension first; () is one number."""
        *rows, k = shape or (1,)
        return prod(rows) * self.row_bytes(k) if k else 0


# The types that treadle computes with, each with the module of its format, which is named alike.
SUPPORTED: dict[int, tuple[GGMLType, str]] = {
    0: (GGMLType("F32", 1, 4), "floats"),
    1: (GGMLType("F16", 1, 2), "floats"),
    30: (GGMLType("BF16", 1, 2), "floats"),
    28: (GGMLType("F64", 1, 8), "floats"),
    8: (GGMLType("Q8_0", 32, 34), "blocks32"),
    2: (GGMLType("Q4_0", 32, 18), "blocks32"),
    3: (GGMLType("Q4_1", 32, 20), "blocks32"),
    6: (GGMLType("Q5_0", 32, 22), "blocks32"),
    7: (GGMLType("Q5_1", 32, 24), "blocks32"),
    10: (GGMLType("Q2_K", 256, 84), "k_low"),
    11: (GGMLType("Q3_K", 256, 110), "k_low"),
    12: (GGMLType("Q4_K", 256, 144), "k_quants"),
    13: (GGMLType("Q5_K", 256, 176), "k_quants"),
    14: (GGMLType("Q6_K", 256, 210), "k_quants"),
    34: (GGMLType("TQ1_0", 256, 54), "ternary"),
    35: (GGMLType("TQ2_0", 256, 66), "ternary"),
    41: (GGMLType("Q1_0", 128, 18), "ternary"),
    42: (GGMLType("Q2_0", 64, 18), "ternary"),
    19: (GGMLType("IQ1_S", 256, 50), "iq1"),
    29: (GGMLType("IQ1_M", 256, 56), "iq1"),
    16: (GGMLType("IQ2_XXS", 256, 66), "iq2"),
    17: (GGMLType("IQ2_XS", 256, 74), "iq2"),
    22: (GGMLType("IQ2_S", 256, 82), "iq2"),
    18: (GGMLType("IQ3_XXS", 256, 98), "iq3"),
    21: (GGMLType("IQ3_S", 256, 110), "iq3"),
    20: (GGMLType("IQ4_NL", 32, 18), "iq4"),
    23: (GGMLType("IQ4_XS", 256, 136), "iq4"),
    39: (GGMLType("MXFP4", 32, 17), "fp4"),
    40: (GGMLType("NVFP4", 64, 36), "fp4"),
    # ik_llama.cpp's. ggml's own numbers end at 42: none of its types has one of these.
    137: (GGMLType("IQ2_K", 256, 76), "ik_blocks"),
    138: (GGMLType("IQ3_K", 256, 110), "ik_blocks"),
    139: (GGMLType("IQ4_K", 256, 144), "ik_blocks"),
    140: (GGMLType("IQ5_K", 256, 176), "ik_blocks"),
    141: (GGMLType("IQ6_K", 256, 212), "ik_blocks"),
    145: (GGMLType("IQ2_KS", 256, 70, 2), "ik_rows"),
    156: (GGMLType("IQ3_KS", 256, 102, 2), "ik_rows"),
    144: (GGMLType("IQ4_KS", 256, 136, 4), "ik_rows"),
    146: (GGMLType("IQ4_KSS", 256, 128, 4), "ik_rows"),
    152: (GGMLType("IQ5_KS", 256, 168, 4), "ik_rows"),
    158: (GGMLType("IQ1_KT", 256, 56, 4), "ik_trellis"),
    153: (GGMLType("IQ2_KT", 256, 68, 4), "ik_trellis"),
    154: (GGMLType("IQ3_KT", 256, 100, 4), "ik_trellis"),
    155: (GGMLType("IQ4_KT", 256, 128, 4), "ik_trellis"),
}

OTHERS: dict[int, GGMLType] = {
    9: GGMLType("Q8_1", 32, 36),
    15: GGMLType("Q8_K", 256, 292),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    # ik_llama.cpp's
    133: GGMLType("Q6_0", 32, 26),
    134: GGMLType("IQ1_BN", 64, 13, 2),
    135: GGMLType("IQ2_BN", 64, 16, 4),
    157: GGMLType("IQ2_KL", 256, 86, 2),
}

REPACKED = "rows interleaved for ik_llama.cpp's kernels; use the file that was repacked, or another"
# Type numbers that ggml removed, so that current programs neither write nor read them; and those of
# ik_llama.cpp's repacked rows.
REMOVED: dict[int, tuple[str, str]] = {
    4: ("Q4_2", "ggml dropped this format in 2023"),
    5: ("Q4_3", "ggml dropped this format in 2023"),
    31: ("Q4_0_4_4", "a repacked Q4_0 that ggml dropped; quantise the model to Q4_0 again"),
    32: ("Q4_0_4_8", "a repacked Q4_0 that ggml dropped; quantise the model to Q4_0 again"),
    33: ("Q4_0_8_8", "a repacked Q4_0 that ggml dropped; quantise the model to Q4_0 again"),
    36: (
        "IQ4_NL_4_4 or I2_S",
        "a repacked IQ4_NL that ggml dropped, or BitNet's I2_S, which ggml never had; quantise the "
        "model again, BitNet to TQ2_0",
    ),
    37: ("IQ4_NL_4_8", "a repacked IQ4_NL that ggml dropped; quantise the model to IQ4_NL again"),
    38: ("IQ4_NL_8_8", "a repacked IQ4_NL that ggml dropped; quantise the model to IQ4_NL again"),
    202: ("Q4_0_R8", REPACKED),
    206: ("Q5_0_R4", REPACKED),
    208: ("Q8_0_R8", REPACKED),
    210: ("Q2_K_R4", REPACKED),
    211: ("Q3_K_R4", REPACKED),
    212: ("Q4_K_R4", REPACKED),
    213: ("Q5_K_R4", REPACKED),
    214: ("Q6_K_R4", REPACKED),
    216: ("IQ2_XXS_R4", REPACKED),
    217: ("IQ2_XS_R4", REPACKED),
    218: ("IQ3_XXS_R4", REPACKED),
    219: ("IQ1_S_R4", REPACKED),
    220: ("IQ4_NL_R4", REPACKED),
    221: ("IQ3_S_R4", REPACKED),
    222: ("IQ2_S_R4", REPACKED),
    223: ("IQ4_XS_R8", REPACKED),
    229: ("IQ1_M_R4", REPACKED),
    230: ("BF16_R16", REPACKED),
    233: ("Q6_0_R4", REPACKED),
    335: ("IQ2_BN_R4", REPACKED),
    337: ("IQ2_K_R4", REPACKED),
    338: ("IQ3_K_R4", REPACKED),
    339: ("IQ4_K_R4", REPACKED),
    340: ("IQ5_K_R4", REPACKED),
    344: ("IQ4_KS_R4", REPACKED),
    352: ("IQ5_KS_R4", REPACKED),
    353: ("MXFP4_R8", REPACKED),
}
