"""Shaders of steps on rows or single values: embedding, norms, activations, sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.devices.wgpu.shader import THREADS, WORD, Count, Dispatch, Groups, Shader, field
from treadle.devices.wgpu.weights import reading, units
from treadle.errors import UnsupportedError
from treadle.kernels.elementwise.add import Add, AddRows
from treadle.kernels.elementwise.column_norm import ColumnNorm
from treadle.kernels.elementwise.control_vectors import AddDirections
from treadle.kernels.elementwise.elementwise import Embed, Norm, Pack
from treadle.kernels.elementwise.pooling import TINY, Pooling
from treadle.kernels.elementwise.softcap import Softcap
from treadle.kernels.run_state import LORA, PART

if TYPE_CHECKING:
    from treadle.kernels.activation_layout import ActivationLayout
    from treadle.plan.plan import Step

PART_WORDS = PART.itemsize // WORD
LORA_WORDS = LORA.itemsize // WORD
# Beyond 15, tanh is 1 in f32, and its exponentials overflow.
FUNCTIONS = {
    "copy": "return x;",
    "silu": "return x / (1.0 + exp(min(-x, 80.0)));",
    "gelu": "let y = 0.7978845608 * (x + 0.044715 * x * x * x);"
    " return 0.5 * x * (1.0 + tanh(clamp(y, -15.0, 15.0)));",
    "gelu_quick": "return x / (1.0 + exp(min(-1.702 * x, 80.0)));",
    "relu": "return max(x, 0.0);",
    "relu2": "let y = max(x, 0.0); return y * y;",
    "sigmoid": "return 1.0 / (1.0 + exp(min(-x, 80.0)));",
    "swiglu_clamped": "let y = min(x, 7.0); return y / (1.0 + exp(min(-1.702 * y, 80.0)));",
}
UPS = {"swiglu_clamped": "return clamp(x, -7.0, 7.0) + 1.0;"}


def activation(fn: str, label: str) -> str:
    """Return the WGSL functions ``f(x)``, the activation ``fn``, and ``g(x)``, which is applied to
    the value that ``f`` gates. Raises UnsupportedError, with the step's label, if ``fn`` has no
    WGSL.
    """
    if fn not in FUNCTIONS:
        raise UnsupportedError(f"{label}: {fn}; the wgpu device supports {', '.join(FUNCTIONS)}")
    up = UPS.get(fn, "return x;")
    return f"fn f(x: f32) -> f32 {{ {FUNCTIONS[fn]} }}\nfn g(x: f32) -> f32 {{ {up} }}\n"


def plain_row(act: ActivationLayout, label: str) -> int:
    """Return the number of words between rows of activations. Raises UnsupportedError, with the
    step's label, unless they are plain f32.
    """
    if act.kind != "f32" or act.group != 1:
        what = f"activations of {act.kind} in groups of {act.group}"
        raise UnsupportedError(f"{label}: {what} are not supported")
    return act.row_bytes // WORD


def embed(step: Step) -> list[Dispatch]:
    """Return the dispatches of the embedding, one for each part of the table, with a workgroup for
    each token. A part skips tokens whose rows are in another one.
    """
    spec = step.spec
    given = step.args
    assert isinstance(spec, Embed)
    body = (
        reading(spec.w, step.label, "w")
        + """
