"""WGSL that reads weights: for each format, two functions of the u-th 32 values of a row.

``W_scale`` returns (d, m), ``W_codes`` the four codes of the i-th quad; a weight is ``d * code -
m``. The blocks are those of the file. Where a block's size is not a multiple of 4 bytes (Q4_0's 18
bytes, Q8_0's 34, Q6_K's 210), a word that begins in the middle of another is assembled from two. So
weights are uploaded as they are mapped, and nothing is packed on the host.

In these texts W is the binding's name, K the number of values in a row, UNITS its number of parts
of 32.
"""

from __future__ import annotations

from treadle.base.fast_classes import dataclass
from treadle.errors import UnsupportedError

UNIT = 32  # values

HALVES = """
fn W_half(at: u32) -> u32 { return (W[at >> 2u] >> ((at & 2u) * 8u)) & 0xffffu; }
fn W_word(at: u32) -> u32 {
  let i = at >> 2u;
  if ((at & 2u) == 0u) { return W[i]; }
  return (W[i] >> 16u) | (W[i + 1u] << 16u);
}
fn W_f16(at: u32) -> f32 { return unpack2x16float(W_half(at)).x; }
"""
BYTES = """
fn bytes_u8(v: u32) -> vec4<f32> {
  return vec4<f32>(vec4<u32>(v & 255u, (v >> 8u) & 255u, (v >> 16u) & 255u, v >> 24u));
}
fn bytes_i8(v: u32) -> vec4<f32> {
  let s = bitcast<i32>(v);
  return vec4<f32>(vec4<i32>((s << 24u) >> 24u, (s << 16u) >> 24u, (s << 8u) >> 24u, s >> 24u));
}
"""
PLAIN = "fn W_scale(row: u32, u: u32) -> vec2<f32> { return vec2<f32>(1.0, 0.0); }"


@dataclass(frozen=True)
class WgslFormat:
    """WGSL code of a weight format: ``text`` has its two functions; ``minimum``: whether the m of
    ``W_scale`` may differ from 0.
    """

    text: str
    minimum: bool = False


