"""Matrix product shaders: gemv for few tokens, tiled gemm for many, and fused gate and up.

Each matrix of a step is a separate dispatch, and so is each part of one split over several buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.devices.wgpu.rows import activation, plain_row, row_constants
from treadle.devices.wgpu.shader import WORD, Count, Dispatch, Groups, Shader, field, fold
from treadle.devices.wgpu.weights import layout_of, reading
from treadle.errors import UnsupportedError
from treadle.kernels.matmul.gated import Gated
from treadle.kernels.matmul.matmul import Matmul

if TYPE_CHECKING:
    from treadle.plan.plan import Step

LANES = 16  # threads of a row in GEMV
ROWS = 4  # of a workgroup in GEMV
TILE = 32  # rows, tokens and values of K of a tile; a thread has 4 by 4 of its sums

# y[n] = W x[n]: LANES threads share a row, each taking 32 values at a time.
GEMV = """
var<workgroup> parts: array<f32, 64u * NR>;
fn main() {
  let lane = t % LANES;
  let row = folded(wg) * ROWS + t / LANES;
  let last = run[COUNT] - 1u;
  var sums: array<f32, NR>;
  if (row < a.rows) {
    for (var u = lane; u < UNITS; u += LANES) {
      let s = w_scale(row, u);
      let quads = min(8u, K / 4u - u * 8u);
      var dots: array<f32, NR>;
      var totals: array<f32, NR>;
      for (var i = 0u; i < quads; i++) {
        let codes = w_codes(row, u, i);
        for (var n = 0u; n < NR; n++) {
          let x = quad_f32(a.x + min(n, last) * X_STRIDE + u * 32u + i * 4u);
          dots[n] += dot(codes, x);
          if (MINIMUM) { totals[n] += dot(vec4<f32>(1.0), x); }
        }
      }
      for (var n = 0u; n < NR; n++) {
        sums[n] += s.x * dots[n];
        if (MINIMUM) { sums[n] -= s.y * totals[n]; }
      }
    }
  }
  for (var n = 0u; n < NR; n++) { parts[n * 64u + t] = sums[n]; }
  workgroupBarrier();
  for (var half = LANES / 2u; half > 0u; half >>= 1u) {
    if (lane < half) {
      for (var n = 0u; n < NR; n++) { parts[n * 64u + t] += parts[n * 64u + t + half]; }
    }
    workgroupBarrier();
  }
  if (row < a.rows && lane <= min(last, NR - 1u)) {
    let column = a.column + row;
    var v = parts[lane * 64u + t - lane];
    if (BIAS) { v += bitcast<f32>(bias[a.bias + row]); }
    if (RESIDUAL) { v += word_f32(a.residual + lane * a.stride + column); }
    put_f32(a.y + lane * a.stride + column, v);
  }
}
"""

# A tile of x, and of W as W_scale and W_codes return it, in workgroup memory: threads t and t + 1
# load half a row each. Past the last row or token, the last is repeated.
TILES = """
const PITCH = 36u;
var<workgroup> xs: array<f32, 32u * PITCH>;
fn bring_x(u: u32, t: u32, last: u32, first: u32) {
  let n = min(first + t / 2u, last);
  for (var i = 4u * (t & 1u); i < 4u * (t & 1u) + 4u; i++) {
    var v = vec4<f32>(0.0);
    if (u * 8u + i < K / 4u) { v = quad_f32(a.x + n * X_STRIDE + u * 32u + i * 4u); }
    for (var j = 0u; j < 4u; j++) { xs[(i * 4u + j) * PITCH + t / 2u] = v[j]; }
  }
}
"""
# The tile of a matrix W; a thread's sums are 4 rows by 4 tokens.
BRING = """
var<workgroup> Ws: array<f32, 32u * PITCH>;
fn bring_W(u: u32, t: u32, first: u32) {
  let row = min(first + t / 2u, a.rows - 1u);
  let s = W_scale(row, u);
  for (var i = 4u * (t & 1u); i < 4u * (t & 1u) + 4u; i++) {
    var v = vec4<f32>(0.0);
    if (u * 8u + i < K / 4u) { v = s.x * W_codes(row, u, i) - s.y; }
    for (var j = 0u; j < 4u; j++) { Ws[(i * 4u + j) * PITCH + t / 2u] = v[j]; }
  }
}
fn multiply_W(t: u32, sums: ptr<function, array<vec4<f32>, 4>>) {
  let row = (t % 8u) * 4u;
  let token = (t / 8u) * 4u;
  for (var k = 0u; k < 32u; k++) {
    let at = k * PITCH + row;
    let v = vec4<f32>(Ws[at], Ws[at + 1u], Ws[at + 2u], Ws[at + 3u]);
    for (var n = 0u; n < 4u; n++) { (*sums)[n] += v * xs[k * PITCH + token + n]; }
  }
}
"""
GEMM = """
fn main() {
  let n_tokens = run[COUNT];
  var sums: array<vec4<f32>, 4>;
  for (var u = 0u; u < UNITS; u++) {
    bring_w(u, t, wg.x * 32u);
    bring_x(u, t, n_tokens - 1u, wg.y * 32u);
    workgroupBarrier();
    multiply_w(t, &sums);
    workgroupBarrier();
  }
  for (var j = 0u; j < 4u; j++) {
    let n = wg.y * 32u + (t / 8u) * 4u + j;
    for (var i = 0u; i < 4u; i++) {
      let row = wg.x * 32u + (t % 8u) * 4u + i;
      if (n < n_tokens && row < a.rows) {
        let at = n * a.stride + a.column + row;
        var v = sums[j][i];
        if (BIAS) { v += bitcast<f32>(bias[a.bias + row]); }
        if (RESIDUAL) { v += word_f32(a.residual + at); }
        put_f32(a.y + at, v);
      }
    }
  }
}
"""
GATED = """
fn main() {
  let n_tokens = run[COUNT];
  var gates: array<vec4<f32>, 4>;
  var ups: array<vec4<f32>, 4>;
  for (var u = 0u; u < UNITS; u++) {
    bring_gate(u, t, wg.x * 32u);
    bring_up(u, t, wg.x * 32u);
    bring_x(u, t, n_tokens - 1u, wg.y * 32u);
    workgroupBarrier();
    multiply_gate(t, &gates);
    multiply_up(t, &ups);
    workgroupBarrier();
  }
  for (var j = 0u; j < 4u; j++) {
    let n = wg.y * 32u + (t / 8u) * 4u + j;
    for (var i = 0u; i < 4u; i++) {
      let row = wg.x * 32u + (t % 8u) * 4u + i;
      if (n < n_tokens && row < a.rows) {
        put_f32(a.y + n * a.stride + a.column + row, f(gates[j][i]) * g(ups[j][i]));
      }
    }
  }
}
"""


def _constants(step: Step, spec: Matmul) -> tuple[tuple[str, Any], ...]:
    if spec.experts or spec.heads or spec.per > 1:
        what = "products of experts, heads or several rows of a token"
        raise UnsupportedError(f"{step.label}: {what} are not supported")
    if spec.factor:
        raise UnsupportedError(f"{step.label}: a factor of a product is not supported")
    return (
        *row_constants(spec.k, step.label),
        ("X_STRIDE", plain_row(spec.layout(), step.label)),
        ("COUNT", field(spec.count)),
        ("BIAS", spec.bias),
        ("RESIDUAL", spec.residual),
    )


def _tiles(spec: Matmul, rows: int) -> Any:
    def groups(count: Count) -> Groups:
        return -(-rows // TILE), -(-count(spec.count) // TILE), 1

    return groups


def _bring(name: str) -> str:
    return BRING.replace("W_", f"{name}_").replace("_W", f"_{name}").replace("Ws", f"{name}_tile")


def gemv(step: Step) -> list[Dispatch]:
    """Return the dispatches of a product for at most ``spec.nr`` tokens, one for each buffer of
    each matrix. Raises UnsupportedError for a weight format or a kind of product without a shader.
    """
    spec: Any = step.spec
    minimum = layout_of(spec.w, step.label).minimum
    more = ("NR", spec.nr), ("LANES", LANES), ("ROWS", ROWS), ("MINIMUM", minimum)
    constants = _constants(step, spec) + more
    body = reading(spec.w, step.label, "w") + GEMV
    return _products(step, spec, body, constants, lambda rows: lambda _: fold(-(-rows // ROWS)))


def gemm(step: Step) -> list[Dispatch]:
    """Return the dispatches of a product for any number of tokens, one for each buffer of each
    matrix. Raises UnsupportedError for a weight format or a kind of product without a shader.
    """
    spec: Any = step.spec
    body = reading(spec.w, step.label, "w") + TILES + _bring("w") + GEMM
    return _products(step, spec, body, _constants(step, spec), lambda rows: _tiles(spec, rows))


def _products(
    step: Step, spec: Matmul, body: str, constants: tuple[tuple[str, Any], ...], groups_of: Any
) -> list[Dispatch]:
    names = "x", "y", "stride", "residual", "column", "rows", "bias"
    shader = Shader(spec.name, body, constants, names, ("w", "bias"))
    given = step.args
    calls = []
    for i, (const,) in enumerate(given["w"]):
        for part, first, n in const.memory.parts(spec.fmt.row_bytes(spec.k)):
            args = {
                "x": given["x"],
                "y": given["y"],
                "stride": given["stride"],
                "residual": given.get("residual") or 0,
                "column": given["column"][i] + first,
                "rows": n,
                "bias": first,
            }
            consts = {"w": part, "bias": given["bias"][i] if spec.bias else None}
            calls.append(Dispatch(shader, args, groups_of(n), consts))
    return calls


def gated(step: Step) -> list[Dispatch]:
    """Return the dispatches of gate and up products with their activation. A matrix beyond the
    device's binding limit is in several buffers; gate and up, of the same size, are split at the
    same rows, and each pair of buffers has one dispatch. Raises UnsupportedError for a weight
    format or a kind of product without a shader.
    """
    spec = step.spec
    given = step.args
    assert isinstance(spec, Gated)
    plain_row(spec.result(), step.label)
    body = reading(spec.w, step.label, "gate", "up") + activation(spec.fn, step.label)
    body += TILES + _bring("gate") + _bring("up") + GATED
    names = "x", "y", "stride", "column", "rows"
    shader = Shader(spec.name, body, _constants(step, spec), names, ("gate", "up"))
    row_bytes = spec.fmt.row_bytes(spec.k)
    gates, ups = (const.memory.parts(row_bytes) for (const,) in given["w"])
    calls = []
    for (gate, first, n), (up, _, _) in zip(gates, ups, strict=True):
        args = {
            "x": given["x"],
            "y": given["y"],
            "stride": spec.result().row_bytes // WORD,
            "column": first,
            "rows": n,
        }
        calls.append(Dispatch(shader, args, _tiles(spec, n), {"gate": gate, "up": up}))
    return calls