fn main() {
  let row = run[run[TOKENS] / 4u + wg.x] - a.first;
  if (row >= a.rows) { return; }
  for (var i = t; i < K / 4u; i += THREADS) {
    let s = w_scale(row, i / 8u);
    let v = (s.x * w_codes(row, i / 8u, i % 8u) - s.y) * SCALE;
    for (var j = 0u; j < 4u; j++) { put_f32(a.x + wg.x * a.stride + i * 4u + j, v[j]); }
  }
}
"""
    )
    more = ("SCALE", spec.scale), ("TOKENS", field("tokens"))
    constants = *row_constants(spec.k, step.label), *more
    shader = Shader(spec.name, body, constants, ("x", "stride", "first", "rows"), ("w",))
    (const,) = given["w"]
    return [
        Dispatch(
            shader,
            {"x": given["x"], "stride": given["stride"], "first": first, "rows": n},
            lambda count: (count("n_tokens"), 1, 1),
            {"w": part},
        )
        for part, first, n in const.memory.parts(spec.fmt.row_bytes(spec.k))
    ]


def row_constants(k: int, label: str) -> tuple[tuple[str, Any], ...]:
    """Return the WGSL constants K and UNITS of rows of ``k`` values. Raises UnsupportedError, with
    the step's label, unless ``k`` is a multiple of 4.
    """
    if k % 4:
        raise UnsupportedError(f"{label}: rows of {k} values, expected a multiple of 4")
    return ("K", k), ("UNITS", units(k))


NORM = """
fn main() {
  var source = wg.x;
  if (OUTPUTS) { source = run[run[OUTPUT_ROWS] / 4u + wg.x]; }
  let x = a.x + source * a.stride;
  var mean = 0.0;
  if (CENTRED) {
    for (var i = t; i < K; i += THREADS) { mean += word_f32(x + i); }
    mean = sum_of(t, mean) / f32(K);
  }
  var square = 0.0;
  for (var i = t; i < K; i += THREADS) {
    let v = word_f32(x + i) - mean;
    square += v * v;
  }
  let scale = 1.0 / sqrt(sum_of(t, square) / f32(K) + EPS);
  for (var i = t; i < K; i += THREADS) {
    var v = (word_f32(x + i) - mean) * scale;
    if (WEIGHT) { v *= bitcast<f32>(w[i]); }
    if (BIAS) { v += bitcast<f32>(bias[i]); }
    if (ADD) { v += word_f32(a.residual + wg.x * a.stride + i); }
    if (GAIN) { v *= bitcast<f32>(gain[0]); }
    put_f32(a.out + wg.x * a.out_stride + i, v);
  }
  for (var i = K + t; i < FILLED; i += THREADS) { put_f32(a.out + wg.x * a.out_stride + i, 0.0); }
}
"""


def norm(step: Step) -> list[Dispatch]:
    """Return the dispatch of a norm: a workgroup for each row."""
    spec = step.spec
    given = step.args
    assert isinstance(spec, Norm)
    constants: tuple[tuple[str, Any], ...] = (
        ("K", spec.k),
        ("EPS", spec.eps),
        ("ADD", spec.add),
        ("OUTPUTS", spec.outputs),
        ("CENTRED", spec.centred),
        ("WEIGHT", spec.weight),
        ("BIAS", spec.bias),
        ("GAIN", spec.gain),
        ("OUTPUT_ROWS", field("output_rows")),
    )
    same = spec.add or spec.rows
    stride = given["stride"] if same else plain_row(spec.layout(), step.label)
    constants += (("FILLED", spec.k if same else spec.layout().kd),)
    args = {
        "x": given["x"],
        "stride": given["stride"],
        "out": given["out"],
        "out_stride": stride,
        "residual": given.get("residual") or 0,
    }
    names = ("w", "bias", "gain")
    shader = Shader(spec.name, NORM, constants, tuple(args), names)
    return [
        Dispatch(shader, args, _rows(step), {name: given.get(name) for name in names}),
    ]


def _rows(step: Step) -> Any:
    """Return a function ``Dispatch.groups`` for a step with one workgroup for each row; the number
    of rows is the run's count that the step's grid names.
    """
    name = step.grid.count
    return lambda count: (count(name), 1, 1)


def _values(step: Step, k: int) -> Any:
    """Return a function ``Dispatch.groups`` for a step with one thread for each of ``k`` values of
    each row.
    """
    name = step.grid.count

    def groups(count: Count) -> Groups:
        return -(-k // THREADS), count(name), 1

    return groups


PACK = """
fn main() {
  let i = wg.x * THREADS + t;
  if (i >= FILLED) { return; }
  if (i >= K) {
    put_f32(a.out + wg.y * OUT_STRIDE + i, 0.0);
    return;
  }
  var v = f(word_f32(a.x + wg.y * a.stride + i));
  if (GATED) { v *= g(word_f32(a.up + wg.y * a.up_stride + i)); }
  put_f32(a.out + wg.y * OUT_STRIDE + i, v);
}
"""


def pack(step: Step) -> list[Dispatch]:
    """Return the dispatch of an activation function and copy to plain rows: a thread for each
    value.
    """
    spec = step.spec
    given = step.args
    assert isinstance(spec, Pack)
    if spec.counted or spec.per != 1:
        raise UnsupportedError(f"{step.label}: rows of experts or heads are not supported")
    gated = spec.gated and spec.fn != "copy"
    constants = (
        ("K", spec.k),
        ("FILLED", spec.layout().kd),
        ("GATED", gated),
        ("OUT_STRIDE", plain_row(spec.layout(), step.label)),
    )
    ups = (given["apart"], given["apart_stride"]) if spec.apart else (given["x"], given["stride"])
    args = {
        "x": given["x"],
        "stride": given["stride"],
        "out": given["out"],
        "up": (ups[0], given["up"]),
        "up_stride": ups[1],
    }
    shader = Shader(spec.name, activation(spec.fn, step.label) + PACK, constants, tuple(args))
    return [Dispatch(shader, args, _values(step, spec.layout().kd), {})]


COLUMN_NORM = """
fn main() {
  let row = a.x + wg.y * a.stride + wg.x * K;
  var mean = 0.0;
  if (CENTRED) {
    for (var i = t; i < K; i += THREADS) { mean += word_f32(row + i); }
    mean = sum_of(t, mean) / f32(K);
  }
  var square = 0.0;
  for (var i = t; i < K; i += THREADS) {
    let v = word_f32(row + i) - mean;
    square += v * v;
  }
  let scale = 1.0 / sqrt(sum_of(t, square) / f32(K) + EPS);
  for (var i = t; i < K; i += THREADS) {
    var v = (word_f32(row + i) - mean) * scale * bitcast<f32>(w[select(0u, wg.x * K, OWN) + i]);
    if (BIAS) { v += bitcast<f32>(bias[i]); }
    put_f32(row + i, v);
  }
}
"""


def column_norm(step: Step) -> list[Dispatch]:
    """Return the dispatch that norms the heads in some columns of each row, in place: a workgroup
    for each head of a token.
    """
    spec = step.spec
    given = step.args
    assert isinstance(spec, ColumnNorm)
    args = {"x": (given["x"], given["column"]), "stride": given["stride"]}
    flags = ("CENTRED", spec.centred), ("BIAS", spec.bias), ("OWN", spec.own)
    constants = ("K", spec.k), ("EPS", spec.eps), *flags
    shader = Shader(spec.name, COLUMN_NORM, constants, tuple(args), ("w", "bias"))

    def groups(count: Count) -> Groups:
        return spec.heads, count("n_tokens"), 1

    return [Dispatch(shader, args, groups, {name: given.get(name) for name in ("w", "bias")})]


SOFTCAP = """
fn main() {
  let i = wg.x * THREADS + t;
  if (i >= K) { return; }
  let at = a.y + wg.y * a.stride + i;
  put_f32(at, CAP * tanh(clamp(word_f32(at) / CAP, -15.0, 15.0)));
}
"""


def softcap(step: Step) -> list[Dispatch]:
    """Return the dispatch that caps logits, in place: a thread for each logit."""
    spec = step.spec
    given = step.args
    assert isinstance(spec, Softcap)
    shader = Shader(spec.name, SOFTCAP, (("K", spec.k), ("CAP", spec.cap)), ("y", "stride"))
    args = {"y": given["y"], "stride": given["stride"]}
    return [Dispatch(shader, args, _values(step, spec.k), {})]


ADD = """
fn main() {
  let i = wg.x * THREADS + t;
  let at = wg.y * a.stride + i;
  if (i < K) { put_f32(a.out + at, word_f32(a.x + at) + word_f32(a.h + at)); }
}
"""


def add(step: Step) -> list[Dispatch]:
    """Return the dispatch that adds two buffers: a thread for each value."""
    spec = step.spec
    assert isinstance(spec, Add)
    args = {name: step.args[name] for name in ("x", "h", "out", "stride")}
    shader = Shader(spec.name, ADD, (("K", spec.k),), tuple(args))
    return [Dispatch(shader, args, _values(step, spec.k), {})]


ADD_ROWS = """
fn main() {
  let part = run[PARTS] / 4u + wg.x * PART_WORDS;
  for (var n = 0u; n < run[part + 2u]; n++) {
    let position = run[part + 4u] + n;
    var row = 0u;
    if (BY_POSITION) { row = position; }
    // ``second`` may be above 2**32: then nothing is.
    if (BY_TYPE && run[part + 11u] == 0u && position >= run[part + 10u]) { row = 1u; }
    let x = a.x + (run[part] + n) * a.stride;
    for (var i = t; i < K; i += THREADS) {
      put_f32(x + i, word_f32(x + i) + bitcast<f32>(w[row * K + i]));
    }
  }
}
"""


def add_rows(step: Step) -> list[Dispatch]:
    """Return the dispatch that adds position or type embeddings, in place: a workgroup for each
    sequence.
    """
    spec = step.spec
    assert isinstance(spec, AddRows)
    constants = (
        ("K", spec.k),
        ("BY_POSITION", spec.by == "position"),
        ("BY_TYPE", spec.by == "type"),
        ("PARTS", field("parts")),
        ("PART_WORDS", PART_WORDS),
    )
    shader = Shader(spec.name, ADD_ROWS, constants, ("x", "stride"), ("w",))
    args = {"x": step.args["x"], "stride": step.args["stride"]}
    return [Dispatch(shader, args, _rows(step), {"w": step.args["w"]})]


ADD_DIRECTIONS = """
fn main() {
  let at = run[LORAS] / 4u + wg.x * LORA_WORDS;
  let scales = at + run[at + 4u] / 4u + a.first;
  for (var v = 0u; v < a.n_vectors; v++) {
    let scale = bitcast<f32>(run[scales + v]);
    if (scale != 0.0) {
      for (var n = 0u; n < run[at + 2u]; n++) {
        let x = a.x + (run[at] + n) * a.stride;
        for (var i = t; i < K * N_STREAMS; i += THREADS) {
          put_f32(x + i, word_f32(x + i) + scale * bitcast<f32>(w[v * K + i % K]));
        }
      }
    }
  }
}
"""


def add_directions(step: Step) -> list[Dispatch]:
    """Return the dispatch that adds control vectors, in place: a workgroup for the rows of a LORA
    record.
    """
    spec = step.spec
    assert isinstance(spec, AddDirections)
    constants = (
        ("K", spec.k),
        ("N_STREAMS", spec.n_streams),
        ("LORAS", field("loras")),
        ("LORA_WORDS", LORA_WORDS),
    )
    args = {name: step.args[name] for name in ("x", "stride", "first", "n_vectors")}
    shader = Shader(spec.name, ADD_DIRECTIONS, constants, tuple(args), ("w",))
    return [Dispatch(shader, args, _rows(step), {"w": step.args["w"]})]


POOLING = """
fn main() {
  let part = run[PARTS] / 4u + wg.x * PART_WORDS;
  var first = run[part];
  var n = run[part + 2u];
  if (LAST) { first += n - 1u; }
  if (!MEAN) { n = 1u; }
  var square = 0.0;
  for (var i = t; i < K; i += THREADS) {
    var v = 0.0;
    for (var j = 0u; j < n; j++) { v += word_f32(a.x + (first + j) * a.stride + i); }
    v /= f32(n);
    square += v * v;
    put_f32(a.out + wg.x * a.out_stride + i, v);
  }
  if (UNIT_LENGTH) {
    let scale = 1.0 / sqrt(max(sum_of(t, square) / f32(K), TINY) * f32(K));
    for (var i = t; i < K; i += THREADS) {
      let at = a.out + wg.x * a.out_stride + i;
      put_f32(at, word_f32(at) * scale);
    }
  }
}
"""


def pooling(step: Step) -> list[Dispatch]:
    """Return the dispatch that pools each sequence's states: a workgroup for each sequence."""
    spec = step.spec
    assert isinstance(spec, Pooling)
    constants = (
        ("K", spec.k),
        ("LAST", spec.how == "last"),
        ("MEAN", spec.how == "mean"),
        ("UNIT_LENGTH", spec.unit),
        ("TINY", TINY),
        ("PARTS", field("parts")),
        ("PART_WORDS", PART_WORDS),
    )
    args = {name: step.args[name] for name in ("x", "stride", "out", "out_stride")}
    return [Dispatch(Shader(spec.name, POOLING, constants, tuple(args)), args, _rows(step), {})]
