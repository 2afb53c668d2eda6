"""Shader code that reads and writes KV pages (``kernels/attention/page_layout.py``).

A word of a page may hold values of two or four tokens, written by different workgroups. So values
are written by atomic operations on the token's own bits.
"""

from __future__ import annotations

from typing import Any

from treadle.errors import UnsupportedError
from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.attention.page_layout import PageLayout
from treadle.kernels.attention.records import PAGE

# Round f32 to nearest, ties to even: WGSL does not define how pack2x16float rounds. Below 2**-14
# adding 0.5 rounds; a page holds no infinity (``kernels/attention/page_layout.py``).
NARROW = {
    "f16": """
fn narrow(x: f32) -> u32 {
  let bits = bitcast<u32>(clamp(x, -65504.0, 65504.0));
  let magnitude = bits & 0x7fffffffu;
  var made = (magnitude + ((magnitude >> 13u) & 1u) + 0xfffu - 0x38000000u) >> 13u;
  if (magnitude < 0x38800000u) {
    made = bitcast<u32>(bitcast<f32>(magnitude) + 0.5) - 0x3f000000u;
  }
  return made | ((bits >> 16u) & 0x8000u);
}
""",
    "bf16": """
fn narrow(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}
""",
    "f32": "fn narrow(x: f32) -> u32 { return bitcast<u32>(x); }",
    "q8_0": "fn narrow(x: f32) -> u32 { return bitcast<u32>(i32(round(x))) & 255u; }",
}
WIDEN = {
    "f16": "fn widen(v: u32) -> f32 { return unpack2x16float(v).x; }",
    "bf16": "fn widen(v: u32) -> f32 { return bitcast<f32>(v << 16u); }",
    "f32": "fn widen(v: u32) -> f32 { return bitcast<f32>(v); }",
    "q8_0": "fn widen(v: u32) -> f32 { return f32((bitcast<i32>(v) << 24u) >> 24u); }",
}
# ``base``: a word of the pool; ``e``: the index of a value of BITS bits from there on.
STORE = """
fn store_value(base: u32, e: u32, v: u32) {
  let at = &pool[base + e * BITS / 32u];
  if (BITS == 32u) {
    atomicStore(at, v);
  } else {
    let shift = (e * BITS) % 32u;
    atomicAnd(at, ~(((1u << (BITS % 32u)) - 1u) << shift));
    atomicOr(at, v << shift);
  }
}
"""
LOAD = """
fn load_value(base: u32, e: u32) -> f32 {
  let v = pool[base + e * BITS / 32u];
  if (BITS == 32u) { return widen(v); }
  return widen((v >> ((e * BITS) % 32u)) & ((1u << (BITS % 32u)) - 1u));
}
fn load_scale(i: u32) -> f32 { return bitcast<f32>(pool[i]); }
"""


def page_constants(page: PageLayout) -> tuple[tuple[str, Any], ...]:
    """Return the names and values of a page layout's WGSL constants: sizes, and offsets within a
    head, in words.
    """
    return (
        ("PAGE", PAGE),
        ("BITS", 8 * page.keys.fmt.n_bytes),
        ("SCALED", page.keys.fmt.scaled),
        ("BLOCK", BLOCK),
        ("D", page.head_dim),
        ("DV", page.head_dim_v),
        ("K_CODES", page.keys.codes_bytes // 4),
        ("V_OFF", page.v_off // 4),
        ("V_CODES", page.values.codes_bytes // 4),
        ("HEAD_WORDS", page.head_bytes // 4),
    )


def check_pages(kv: str, label: str) -> None:
    """Raise UnsupportedError, with the step's label, for a KV format without shaders."""
    if kv not in WIDEN:
        have = ", ".join(WIDEN)
        raise UnsupportedError(f"{label}: keys and values in {kv}; the wgpu device supports {have}")


def loading(kv: str, label: str) -> str:
    """Return the WGSL functions that read values of the KV format ``kv`` from the binding ``pool``:
    ``load_value(base, e)``, value ``e`` after word ``base`` as f32 and unscaled, and
    ``load_scale(i)``, the scale in word ``i``; they need constants of ``page_constants``.
    Raises UnsupportedError, with the step's label, for a format without shaders.
    """
    check_pages(kv, label)
    return WIDEN[kv] + LOAD


def storing(kv: str, label: str) -> str:
    """Return the WGSL functions that write values of the KV format ``kv`` to the binding ``pool``:
    ``narrow(x)``, an f32's bits in that format, and ``store_value(base, e, v)``, which writes such
    bits as value ``e`` after word ``base``; they need constants of ``page_constants``.
    Raises UnsupportedError, with the step's label, for a format without shaders.
    """
    check_pages(kv, label)
    return NARROW[kv] + STORE
