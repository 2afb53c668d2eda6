"""Top-logits shaders: the N_TOP largest logits of each slice, then of each row.

The counterpart is ``kernels/elementwise/top_logits.py``. The N_TOP-th largest key is found byte by
byte, the highest first, with a histogram for each. Then each thread scans adjacent keys and knows
how many before them are chosen. So ids are in order, and of equal keys the lowest ids are taken.

WGSL has no f64: totals are f32 here, summed pairwise so that they stay within TOTAL_ERROR, and
written as the f64 that the host reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.devices.wgpu.shader import WORD, Count, Dispatch, Groups, Shader, field
from treadle.kernels.elementwise.top_logits import (
    KEY_INF,
    LEAST_KEY,
    LOWEST,
    MAX,
    PADDING_ID,
    PARTIAL,
    SHIFT,
    SLICE,
    JoinTop,
    TopLogitsKernel,
    slices,
)
from treadle.kernels.run_state import N_TOP, RESULT, SAMPLED, TOTAL

if TYPE_CHECKING:
    from treadle.plan.plan import Step

TOP_THREADS = 256

# ``exp_below``: e**x for x <= 0, within 2 ulp, while WGSL allows its own 3 + 2 |x| ulp. ln 2 is
# split so that n times its first part is exact.
NUMBERS = """
fn to_key(bits: u32) -> i32 {
  let v = bitcast<i32>(bits);
  if (v < 0i) { return i32(0x80000000u) - v - SHIFT; }
  return v - SHIFT;
}
fn to_float(key: i32) -> u32 {
  let bits = key + SHIFT;
  if (bits < 0i) { return bitcast<u32>(i32(0x80000000u) - bits); }
  return bitcast<u32>(bits);
}
fn exp_below(x: f32) -> f32 {
  let v = max(x, -86.0);
  let n = round(v * 1.44269504);
  let r = fma(n, -1.42860677e-6, fma(n, -0.693145752, v));
  var p = 0.00139304355;
  p = fma(p, r, 0.00833345205);
  p = fma(p, r, 0.0416665748);
  p = fma(p, r, 0.166666657);
  p = fma(p, r, 0.5);
  p = fma(p * r, r, r) + 1.0;
  if (x < -86.0) { return 0.0; }
  return p * bitcast<f32>(u32(i32(n) + 127i) << 23u);
}
fn put_f64(at: u32, v: f32) {
  let bits = bitcast<u32>(v);
  let exponent = bits >> 23u;
  let high = ((exponent + 896u) << 20u) | ((bits & 0x7fffffu) >> 3u);
  arena[at] = select(0u, bits << 29u, exponent > 0u);
  arena[at + 1u] = select(0u, high, exponent > 0u);
}
fn get_f64(at: u32) -> f32 {
  let high = arena[at + 1u];
  if (high == 0u) { return 0.0; }
  let mantissa = ((high & 0xfffffu) << 3u) | (arena[at] >> 29u);
  return bitcast<f32>((((high >> 20u) - 896u) << 23u) | mantissa);
}
"""
# Needs ``key_at(i)`` and ``id_at(i)`` of N keys, in the order of ids; stores the chosen ones in
# ``keys`` and ``ids``, in the same order.
CHOOSE = """
var<workgroup> bins: array<atomic<u32>, 256>;
var<workgroup> above: array<u32, THREADS>;
var<workgroup> ties: array<u32, THREADS>;
var<workgroup> keys: array<i32, N_TOP>;
var<workgroup> ids: array<i32, N_TOP>;
var<workgroup> prefix: u32;
var<workgroup> wanted: u32;
fn ordered(key: i32) -> u32 { return bitcast<u32>(key) ^ 0x80000000u; }
fn count_bins(t: u32, n: u32, shift: u32) {
  atomicStore(&bins[t], 0u);
  workgroupBarrier();
  let chosen = prefix;
  for (var i = t; i < n; i += THREADS) {
    let key = ordered(key_at(i));
    // Two shifts: one of 32 bits would be one of none.
    if (((key >> shift) >> 8u) == chosen) { atomicAdd(&bins[(key >> shift) & 255u], 1u); }
  }
  workgroupBarrier();
}
fn choose(t: u32, n: u32, only: bool) -> i32 {
  if (t == 0u) {
    prefix = 0u;
    wanted = select(N_TOP, 1u, only);
  }
  if (t < N_TOP) {
    keys[t] = i32(0x80000000u);
    ids[t] = PADDING_ID;
  }
  workgroupBarrier();
  for (var pass_ = 0u; pass_ < 4u; pass_++) {
    count_bins(t, n, 24u - 8u * pass_);
    if (t == 0u) {
      var left = wanted;
      var bin = 255u;
      loop {
        let here = atomicLoad(&bins[bin]);
        if (here >= left || bin == 0u) { break; }
        left -= here;
        bin -= 1u;
      }
      prefix = (prefix << 8u) | bin;
      wanted = left;
    }
    workgroupBarrier();
  }
  let least = prefix;
  let room = select(wanted, N_TOP, only);
  let each = (n + THREADS - 1u) / THREADS;
  let begin = min(t * each, n);
  let end = min(begin + each, n);
  var n_above = 0u;
  var n_ties = 0u;
  for (var i = begin; i < end; i++) {
    let key = ordered(key_at(i));
    n_above += u32(key > least);
    n_ties += u32(key == least);
  }
  above[t] = n_above;
  ties[t] = n_ties;
  workgroupBarrier();
  if (t == 0u) {
    var so_far = vec2<u32>(0u);
    for (var i = 0u; i < THREADS; i++) {
      let here = vec2<u32>(above[i], ties[i]);
      above[i] = so_far.x;
      ties[i] = so_far.y;
      so_far += here;
    }
  }
  workgroupBarrier();
  var before = vec2<u32>(above[t], ties[t]);
  for (var i = begin; i < end; i++) {
    let key = key_at(i);
    let is_above = ordered(key) > least;
    let is_tie = ordered(key) == least;
    if (is_above || (is_tie && before.y < room)) {
      let place = before.x + min(before.y, room);
      keys[place] = key;
      ids[place] = id_at(i);
    }
    before += vec2<u32>(u32(is_above), u32(is_tie));
  }
  workgroupBarrier();
  var highest = keys[0];
  for (var i = 1u; i < N_TOP; i++) { highest = max(highest, keys[i]); }
  return highest;
}
fn highest_f32(key: i32) -> f32 { return max(bitcast<f32>(to_float(key)), LOWEST); }
"""
TOP = """
var<private> row: u32;
var<private> first: u32;
var<private> mask: u32;
fn key_at(i: u32) -> i32 {
  if (first + i >= a.n) { return i32(0x80000000u); }
  let key = to_key(arena[row + i]);
  if (mask == 0u || key >= KEY_INF) { return key; }
  let word = run[(mask + (first + i) / 8u) / 4u];
  return select(i32(0x80000000u), key, ((word >> ((first + i) & 31u)) & 1u) != 0u);
}
fn id_at(i: u32) -> i32 { return i32(first + i); }
fn main() {
  let record = run[SAMPLED] / 4u + wg.y * RECORD;
  first = wg.x * SLICE;
  row = a.x + run[record] * a.stride + first;
  mask = run[record + 2u];
  let highest = choose(t, SLICE, run[record + 4u] != 0u);
  let out = a.out + (wg.y * a.slices + wg.x) * PARTIAL;
  if (t < N_TOP) {
    arena[out + t] = bitcast<u32>(keys[t]);
    arena[out + N_TOP + t] = bitcast<u32>(ids[t]);
  }
  let most = highest_f32(highest);
  if (t == 0u) { put_f32(out + MAX, most); }
  if (run[record + 6u] == 0u) { return; }
  var total = 0.0;
  for (var i = 0u; i < 4u; i++) {
    var sixteen = 0.0;
    for (var j = 0u; j < 4u; j++) {
      let at = (i * 16u + j * 4u) * THREADS + t;
      sixteen += (weight(at, most) + weight(at + THREADS, most))
        + (weight(at + 2u * THREADS, most) + weight(at + 3u * THREADS, most));
    }
    total += sixteen;
  }
  total = sum_of(t, total);
  if (t == 0u) { put_f64(out + TOTAL, total); }
}
fn weight(i: u32, most: f32) -> f32 {
  let key = key_at(i);
  if (key == i32(0x80000000u)) { return 0.0; }
  return exp_below(bitcast<f32>(to_float(key)) - most);
}
"""
JOIN = """
var<private> source: u32;
fn key_at(i: u32) -> i32 {
  return bitcast<i32>(arena[source + i / N_TOP * PARTIAL + i % N_TOP]);
}
fn id_at(i: u32) -> i32 {
  return bitcast<i32>(arena[source + i / N_TOP * PARTIAL + N_TOP + i % N_TOP]);
}
fn main() {
  let record = run[SAMPLED] / 4u + wg.x * RECORD;
  source = a.partials + wg.x * a.slices * PARTIAL;
  let highest = choose(t, a.slices * N_TOP, run[record + 4u] != 0u);
  let out = a.out + wg.x * RESULT;
  if (t < N_TOP) {
    var rank = 0u;
    for (var i = 0u; i < N_TOP; i++) {
      rank += u32(keys[i] > keys[t] || (keys[i] == keys[t] && i < t));
    }
    arena[out + rank] = to_float(keys[t]);
    arena[out + N_TOP + rank] = bitcast<u32>(ids[t]);
  }
  if (run[record + 6u] == 0u) { return; }
  let most = highest_f32(highest);
  var part = 0.0;
  if (t < a.slices) {
    let at = source + t * PARTIAL;
    part = get_f64(at + TOTAL) * exp_below(word_f32(at + MAX) - most);
  }
  let total = sum_of(t, part);
  if (t == 0u) { put_f64(out + TOTAL, total); }
}
"""


def _shader(step: Step, body: str, args: tuple[str, ...]) -> Shader:
    constants = (
        ("THREADS", TOP_THREADS),
        ("N_TOP", N_TOP),
        ("SLICE", SLICE),
        ("RECORD", SAMPLED.itemsize // WORD),
        ("PARTIAL", PARTIAL.itemsize // WORD),
        ("RESULT", RESULT.itemsize // WORD),
        ("TOTAL", TOTAL // WORD),
        ("MAX", MAX // WORD),
        ("LOWEST", LOWEST),
        ("SAMPLED", field("sampled")),
    )
    numbers = (
        f"const SHIFT = {SHIFT}i; const KEY_INF = {KEY_INF}i; const PADDING_ID = {PADDING_ID}i;\n"
    )
    assert (LEAST_KEY + (1 << 32)) == 0x80000000, "the key that the texts have in digits"
    return Shader(step.spec.name, numbers + NUMBERS + CHOOSE + body, constants, args)


def top(step: Step) -> list[Dispatch]:
    """Return the dispatch of the top logits of slices: a workgroup for each slice of each SAMPLED
    record.
    """
    assert isinstance(step.spec, TopLogitsKernel)
    args = {name: step.args[name] for name in ("x", "out", "stride", "n")}
    args["slices"] = n_slices = slices(args["n"])

    def groups(count: Count) -> Groups:
        return n_slices, count("n_sampled"), 1

    return [Dispatch(_shader(step, TOP, tuple(args)), args, groups, {})]


def join_top(step: Step) -> list[Dispatch]:
    """Return the dispatch that joins the slices' top logits: a workgroup for each SAMPLED record, a
    thread for each slice.
    """
    assert isinstance(step.spec, JoinTop)
    args = {"partials": step.args["partials"], "out": step.args["out"]}
    args["slices"] = slices(step.args["n"])
    call = Dispatch(
        _shader(step, JOIN, tuple(args)), args, lambda count: (count("n_sampled"), 1, 1), {}
    )
    return [call]
