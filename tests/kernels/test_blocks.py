"""Blocks as kernels read them: by arithmetic, and by looking up what few weights there are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.jit.emit import compiled
from tests.kernels import rows
from treadle.formats import FORMATS, Format
from treadle.isa.isa import Isa
from treadle.jit.builder import Builder
from treadle.jit.values import Val
from treadle.kernels.activation_layout import BLOCK, in_bf16
from treadle.kernels.format_blocks import BlockAddress, load_narrow, load_weights

LOOKED_UP = [fmt for fmt in FORMATS.values() if fmt.codes and fmt.codes.words]


def test_formats_of_few_levels_are_looked_up() -> None:
    names = {"Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K"}
    assert {fmt.name for fmt in LOOKED_UP} == names


@pytest.mark.parametrize("isa", [row for row in rows.ALL if row.lookup_words], ids=rows.name)
@pytest.mark.parametrize("fmt", LOOKED_UP, ids=lambda fmt: fmt.name)
def test_what_is_looked_up_is_what_is_computed(
    fmt: Format, isa: Isa, rng: np.random.Generator
) -> None:
    """Bit for bit."""
    n = 64

    def build(k: Builder, data: Val, computed: Val, looked_up: Val) -> None:
        with k.loop(n) as i:
            block = BlockAddress(fmt, (data,)).block(i)
            to = i * (2 * fmt.block)
            for b, v in enumerate(load_weights(k, block)):
                k.store(computed + to, in_bf16(k, v, 1)[0], offset=2 * BLOCK * b)
            for b, v in enumerate(load_narrow(k, block)):
                k.store(looked_up + to, v, offset=2 * BLOCK * b)

    data = fmt.quantize_rows(rng.standard_normal((1, n * fmt.block)).astype(np.float32))
    computed, looked_up = np.zeros((2, n, fmt.block), np.uint16)
    compiled(isa, 3, build)(data, computed, looked_up)
    assert (computed == looked_up).all()
    assert len(np.unique(computed)) > len(fmt.codes.levels if fmt.codes else ())
