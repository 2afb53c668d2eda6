"""DeepSeek V4 in float64 and plain numpy: streams that are mixed by a token's own weights,
attention to rows of tokens and of units, and experts by token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tests.reference import Array, Layer, Tensors, gate_of, gated, log_softmax, rms_norm, rope
from tests.reference_indexer import Choice
from treadle.models.config import Config


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def blended_streams(config: Config, x: Array, ids: Sequence[int], tensor: Tensors) -> Array:
    """The normed mix of the streams behind all layers, of embeddings ``x [n_tokens, n_embd]``."""
    streams = blended(config, np.repeat(x[:, None], config.n_streams, axis=1), ids, tensor)
    return mix_of(config, streams, tensor)


def blended(config: Config, streams: Array, ids: Sequence[int], tensor: Tensors) -> Array:
    """The streams ``[n_tokens, n_streams, n_embd]`` behind all layers."""
    from tests.reference_states import MIXED

    for i in range(config.n_layer):
        maps = Layer(config, i, tensor)
        for name, norm in (("attn", "attn_norm"), ("ffn", "ffn_norm")):
            pre, post, comb = weights(config, streams, tensor, f"blk.{i}.hc_{name}")
            h = maps.norm((pre[:, :, None] * streams).sum(1), norm)
            if name == "attn":
                made = MIXED.get(maps.at.mixer, attended)(maps, h)
            elif maps.at.experts and maps.at.experts.gating == "sqrt_softplus":
                made = fed(maps, h, ids)
            else:
                made = gated(maps, h)
            streams = post[:, :, None] * made[:, None] + np.einsum("tji,tjd->tid", comb, streams)
    return streams


def mix_of(config: Config, streams: Array, tensor: Tensors) -> Array:
    """The normed mix of the streams."""
    pre = np.full((1, config.n_streams), 1 / config.n_streams)
    if config.arch.graph != "pooled":
        pre = weights(config, streams, tensor, "output_hc")[0]
    mixed = (pre[:, :, None] * streams).sum(1)
    return rms_norm(mixed, tensor("output_norm.weight"), config.norm_eps)


def weights(config: Config, x: Array, tensor: Tensors, stem: str) -> tuple[Array, Array, Array]:
    """Of each stream in the mix, of the result in each, and between streams [from, to]."""
    hyper = config.layers[0].hyper
    assert hyper is not None
    n = hyper.n
    flat = rms_norm(x.reshape(len(x), -1), np.ones(1), config.norm_eps)
    made = flat @ tensor(f"{stem}_fn.weight").T
    scale = tensor(f"{stem}_scale.weight")
    base = tensor(f"{stem}_base.weight")
    pre = sigmoid(made[:, :n] * scale[0] + base[:n]) + hyper.eps
    if len(base) == n:
        return pre, pre, pre
    post = 2 * sigmoid(made[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (made[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
    comb = np.exp(log_softmax(comb)) + hyper.eps
    for i in range(hyper.rounds):
        if i:
            comb = comb / (comb.sum(2, keepdims=True) + hyper.eps)
        comb = comb / (comb.sum(1, keepdims=True) + hyper.eps)
    return pre, post, comb


def fed(maps: Layer, h: Array, ids: Sequence[int]) -> Array:
    """The sum of the experts' outputs for normed states, the shared one included."""
    experts = maps.at.experts
    assert experts is not None
    blk = f"blk.{maps.i}.ffn"
    scores = np.sqrt(np.logaddexp(maps.linear(h, "ffn_gate_inp"), 0))
    if experts.by_token:
        table = maps.tensor(f"{blk}_gate_tid2eid.weight").astype(np.int64)
        chosen = table[np.asarray(ids)]
    else:
        rank = scores
        if maps.has("exp_probs_b.bias"):
            rank = rank + maps.tensor(f"blk.{maps.i}.exp_probs_b.bias")
        chosen = np.argsort(-rank, kind="stable")[:, : experts.n_used]
    w = np.take_along_axis(scores, chosen, -1)
    w = w / w.sum(-1, keepdims=True) * experts.scale
    usual = maps.config.arch.activation
    fn = experts.activation or usual
    made = np.zeros_like(h)
    matrices = [maps.tensor(f"{blk}_{name}_exps.weight") for name in ("gate", "up", "down")]
    for t, (row, factors) in enumerate(zip(chosen, w, strict=True)):
        for e, factor in zip(row, factors, strict=True):
            gate, up, down = (matrix[e] for matrix in matrices)
            made[t] += factor * (down @ gate_of(gate @ h[t], up @ h[t], fn))
    gate, up = (maps.linear(h, f"ffn_{name}_shexp") for name in ("gate", "up"))
    shared = maps.linear(gate_of(gate, up, maps.at.activation or usual), "ffn_down_shexp")
    if maps.has("ffn_gate_inp_shexp.weight"):
        shared = shared * sigmoid(maps.linear(h, "ffn_gate_inp_shexp"))
    return made + shared


