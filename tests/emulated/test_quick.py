"""A few tests of each kernel family on every emulated row: tests/kernels' own, called with a row
of another machine. All of them on all rows take minutes: ``make emulated``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.emulated.guest import GuestError
from tests.emulated.rows import EMULATED, Emulated
from tests.isa import test_ops
from tests.jit.emit import ir_text
from tests.kernels import (
    registry,
    test_attention,
    test_chunks,
    test_elementwise,
    test_matmul,
    test_media_rows,
    test_rope,
)
from tests.kernels.harness import Memory
from treadle.jit.builder import Builder
from treadle.jit.compile import emit_object
from treadle.jit.types import i64, u8
from treadle.jit.values import Val
from treadle.kernels.activation_layout import WORDS
from treadle.kernels.spec import Spec

Test = Callable[..., None]


def _first(specs: list[Any], n: int, keep: Callable[[Any], bool] = lambda spec: True) -> list[Any]:
    """Some of them, spread over the list."""
    kept = [s for s in specs if keep(s)]
    return kept[:: max(1, len(kept) // n)][:n]


def _weights(name: str) -> Callable[[Any], bool]:
    return lambda spec: spec.w == name and spec.act not in ("bf16", *WORDS)


FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "IQ4_XS", "F16")
KERNELS: list[tuple[Test, Spec]] = [
    *((test_elementwise.test_embed, s) for s in _first(registry.EMBEDS, 2)),
    *((test_elementwise.test_norm, s) for s in _first(registry.NORMS, 2)),
    *((test_elementwise.test_pack, s) for s in _first(registry.PACKS, 2)),
    *((test_rope.test_rope_store, s) for s in _first(registry.ROPES, 2)),
    *((test_attention.test_attention, s) for s in _first(registry.ATTENTIONS, 2)),
    *(
        (test_attention.test_attention, s)
        for s in _first(registry.ATTENTIONS, 2, lambda spec: spec.spans)
    ),
    *((test_media_rows.test_media_rows, s) for s in registry.MEDIA_ROWS[2:4]),
    *((test_matmul.test_random_numbers, s) for s in registry.FOLDED[1:2]),
    *((test_matmul.test_random_numbers, s) for s in registry.OUTERS[:3:2]),
    *((test_matmul.test_random_numbers, s) for s in registry.PAIRS[:2]),
    *(
        (test_matmul.test_random_numbers, s)
        for specs in (registry.GEMMS, registry.GEMVS)
        for name in FORMATS
        for s in _first(specs, 1, _weights(name))
    ),
]
# Rows that differ in more than a conversion.
NAMES = ("neon", "neon_dotprod", "neon_i8mm", "neon_bf16", "rvv128", "rvv256_zvfh", "rvv512")
ROWS = pytest.mark.parametrize("row", [EMULATED[name] for name in NAMES], ids=NAMES)


@pytest.fixture
def memory(row: Emulated) -> Iterator[Memory]:
    made = Memory(row.guest())
    yield made
    made.check()


@pytest.mark.parametrize(("test", "spec"), KERNELS, ids=lambda v: getattr(v, "name", ""))
@ROWS
def test_kernel(
    row: Emulated, test: Test, spec: Spec, memory: Memory, rng: np.random.Generator
) -> None:
    test(spec, row.isa, memory, rng)


@ROWS
def test_dot_of_bytes(row: Emulated, rng: np.random.Generator) -> None:
    row.guest()
    test_ops.test_dot4_random(row.isa, rng)


@pytest.mark.parametrize(("name", "most"), [("neon_bf16", 99), ("rvv256_zvfbfwma", 1)])
def test_dots_of_bf16(name: str, most: int, rng: np.random.Generator) -> None:
    row = EMULATED[name]
    memory = Memory(row.guest())
    test_ops.test_dot_bf16(row.isa, rng)
    test_ops.check_narrow_bf16(row.isa, rng, 100)
    specs = [s for s in registry.GEMMS if s.act == "bf16" and not test_matmul.on_matrix(s)]
    assert specs
    for spec in specs[:most]:
        test_matmul.test_random_numbers(spec, row.isa, memory, rng)
    memory.check()


MATRICES: list[tuple[Test, Spec]] = [
    (test_matmul.test_random_numbers, registry.MATRIX[0]),
    (test_attention.test_attention, registry.ATTENTIONS_MATRIX[3]),
    (test_chunks.test_whole_numbers_are_exact, registry.CHUNKED[2]),
    (test_chunks.test_keys_of_chunks, registry.CHUNK_KEYS[2]),
]


@pytest.mark.parametrize(("test", "spec"), MATRICES, ids=lambda v: getattr(v, "name", ""))
def test_matrix_registers(test: Test, spec: Spec, rng: np.random.Generator) -> None:
    """In streaming mode, and back."""
    row = EMULATED["sme"]
    memory = Memory(row.guest())
    test(spec, row.isa, memory, rng)
    memory.check()


@ROWS
def test_halves(row: Emulated) -> None:
    row.guest()
    test_ops.test_widen_f16_of_every_half(row.isa)


@ROWS
def test_a_step_outside_a_buffer_is_caught(row: Emulated, memory: Memory) -> None:
    """The guest dies of it, the test fails, and the next call finds a guest again."""

    def build(k: Builder, p: Val, at: Val, *_: Val) -> None:
        k.store(p + k.load(at, i64), k.const(7, u8))

    guest = row.guest()
    text = ir_text(row.isa, 5, build, "poke")
    poke = guest.function("poke", lambda: emit_object(text, row.isa))
    x = memory.array(100)
    at = memory.array(1, np.int64)
    for index, front in ((100, False), (-1, True)):
        x = memory.array(100, front=front)
        at[0] = index
        with pytest.raises(GuestError, match="SIGSEGV"):
            poke(x.ctypes.data, at.ctypes.data)
    at[0] = 99
    poke(x.ctypes.data, at.ctypes.data)
    assert x[99] == 7
