"""ggml tensor types that treadle does not compute with, both current and removed ones."""

from __future__ import annotations

from typing import NamedTuple


class GGMLType(NamedTuple):
    """Name and block size of one ggml type."""

    name: str
    block: int  # weights in a block
    n_bytes: int  # bytes of a block


OTHERS: dict[int, GGMLType] = {
    9: GGMLType("Q8_1", 32, 36),
    15: GGMLType("Q8_K", 256, 292),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
}

# Type numbers that ggml removed; current programs neither write nor read them.
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
}