def attended(maps: Layer, h: Array) -> Array:
    """The output of attention for normed states."""
    config = maps.config
    at = maps.at
    sizes = at.compressed
    assert sizes is not None
    n = len(h)
    dims = at.head_dim
    tensor = maps.tensor
    blk = f"blk.{maps.i}."
    rank = rms_norm(
        maps.linear(h, "attn_q_a"), tensor(f"{blk}attn_q_a_norm.weight"), config.norm_eps
    )
    q = maps.linear(rank, "attn_q_b").reshape(n, at.n_head, dims)
    q = turned(maps, rms_norm(q, np.ones(1), config.norm_eps), np.arange(n))
    rows = rms_norm(
        maps.linear(h, "attn_kv"), tensor(f"{blk}attn_kv_a_norm.weight"), config.norm_eps
    )
    rows = turned(maps, rows[:, None], np.arange(n))[:, 0]
    age = np.arange(n)[:, None] - np.arange(n)
    seen = (age >= 0) & (age < at.window)
    if sizes.unit:
        units = units_of(maps, h, "attn_compressor", dims)
        rows = np.concatenate([rows, units])
        seen = np.concatenate([seen, seen_units(maps, h, rank, len(units))], 1)
    score = np.einsum("thd,sd->hts", q, rows) * config.attn_scale
    score = np.where(seen, score, -np.inf)
    sinks = np.broadcast_to(tensor(f"{blk}attn_sinks.weight")[:, None, None], (at.n_head, n, 1))
    p = np.exp(log_softmax(np.concatenate([score, sinks], -1)))[..., :-1]
    y = turned(maps, np.einsum("hts,sd->thd", p, rows), -np.arange(n))
    y = y.reshape(n, sizes.n_groups, -1)
    a = tensor(f"{blk}attn_output_a.weight").reshape(sizes.n_groups, sizes.n_o_rank, -1)
    return maps.linear(np.einsum("tgi,goi->tgo", y, a).reshape(n, -1), "attn_output_b")


def turned(maps: Layer, x: Array, positions: Iterable[int]) -> Array:
    """Heads ``[n, heads, dims]`` whose last dims turn by these positions."""
    assert maps.at.rope is not None
    inv_freq, factor = maps.config.ropes[maps.at.rope].frequencies(maps.config.n_ctx_train)
    part = slice(x.shape[-1] - 2 * len(inv_freq), None)
    y = x.copy()
    for i, p in enumerate(positions):  # ``rope`` turns row 1 by one position
        two = np.concatenate([x[i : i + 1], x[i : i + 1]])
        y[i, :, part] = rope(two[..., part], inv_freq * p, factor, maps.config.arch.rope)[1]
    return y


def units_of(maps: Layer, h: Array, stem: str, dims: int) -> Array:
    """The rows of all whole units, [n_units, dims]."""
    sizes = maps.at.compressed
    assert sizes is not None
    n = len(h) // sizes.unit
    if not n:
        return np.zeros((0, dims))
    shape = (n, sizes.unit, -1)
    kv = maps.linear(h, f"{stem}_kv")[: n * sizes.unit].reshape(shape)
    gate = maps.linear(h, f"{stem}_gate")[: n * sizes.unit].reshape(shape)
    gate = gate + maps.tensor(f"blk.{maps.i}.{stem}_ape.weight")
    if sizes.overlap:
        before = [np.full_like(gate[:1, :, :dims], x) for x in (-np.inf, 0.0)]
        gate = np.concatenate(
            [np.concatenate([before[0], gate[:-1, :, :dims]])[:n], gate[..., dims:]], 1
        )
        kv = np.concatenate([np.concatenate([before[1], kv[:-1, :, :dims]])[:n], kv[..., dims:]], 1)
    p = np.exp(gate - gate.max(1, keepdims=True))
    made = (p * kv).sum(1) / p.sum(1)
    norm = maps.tensor(f"blk.{maps.i}.{stem}_norm.weight")
    made = rms_norm(made, norm, maps.config.norm_eps)
    return turned(maps, made[:, None], np.arange(n) * sizes.unit)[:, 0]


def seen_units(maps: Layer, h: Array, rank: Array, n: int) -> Choice:
    """Units that each query sees, bool [query, unit]."""
    sizes = maps.at.compressed
    index = maps.at.indexer
    assert sizes is not None
    whole = (np.arange(len(h)) + 1) // sizes.unit
    seen = np.arange(n) < whole[:, None]
    if index is None:
        return np.asarray(seen)
    q = maps.linear(rank, "indexer.attn_q_b").reshape(len(h), index.n_head, -1)
    q = turned(maps, q, np.arange(len(h)))
    keys = units_of(maps, h, "indexer_compressor", index.head_dim)
    scores = np.maximum(np.einsum("thd,sd->ths", q, keys), 0)
    scores = np.einsum("ths,th->ts", scores, maps.linear(h, "indexer.proj"))
    chosen = np.zeros(seen.shape, bool)
    for t, row in enumerate(scores):
        chosen[t, np.argsort(-row[: whole[t]], kind="stable")[: index.top]] = True
    return chosen