F32 = WgslFormat(
    PLAIN
    + """
fn W_codes(row: u32, u: u32, i: u32) -> vec4<f32> {
  let at = row * K + u * 32u + i * 4u;
  return bitcast<vec4<f32>>(vec4<u32>(W[at], W[at + 1u], W[at + 2u], W[at + 3u]));
}
"""
)
F16 = WgslFormat(
    PLAIN
    + """
fn W_codes(row: u32, u: u32, i: u32) -> vec4<f32> {
  let at = (row * K + u * 32u + i * 4u) / 2u;
  return vec4<f32>(unpack2x16float(W[at]), unpack2x16float(W[at + 1u]));
}
"""
)
BF16 = WgslFormat(
    PLAIN
    + """
fn W_codes(row: u32, u: u32, i: u32) -> vec4<f32> {
  let at = (row * K + u * 32u + i * 4u) / 2u;
  let two = vec4<u32>(W[at] << 16u, W[at], W[at + 1u] << 16u, W[at + 1u]);
  return bitcast<vec4<f32>>(two & vec4<u32>(0xffff0000u));
}
"""
)
Q4_0 = WgslFormat(
    HALVES
    + """
fn W_scale(row: u32, u: u32) -> vec2<f32> {
  let d = W_f16((row * UNITS + u) * 18u);
  return vec2<f32>(d, 8.0 * d);
}
fn W_codes(row: u32, u: u32, i: u32) -> vec4<f32> {
  let qs = W_word((row * UNITS + u) * 18u + 2u + 4u * (i & 3u));
  return bytes_u8((qs >> (4u * (i >> 2u))) & 0x0f0f0f0fu);
}
""",
    minimum=True,
)
Q8_0 = WgslFormat(
    HALVES
    + """
fn W_scale(row: u32, u: u32) -> vec2<f32> {
  return vec2<f32>(W_f16((row * UNITS + u) * 34u), 0.0);
}
fn W_codes(row: u32, u: u32, i: u32) -> vec4<f32> {
  return bytes_i8(W_word((row * UNITS + u) * 34u + 2u + 4u * i));
}
"""
)
# A block is 36 words: d and dmin, three of scales, 32 of codes. Scales and minimums have 6 bits.
# The first four are the low 6 bits of a byte; its high 2 bits belong to the last four.
Q4_K = WgslFormat(
    """
fn W_byte(at: u32) -> u32 { return (W[at >> 2u] >> ((at & 3u) * 8u)) & 255u; }
fn W_scale(row: u32, u: u32) -> vec2<f32> {
  let block = (row * UNITS + u) / 8u * 36u;
  let j = u & 7u;
  let scales = block * 4u + 4u;
  var six: vec2<u32>;
  if (j < 4u) {
    six = vec2<u32>(W_byte(scales + j), W_byte(scales + j + 4u)) & vec2<u32>(63u);
  } else {
    let low = W_byte(scales + j + 4u);
    let high = vec2<u32>(W_byte(scales + j - 4u), W_byte(scales + j)) >> vec2<u32>(6u);
    six = vec2<u32>(low & 15u, low >> 4u) | (high << vec2<u32>(4u));
  }
  return unpack2x16float(W[block]) * vec2<f32>(six);
}
fn W_codes(row: u32, u: u32, i: u32) -> vec4<f32> {
  let qs = W[(row * UNITS + u) / 8u * 36u + 4u + (u & 7u) / 2u * 8u + i];
  return bytes_u8((qs >> (4u * (u & 1u))) & 0x0f0f0f0fu);
}
""",
    minimum=True,
)
# A block: 128 bytes of low nibbles, 64 of the two high bits, 16 scales i8 for 16 values each, d.
# The low nibbles of its 32 values from 128 h + 32 j on begin at byte 64 h + 32 (j % 2), their high
# bits at byte 32 h.
Q6_K = WgslFormat(
    HALVES
    + """
fn W_scale(row: u32, u: u32) -> vec2<f32> {
  return vec2<f32>(W_f16((row * UNITS + u) / 8u * 210u + 208u), 0.0);
}
fn W_codes(row: u32, u: u32, i: u32) -> vec4<f32> {
  let block = (row * UNITS + u) / 8u * 210u;
  let h = (u & 7u) / 4u;
  let j = u & 3u;
  let low = W_word(block + 64u * h + 32u * (j & 1u) + 4u * i) >> (4u * (j >> 1u));
  let high = W_word(block + 128u + 32u * h + 4u * i) >> (2u * j);
  let q = (low & 0x0f0f0f0fu) | ((high & 0x03030303u) << 4u);
  let at = block + 192u + 2u * (u & 7u) + i / 4u;
  let sc = extractBits(bitcast<i32>(W_half(at & ~1u)), (at & 1u) * 8u, 8u);
  return (bytes_u8(q) - vec4<f32>(32.0)) * f32(sc);
}
"""
)
LAYOUTS = {
    "F32": F32,
    "F16": F16,
    "BF16": BF16,
    "Q4_0": Q4_0,
    "Q8_0": Q8_0,
    "Q4_K": Q4_K,
    "Q6_K": Q6_K,
}


def layout_of(fmt: str, label: str) -> WgslFormat:
    """Return the WGSL code of the weight format ``fmt``. Raises UnsupportedError, with the step's
    label, if there is none.
    """
    if fmt not in LAYOUTS:
        have = ", ".join(LAYOUTS)
        raise UnsupportedError(f"{label}: weights of {fmt}; the wgpu device supports {have}")
    return LAYOUTS[fmt]


def reading(fmt: str, label: str, *names: str) -> str:
    """Return the WGSL functions that read the bindings ``names``, all of one weight format. Raises
    UnsupportedError as ``layout_of`` does.
    """
    text = layout_of(fmt, label).text
    return BYTES + "".join(
        text.replace("W_", f"{name}_").replace("W[", f"{name}[") for name in names
    )


def units(k: int) -> int:
    """Return the number of parts of 32 values in a row of ``k``, the last one perhaps shorter."""
    return -(-k // UNIT)
