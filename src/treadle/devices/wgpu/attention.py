"""Shaders of rope and KV store, of attention (one workgroup per query), and of the merge of its
parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.devices.wgpu.pages import loading, page_constants, storing
from treadle.devices.wgpu.shader import WORD, Count, Dispatch, Groups, Shader, field
from treadle.errors import UnsupportedError
from treadle.jit import math
from treadle.kernels.attention.merge_splits import Merge
from treadle.kernels.attention.paged import Attention
from treadle.kernels.attention.rope import RopeStore
from treadle.kernels.attention.work_item import LOWEST
from treadle.kernels.run_state import ITEM, MERGE, numbered

if TYPE_CHECKING:
    from treadle.plan.plan import Step

# One workgroup for each query head of a token, then each key head, then each value head.
ROPE = """
var<workgroup> head: array<f32, MOST>;
var<workgroup> turned: array<f32, MOST>;
fn mean_square(t: u32, dims: u32) -> f32 {
  var square = 0.0;
  for (var d = t; d < dims; d += THREADS) { square += head[d] * head[d]; }
  return sum_of(t, square) / f32(dims);
}
fn norm_weight(d: u32, is_query: bool) -> f32 {
  if (is_query) { return bitcast<f32>(q_norm[d]); }
  return bitcast<f32>(k_norm[d]);
}
// Norm, and turn: ``head`` to ``turned``.
fn rotate(t: u32, n: u32, is_query: bool) {
  var scale = 1.0;
  if (NORMED && !NORM_LAST) { scale = 1.0 / sqrt(mean_square(t, D) + EPS); }
  for (var d = t; d < D; d += THREADS) {
    if (NORMED && !NORM_LAST) { head[d] *= scale * norm_weight(d, is_query); }
  }
  workgroupBarrier();
  var table = run[ROPE_TABLE] / 4u;
  if (is_query) { table = run[Q_TABLE] / 4u; }
  table += n * 2u * HALF;
  for (var i = t; i < HALF; i += THREADS) {
    var first = 2u * i;
    var second = 2u * i + 1u;
    if (NEOX) { first = i; second = HALF + i; }
    let c = bitcast<f32>(run[table + i]);
    let s = bitcast<f32>(run[table + HALF + i]);
    turned[first] = head[first] * c - head[second] * s;
    turned[second] = head[first] * s + head[second] * c;
  }
  for (var d = 2u * HALF + t; d < D; d += THREADS) { turned[d] = head[d]; }
  workgroupBarrier();
  if (NORM_LAST) {
    for (var d = t; d < D; d += THREADS) { head[d] = turned[d]; }
    workgroupBarrier();
    let last = 1.0 / sqrt(mean_square(t, D) + EPS);
    for (var d = t; d < D; d += THREADS) { turned[d] = head[d] * last * norm_weight(d, is_query); }
    workgroupBarrier();
  }
}
// Scales of blocks, where there are some; and the values by them.
fn scale_blocks(t: u32, dims: u32, scales: u32, pitch: u32) {
  for (var b = t; b < dims / BLOCK; b += THREADS) {
    var most = 0.0;
    for (var i = 0u; i < BLOCK; i++) { most = max(most, abs(turned[b * BLOCK + i])); }
    let d = most * (1.0 / 127.0);
    var inverse = 0.0;
    if (d > 0.0) { inverse = 1.0 / max(d, 1e-38); }
    for (var i = 0u; i < BLOCK; i++) { turned[b * BLOCK + i] *= inverse; }
    atomicStore(&pool[scales + b * pitch], bitcast<u32>(d));
  }
  workgroupBarrier();
}
fn main() {
  let n = wg.y;
  let row = a.qkv + n * a.stride;
  if (wg.x < N_HEAD) {
    let at = row + wg.x * D;
    for (var d = t; d < D; d += THREADS) { head[d] = word_f32(at + d); }
    workgroupBarrier();
    rotate(t, n, true);
    for (var d = t; d < D; d += THREADS) { put_f32(at + d, turned[d] * SCALE); }
    return;
  }
  let kv_index = run[run[KV_INDICES] / 4u + 2u * n];
  let place = kv_index % PAGE;
  let home = kv_index / PAGE * a.page_words + a.layer_off;
  if (wg.x < N_HEAD + N_HEAD_KV) {
    let h = wg.x - N_HEAD;
    let at = row + a.k_column + h * D;
    let to = home + h * HEAD_WORDS;
    for (var d = t; d < D; d += THREADS) { head[d] = word_f32(at + d); }
    workgroupBarrier();
    rotate(t, n, false);
    if (SCALED) { scale_blocks(t, D, to + K_CODES + place, PAGE); }
    for (var d = t; d < D; d += THREADS) { store_value(to, d * PAGE + place, narrow(turned[d])); }
    return;
  }
  let h = wg.x - N_HEAD - N_HEAD_KV;
  let at = row + a.v_column + h * DV;
  let to = home + h * HEAD_WORDS + V_OFF;
  for (var d = t; d < DV; d += THREADS) { head[d] = word_f32(at + d); }
  workgroupBarrier();
  var gain = 1.0;
  if (V_NORMED) { gain = 1.0 / sqrt(mean_square(t, DV) + V_EPS); }
  for (var d = t; d < DV; d += THREADS) { turned[d] = head[d] * gain; }
  workgroupBarrier();
  if (SCALED) { scale_blocks(t, DV, to + V_CODES + place * (DV / BLOCK), 1u); }
  for (var d = t; d < DV; d += THREADS) { store_value(to, place * DV + d, narrow(turned[d])); }
}
"""


def rope(step: Step) -> list[Dispatch]:
    """Return the dispatch that rotates queries in place, rotates keys, and stores keys and values
    in their pages: a workgroup for each head of a token.
    """
    spec = step.spec
    given = step.args
    assert isinstance(spec, RopeStore)
    constants = (
        *page_constants(spec.page),
        ("MOST", max(spec.head_dim, spec.dims_v)),
        ("N_HEAD", spec.n_head),
        ("N_HEAD_KV", spec.n_head_kv),
        ("HALF", spec.rope_dims // 2),
        ("NEOX", spec.style == "neox"),
        ("SCALE", spec.scale),
        ("NORMED", spec.eps is not None),
        ("EPS", spec.eps or 0.0),
        ("NORM_LAST", spec.norm_last and spec.eps is not None),
        ("V_NORMED", spec.v_eps is not None),
        ("V_EPS", spec.v_eps or 0.0),
        ("ROPE_TABLE", field("rope", spec.table)),
        ("Q_TABLE", field("rope", spec.queries_table)),
        ("KV_INDICES", field("kv_indices", spec.pool)),
    )
    args = {
        "qkv": given["qkv"],
        "stride": given["stride"],
        "k_column": given.get("k_column") or 0,
        "v_column": given.get("v_column") or 0,
        "page_words": (given.get("page_bytes") or 0) // WORD,
        "layer_off": (given.get("layer_off") or 0) // WORD,
    }
    consts = {name: given.get(name) for name in ("q_norm", "k_norm", "pool")}
    body = storing(spec.kv, step.label) + ROPE
    shader = Shader(spec.name, body, constants, tuple(args), ("q_norm", "k_norm"), ("pool",))
    heads = spec.n_head + (0 if spec.queries_only else 2 * spec.n_head_kv)
    return [Dispatch(shader, args, lambda count: (heads, count("n_tokens"), 1), consts)]


# A query's keys are processed THREADS at a time, aligned to THREADS, so that an item's first key
# changes no sum. Each thread computes a key's score, then some of the dims of the result.
ATTENTION = """
var<workgroup> query: array<f32, D>;
var<workgroup> weights: array<f32, THREADS>;
fn home_of(pages: u32, key: u32, group: u32) -> u32 {
  return run[pages + key / PAGE * 2u] * a.page_words + a.layer_off + group * HEAD_WORDS;
}
fn score(home: u32, place: u32) -> f32 {
  var total = 0.0;
  if (SCALED) {
    for (var b = 0u; b < D / BLOCK; b++) {
      var part = 0.0;
      for (var d = b * BLOCK; d < (b + 1u) * BLOCK; d++) {
        part += query[d] * load_value(home, d * PAGE + place);
      }
      total += part * load_scale(home + K_CODES + b * PAGE + place);
    }
  } else {
    for (var d = 0u; d < D; d++) { total += query[d] * load_value(home, d * PAGE + place); }
  }
  if (SOFTCAP > 0.0) { total = SOFTCAP * tanh(clamp(total / SOFTCAP, -15.0, 15.0)); }
  return total * LOG2_E;
}
fn value(home: u32, place: u32, d: u32) -> f32 {
  var v = load_value(home + V_OFF, place * DV + d);
  if (SCALED) { v *= load_scale(home + V_OFF + V_CODES + place * (DV / BLOCK) + d / BLOCK); }
  return v;
}
fn main() {
  let item = run[ITEMS] / 4u + wg.z * ITEM_WORDS;
  if (wg.y >= run[item + 2u]) { return; }
  let token = run[item] + wg.y;
  let position = run[item + 4u] + wg.y;
  var first = run[item + 6u];
  var last = run[item + 8u];
  let pages = item + run[item + 10u] / 4u;
  let cut = bitcast<i32>(run[item + 12u]);
  if (CAUSAL) { last = min(last, position + 1u); }
  if (WINDOW > 0u) {
    first = max(first, max(position + 1u, WINDOW) - WINDOW);
    last = min(last, position + WINDOW);
  }
  let group = wg.x / (N_HEAD / N_HEAD_KV);
  let at = a.qkv + token * a.stride + wg.x * D;
  for (var d = t; d < D; d += THREADS) { query[d] = word_f32(at + d); }
  var m = LOWEST;
  var l = 0.0;
  if (SINKS && cut < 0i) {
    m = bitcast<f32>(sinks[wg.x]) * LOG2_E;
    l = 1.0;
  }
  var o: array<f32, DIMS_EACH>;
  workgroupBarrier();
  for (var base = first / THREADS * THREADS; base < last; base += THREADS) {
    let key = base + t;
    let seen = key >= first && key < last;
    var s = LOWEST;
    if (seen) { s = score(home_of(pages, key, group), key % PAGE); }
    let most = max(m, max_of(t, s));
    var weight = 0.0;
    if (seen) { weight = exp2(s - most); }
    weights[t] = weight;
    let gain = exp2(m - most);
    l = l * gain + sum_of(t, weight);
    m = most;
    let end = min(last - base, THREADS);
    for (var i = 0u; i < DIMS_EACH; i++) {
      let d = t + i * THREADS;
      if (d < DV) {
        var total = o[i] * gain;
        for (var j = max(first, base) - base; j < end; j++) {
          let home = home_of(pages, base + j, group);
          total += weights[j] * value(home, (base + j) % PAGE, d);
        }
        o[i] = total;
      }
    }
    workgroupBarrier();
  }
  var to = a.out + token * a.out_stride + wg.x * DV;
  var share = 1.0 / l;
  if (PARTIAL && cut >= 0i) {
    to = a.partials + (u32(cut) * N_HEAD + wg.x) * (DV + 2u);
    share = 1.0;
    if (t == 0u) {
      put_f32(to + DV, m);
      put_f32(to + DV + 1u, l);
    }
  }
  for (var i = 0u; i < DIMS_EACH; i++) {
    let d = t + i * THREADS;
    if (d < DV) { put_f32(to + d, o[i] * share); }
  }
}
"""


def attention(step: Step) -> list[Dispatch]:
    """Return the dispatch of attention: a workgroup for each head of each token of each work item.
    Raises UnsupportedError for kinds of attention without a shader.
    """
    spec = step.spec
    given = step.args
    assert isinstance(spec, Attention)
    if spec.latent or spec.matrix:
        raise UnsupportedError(f"{step.label}: latent attention is not supported")
    if spec.chosen:
        raise UnsupportedError(f"{step.label}: keys that an indexer chooses are not supported")
    if spec.spans:
        raise UnsupportedError(f"{step.label}: tokens that see later ones are not supported")
    if spec.alibi:
        raise UnsupportedError(f"{step.label}: attention with ALiBi is not supported")
    if spec.reach or spec.rel_extent:
        raise UnsupportedError(
            f"{step.label}: attention with a relative-position bias is not supported"
        )
    few = bool(given["few"])
    name = numbered("attn_few" if few else "attn_items", spec.pool)
    constants = (
        *page_constants(spec.page),
        ("N_HEAD", spec.n_head),
        ("N_HEAD_KV", spec.n_head_kv),
        ("WINDOW", spec.window),
        ("CAUSAL", spec.causal),
        ("SOFTCAP", spec.softcap),
        ("SINKS", spec.sinks),
        ("PARTIAL", few),  # items of one token: the rows of a partial result are the heads
        ("LOG2_E", math.LOG2_E),
        ("LOWEST", LOWEST),
        ("DIMS_EACH", -(-spec.dims_v // 64)),
        ("ITEMS", field("attn_few" if few else "attn_items", spec.pool)),
        ("ITEM_WORDS", ITEM.itemsize // WORD),
    )
    args = {
        "qkv": given["qkv"],
        "stride": given["stride"],
        "out": given["out"],
        "out_stride": given["out_stride"],
        "partials": given.get("partials") or 0,
        "page_words": given["page_bytes"] // WORD,
        "layer_off": given["layer_off"] // WORD,
    }
    body = loading(spec.kv, step.label) + ATTENTION
    shader = Shader(spec.name, body, constants, tuple(args), ("sinks", "pool"))

    def groups(count: Count) -> Groups:
        return spec.n_head, spec.tokens, count(f"n_{name}")

    consts = {"sinks": given.get("sinks"), "pool": given["pool"]}
    return [Dispatch(shader, args, groups, consts)]


MERGING = """
fn main() {
  let merge = run[MERGES] / 4u + wg.z * MERGE_WORDS;
  if (wg.y >= run[merge + 2u]) { return; }
  let token = run[merge] + wg.y;
  let n = run[merge + 6u];
  let group = wg.x / HEADS;
  let source = a.partials + run[merge + 4u] * RECORD
    + (group * ROWS + wg.y * HEADS + wg.x % HEADS) * (DV + 2u);
  var m = LOWEST;
  if (SINKS) { m = bitcast<f32>(sinks[wg.x]) * LOG2_E; }
  let sink = m;
  for (var i = 0u; i < n; i++) { m = max(m, word_f32(source + i * RECORD + DV)); }
  var total = 0.0;
  if (SINKS) { total = exp2(sink - m); }
  for (var i = 0u; i < n; i++) {
    let at = source + i * RECORD + DV;
    total += word_f32(at + 1u) * exp2(word_f32(at) - m);
  }
  for (var d = t; d < DV; d += THREADS) {
    var o = 0.0;
    for (var i = 0u; i < n; i++) {
      let at = source + i * RECORD;
      o += word_f32(at + d) * exp2(word_f32(at + DV) - m);
    }
    put_f32(a.out + token * a.out_stride + wg.x * DV + d, o / total);
  }
}
"""


def merge(step: Step) -> list[Dispatch]:
    """Return the dispatch that merges partial results: a workgroup for each head of each token of a
    merge.
    """
    spec = step.spec
    given = step.args
    assert isinstance(spec, Merge)
    rows = spec.tokens * spec.heads
    n_head = spec.n_groups * spec.heads
    constants: tuple[tuple[str, Any], ...] = (
        ("DV", spec.head_dim),
        ("HEADS", spec.heads),
        ("ROWS", rows),
        ("RECORD", spec.n_groups * rows * (spec.head_dim + 2)),
        ("SINKS", spec.sinks),
        ("LOG2_E", math.LOG2_E),
        ("LOWEST", LOWEST),
        ("MERGES", field("attn_merges", spec.pool)),
        ("MERGE_WORDS", MERGE.itemsize // WORD),
    )
    args = {name: given[name] for name in ("partials", "out", "out_stride")}
    shader = Shader(spec.name, MERGING, constants, tuple(args), ("sinks",))
    count_of = f"n_{numbered('attn_merges', spec.pool)}"

    def groups(count: Count) -> Groups:
        return n_head, spec.tokens, count(count_of)

    return [Dispatch(shader, args, groups, {"sinks": given.get("sinks")})]
