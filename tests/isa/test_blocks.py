"""How much a tile's instructions do: a block of 32 values, its scales included."""

from __future__ import annotations

import pytest

from tests.isa.blocks import block
from treadle.isa import ROWS

# Products of bytes for each instruction, at least.
LEAST = [
    ("neon", "Q8_0", 2.5),
    ("neon_dotprod", "Q8_0", 7.8),
    ("neon_i8mm", "Q8_0", 10.4),
    ("neon_i8mm", "Q4_0", 10.4),
    ("rvv128", "Q4_0", 9),
    ("rvv256", "Q4_0", 18),
    ("rvv256", "Q8_0", 10),
    ("rvv512", "Q4_0", 36),
]


@pytest.mark.parametrize(("row", "weights", "least"), LEAST)
def test_products_an_instruction(row: str, weights: str, least: float) -> None:
    assert block(weights, ROWS[row]).per_instruction >= least
