"""A forward pass in float64 and plain numpy: what every faster path must agree with.

It reads the same ``Config`` and tensors as the compiled decoder and shares no other code with it:
no cache, no pages, no tiles; every token attends to all the tokens before it at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from treadle.files.gguf import GGUF
from treadle.models.config import Config

Array = npt.NDArray[np.float64]
Tensors = Callable[[str], Array]
Sublayer = Callable[[Config, int, Array, Tensors], Array]
Kept = dict[int, tuple[Array, Array]]  # keys and values, by layer


def forward(
    gguf: GGUF,
    config: Config,
    ids: Sequence[int],
    mix: Sublayer | None = None,
    feed: Sublayer | None = None,
) -> Array:
    """Logits [n_tokens, n_vocab] of one sequence that starts at position 0; ``mix`` and ``feed``
    in place of attention and FFN, with what stands around them.
    """
    h = states(gguf, config, ids, mix, feed)
    logits = h @ tensor_of(gguf)("token_embd.weight" if config.tied else "output.weight").T
    if "output.bias" in config.optional:
        logits = logits + tensor_of(gguf)("output.bias")
    if config.n_unpadded:
        logits[:, config.n_unpadded :] = -1e30
    return softcap(logits * config.logit_scale, config.logit_softcap)


def states(
    gguf: GGUF,
    config: Config,
    ids: Sequence[int],
    mix: Sublayer | None = None,
    feed: Sublayer | None = None,
) -> Array:
    """The last layer's normed states [n_tokens, n_embd]."""
    tensor = tensor_of(gguf)
    if config.switch is not None:
        from tests.reference_switch import Switched

        tensor = Switched(tensor, config.switch, ids)
        ids = tensor.substituted
    x = tensor("token_embd.weight")[np.asarray(ids)] * config.embd_scale
    if config.n_positions:
        x = x + tensor("position_embd.weight")[: len(ids)]
    if "token_embd_norm.weight" in config.optional:
        x = normed(x, tensor("token_embd_norm.weight"), config)
        x = x + tensor("token_embd_norm.bias") if "token_embd_norm.bias" in config.optional else x
    if config.embd_norm:
        x = rms_norm(x, np.ones(1), config.norm_eps)
    embeddings = x
    kept: Kept = {}
    if config.layers[0].hyper and config.layers[0].hyper.rounds:
        from tests.reference_compressed import blended_streams

        return blended_streams(config, x, ids, tensor)
    if config.layers[0].hyper:
        from tests.reference_hyper import mixed_streams

        return mixed_streams(config, x, ids, tensor)
    if config.attn_res_block_size:
        from tests.reference_attention_residuals import through_blocks

        return through_blocks(config, x, tensor)
    if config.n_streams > 1:
        from tests.reference_streams import joined

        x = joined(config, x, ids, tensor)
    if config.weights_of:
        x = stacked(config, x, tensor)
    n_own = config.n_layer // config.n_loops
    tensor = looped(tensor, n_own) if config.n_loops > 1 else tensor
    one_by_one = config.n_streams == 1 and not config.weights_of
    for i in range(config.n_layer if one_by_one else 0):
        if config.loop_norm and i and i % n_own == 0:
            x = rms_norm(x, tensor("output_norm.weight"), config.norm_eps)
        has_mixer = bool(config.layers[i].mixer)
        if config.parallel:
            maps = Layer(config, i, tensor)
            h = maps.norm(x, config.attn_norm)
            x = x + attended(maps, h) + gated(maps, maps.norm(x, config.ffn_norm, h))
        else:
            given = x  # by which some choose experts
            x = (mix or partial(mixed, kept=kept))(config, i, x, tensor) if has_mixer else x
            x = (feed or partial(fed, given=given))(config, i, x, tensor)
        if config.layers[i].n_own:
            from tests.reference_gemma import given_its_own

            x = given_its_own(Layer(config, i, tensor), x, ids)
        if config.arch.graph == "talkie":
            x = x + tensor(f"blk.{i}.embd_skip.weight") * embeddings
        if "layer_output_scale.weight" in config.optional:
            x = x * tensor(f"blk.{i}.layer_output_scale.weight")
    bias = tensor("output_norm.bias") if "output_norm.bias" in config.optional else 0.0
    weight = np.ones(1) if config.has_bare_norms else tensor("output_norm.weight")
    y = np.asarray(normed(x, weight, config) + bias)
    return gated_norm(config, y, tensor, "output_norm") if config.norm_gate_up_first else y


def stacked(config: Config, x: Array, tensor: Tensors) -> Array:
    """The states of HRM-Text before the last norm, of embeddings ``x [n_tokens, n_embd]``."""
    of = config.weights_of
    n = (max(of) + 1) // 2
    high = x
    low = np.broadcast_to(tensor("hrm_z_l_init.weight"), x.shape)
    for start in range(0, len(of), n):
        x = high + low
        for i in range(start, start + n):
            x = fed(config, of[i], mixed(config, of[i], x, tensor), tensor)
        made = rms_norm(x, np.ones(1), config.norm_eps)
        high, low = (high, made) if of[start] < n else (made, low)
    return x


def looped(tensor: Tensors, n: int) -> Tensors:
    """Tensors of layers that run several times, of which the file has the first ``n``."""

    def named(name: str) -> Array:
        parts = name.split(".")
        if parts[0] == "blk":
            parts[1] = str(int(parts[1]) % n)
        return tensor(".".join(parts))

    return named


def tensor_of(gguf: GGUF) -> Callable[[str], Array]:
    """A file's tensors by name."""

    def read(name: str) -> Array:
        tensor = gguf.tensors[name]
        if tensor.type_name == "I32":
            return np.asarray(tensor.data.view("<i4").reshape(tensor.shape).astype(np.float64))
        return tensor.dequantize().astype(np.float64)

    return read


def kl_divergence(reference: Array, logits: Array) -> float:
    """Mean over positions of KL(reference || logits), both [n_tokens, n_vocab], in nats."""
    p = log_softmax(reference)
    q = log_softmax(logits)
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))


def log_softmax(x: npt.NDArray[np.floating]) -> Array:
    """Of the last axis, in float64."""
    x = x.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def normed(x: Array, weight: Array, config: Config) -> Array:
    """RMS norm, or LayerNorm without its bias."""
    x = x - x.mean(axis=-1, keepdims=True) if config.centred else x
    return rms_norm(x, weight, config.norm_eps)


def softcap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap); x itself where cap is 0."""
    return cap * np.tanh(x / cap) if cap else x


def activate(x: Array, activation: str) -> Array:
    """silu; gelu by its tanh approximation, or by the error function; relu, and its square."""
    if activation == "relu":
        return np.maximum(x, 0.0)
    if activation == "relu2":
        return np.where(x > 0, x * x, 0.0)
    if activation == "gelu_erf":
        return np.asarray(x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))) / 2.0)
    if activation == "silu":
        return np.asarray(x / (1.0 + np.exp(-x)))
    return np.asarray(0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))))


def rope(x: Array, inv_freq: Array, factor: float | Array, kind: str) -> Array:
    """Turn the first dims of each head by position * inv_freq; x [n_tokens, n_head, head_dim]."""
    angle = np.arange(len(x))[:, None, None] * inv_freq  # [n_tokens, 1, dims / 2]
    cos = np.cos(angle) * factor
    sin = np.sin(angle) * factor
    half = len(inv_freq)
    first = slice(0, 2 * half, 2) if kind == "norm" else slice(0, half)
    second = slice(1, 2 * half, 2) if kind == "norm" else slice(half, 2 * half)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    cap: float,
    window: int,
    sinks: Array | None = None,
    chunk: int = 0,
    alibi: float = 0.0,
    chosen: npt.NDArray[np.bool_] | None = None,
    causal: bool = True,
) -> Array:
    """Attention, ``causal`` or to both sides.

    ``sinks`` [n_head]: scores of one more key for each head, without value; ``chunk``: no token
    sees one before the last multiple of it; ``alibi``: scores fall with distance, in the last of
    2**n heads by 2**-alibi a token; ``chosen`` [query, key], or [n_head, query, key]: the keys that
    are seen.

    q [n_tokens, n_head, head_dim], k [n_tokens, n_head_kv, head_dim],
    v [n_tokens, n_head_kv, head_dim_v] -> [n_tokens, n_head, head_dim_v].
    """
    n_group = q.shape[1] // k.shape[1]  # query heads that share a key head
    k = np.repeat(k, n_group, axis=1)
    v = np.repeat(v, n_group, axis=1)
    score = softcap(np.einsum("qhd,khd->hqk", q, k) * scale, cap)
    age = np.arange(len(q))[:, None] - np.arange(len(k))  # [query, key], tokens ago
    if alibi:
        score = score - np.array(slopes(q.shape[1], alibi))[:, None, None] * age
    age = age if causal else np.abs(age)
    seen = (age >= 0) & (age < window) if window else age >= 0
    if chunk:
        seen &= np.arange(len(k)) // chunk == np.arange(len(q))[:, None] // chunk
    if chosen is not None:
        seen = seen & chosen
    score = np.where(seen, score, -np.inf)
    if sinks is not None:
        more = np.broadcast_to(sinks[:, None, None], (*score.shape[:2], 1))
        score = np.concatenate([score, more], axis=-1)
    weight = np.exp(log_softmax(score))[..., : len(k)]
    return np.asarray(np.einsum("hqk,khd->qhd", weight, v))


def slopes(n: int, most: float) -> list[float]:
    """Of each head. Those behind the largest power of two have every other one of twice as many."""
    if n & (n - 1) == 0:
        return [2.0 ** (-most * (h + 1) / n) for h in range(n)]
    power = 1 << (n.bit_length() - 1)
    return slopes(power, most) + slopes(2 * power, most)[::2][: n - power]


class Layer:
    """One layer's linear maps and norms."""

    def __init__(self, config: Config, i: int, tensor: Tensors) -> None:
        self.config = config
        self.i = i
        self.tensor = tensor
        self.at = config.layers[i]

    def has(self, name: str) -> bool:
        return name in self.config.optional

    def linear(self, x: Array, stem: str, rows: slice | None = None) -> Array:
        """With its bias, if the file has one; ``rows`` of the matrix alone."""
        weight = self.tensor(f"blk.{self.i}.{stem}.weight")
        y = x @ (weight if rows is None else weight[rows]).T
        if (factor := f"blk.{self.i}.{stem}.scale") in self.config.factors:
            y = y * self.tensor(factor)
        if self.config.switch is not None:
            from tests.reference_switch import added

            y = y + added(self, x, stem, rows)
        if not self.has(f"{stem}.bias"):
            return y
        bias = self.tensor(f"blk.{self.i}.{stem}.bias")
        return y + (bias if rows is None else bias[rows])

    def norm(self, x: Array, stem: str, without: Array | None = None) -> Array:
        """``without``, or ``x`` itself, where the file lacks the norm that another one has."""
        optional = {f"{name}.weight" for name in OPTIONAL_NORMS} | self.config.arch.lacks
        if self.config.norm_gate_up_first:
            optional = {"ffn_sub_norm.weight"}
        if self.config.has_bare_norms and stem in ("attn_norm", "ffn_norm"):
            return normed(x, np.ones(1), self.config)
        if not stem or (f"{stem}.weight" in optional and not self.has(f"{stem}.weight")):
            return x if without is None else without
        config = self.config
        if config.post_norm_eps and stem in (POST, "post_ffw_norm"):
            config = replace(config, norm_eps=config.post_norm_eps)
        y = normed(x, self.tensor(f"blk.{self.i}.{stem}.weight"), config)
        if self.at.n_norm_rank and stem in self._gated_norms():
            y = gated_norm(self.config, y, self.tensor, f"blk.{self.i}.{stem}")
        bias = f"{stem}.bias"
        return y + self.tensor(f"blk.{self.i}.{bias}") if self.has(bias) else y

    def _gated_norms(self) -> tuple[str, ...]:
        """Norms that have a gate: that of experts, and of any mixer."""
        if self.config.norm_gate_up_first:
            return "attn_norm", POST, "ffn_norm", "post_ffw_norm"
        return ("attn_norm", "ffn_norm") if self.at.experts else ("attn_norm",)


def gated_norm(config: Config, y: Array, tensor: Tensors, stem: str) -> Array:
    """The normed ``y`` times its gate, by a rank that the matrix "down" makes, or "up" does."""
    first, second = ("up", "down") if config.norm_gate_up_first else ("down", "up")
    rank = activate(y @ tensor(f"{stem}_gate_{first}.weight").T, "silu")
    gate = rank @ tensor(f"{stem}_gate_{second}.weight").T
    return np.asarray(y / (1 + np.exp(-gate)) * config.norm_gate_gain)


OPTIONAL_NORMS = (
    "attn_q_norm",
    "attn_k_norm",
    "post_attention_norm",
    "post_ffw_norm",
    "attn_sub_norm",
    "ffn_sub_norm",
)


def mixed(config: Config, i: int, x: Array, tensor: Tensors, kept: Kept | None = None) -> Array:
    """x [n_tokens, n_embd] through the attention of layer i."""
    from tests.reference_states import MIXED

    maps = Layer(config, i, tensor)
    if maps.at.mixer == "attention_post_norm":
        return x + maps.norm(attended(maps, x), POST)
    mix = MIXED.get(maps.at.mixer) or partial(attended, kept=kept)
    if maps.at.mixer.startswith("wkv"):
        from tests.reference_wkv import wkv

        mix = partial(wkv, kept={} if kept is None else kept)
    h = mix(maps, maps.norm(x, "attn_norm"))
    return x + (h if config.ffn_norm == POST else maps.norm(h, POST))


def fed(config: Config, i: int, x: Array, tensor: Tensors, given: Array | None = None) -> Array:
    """x [n_tokens, n_embd] through the FFN of layer i, if it has one; ``given``: the states from
    before the layer's mixer.
    """
    if not config.layers[i].ffn:
        return x
    maps = Layer(config, i, tensor)
    if maps.at.ffn.endswith("_beside"):
        from tests.reference_gemma import beside

        return x + maps.norm(beside(maps, x), "post_ffw_norm")
    if maps.at.ffn == "channel_mix":
        from tests.reference_wkv import channel_mix

        return x + channel_mix(maps, x)
    if maps.at.ffn == "gated_post_norm":
        return x + normed(gated(maps, x), tensor(f"blk.{i}.post_ffw_norm.weight"), config)
    if maps.at.ffn.endswith("_convolved"):
        from tests import reference_inkling

        return x + reference_inkling.fed(maps, maps.norm(x, "ffn_norm"))
    if config.arch.graph == "early":
        return x + mixture(maps, maps.norm(x, "ffn_norm"), given)
    halves = config.arch.graph == "halves"  # a layer of one half
    before = "attn_norm" if halves else config.ffn_norm
    return x + maps.norm(gated(maps, maps.norm(x, before)), "post_ffw_norm")


POST = "post_attention_norm"


def attended(maps: Layer, h: Array, kept: Kept | None = None) -> Array:
    """What attention makes of normed states. Keys and values are kept for layers that have none of
    their own.
    """
    config = maps.config
    at = maps.at
    sizes = [at.n_head * at.head_dim, at.n_head_kv * at.head_dim, at.n_head_kv * at.head_dim_v]
    ends = np.cumsum(sizes)
    if at.mixer == "attention_shared":
        qkv = [maps.linear(h, "attn_q")]
    elif at.mixer == "attention_keys":
        q, k = (maps.linear(h, f"attn_{name}") for name in "qk")
        qkv = [q, k, k]
    elif not at.mixer.startswith("attention_qkv"):
        qkv = [maps.linear(h, f"attn_{name}") for name in "qkv"]
    else:
        parts = zip(ends - sizes, ends, strict=True)
        qkv = [maps.linear(h, "attn_qkv", slice(start, end)) for start, end in parts]
    if config.clamp:
        qkv = [np.clip(x, -config.clamp, config.clamp) for x in qkv]

    gate: Array = np.ones(1)
    if at.mixer in ("attention_gate", "attention_gate_indexed"):
        q, g = np.split(qkv[0].reshape(len(h), at.n_head, -1), 2, axis=-1)
        qkv[0], gate = q.reshape(len(h), -1), 1 / (1 + np.exp(-g.reshape(len(h), -1)))
    elif maps.has("attn_gate.weight") or at.mixer.endswith("_sigmoid"):
        gate = 1 / (1 + np.exp(-maps.linear(h, "attn_gate")))

    if at.mixer.startswith("attention_softplus"):
        gate = np.logaddexp(0, maps.linear(h, "attn_gate"))
    if at.mixer.startswith(("attention_softplus", "attention_sigmoid", "attention_qkv_sigmoid")):
        gate = gate.repeat(at.n_head * at.head_dim_v // gate.shape[1], 1)

    def placed(x: Array, stem: str, n_head: int) -> Array:
        def norm(x: Array) -> Array:
            x = x.reshape(len(x), -1) if at.wide_norm else x
            return maps.norm(x, stem).reshape(len(x), n_head, -1)

        def turn(x: Array) -> Array:
            table = at.q_rope if stem == "attn_q_norm" and at.q_rope is not None else at.rope
            if table is None:
                return x
            if at.rope is None:
                return x * config.ropes[table].gains(np.arange(len(x)))[:, None, None]
            inv_freq, factor = config.ropes[table].frequencies(config.n_ctx_train)
            gains = factor * config.ropes[table].gains(np.arange(len(x)))
            return rope(x, inv_freq, gains[:, None, None], config.arch.rope)

        x = x.reshape(len(x), n_head, -1)
        if at.qk_norm:
            gain: Array = np.ones(1)
            if stem == "attn_q_norm" and maps.has("attn_q_gain.weight"):
                gain = maps.tensor(f"blk.{maps.i}.attn_q_gain.weight")
            return rms_norm(turn(x), gain, config.norm_eps)
        return norm(turn(x)) if config.arch.norm_last else turn(norm(x))

    q = placed(qkv[0], "attn_q_norm", at.n_head)
    if kept is not None and at.kv_from != maps.i:
        k, v = kept[at.kv_from]
    else:
        k = placed(qkv[1], "attn_k_norm", at.n_head_kv)
        v = qkv[2].reshape(len(h), at.n_head_kv, -1)
        v = rms_norm(v, np.ones(1), config.norm_eps) if at.v_norm else v
    if kept is not None:
        kept[maps.i] = k, v
    name = "attn_sinks.weight"
    has_sinks = maps.has(name) or at.mixer.endswith("_sinks")
    sinks = maps.tensor(f"blk.{maps.i}.{name}") if has_sinks else None
    chunk = at.window * at.chunked
    scale = config.attn_scale
    cap = config.attn_softcap
    chosen = None
    if at.mixer == "attention_gate_indexed":
        from tests.reference_indexer import chosen_blocks

        chosen = chosen_blocks(maps, h)
    if at.mixer == "attention_blocks":
        from tests.reference_indexer import chosen_by_head

        chosen = chosen_by_head(maps, h)
    a = attention(q, k, v, scale, cap, at.window, sinks, chunk, config.alibi, chosen, config.causal)
    a = maps.norm(a.reshape(len(h), -1) * gate * config.value_scale, "attn_sub_norm")
    return maps.linear(a, "attn_output")


def mixture(maps: Layer, h: Array, routed: Array | None = None) -> Array:
    """What experts make of normed states, a token after the other; ``routed``: the states that the
    router sees, if others.
    """
    at = maps.at.experts
    own = maps.at.activation or maps.config.arch.activation
    assert at is not None
    fn = at.activation or maps.config.arch.activation

    def tensor(name: str, e: int) -> Array:
        return maps.tensor(f"blk.{maps.i}.{name}")[e] if maps.has(name) else np.zeros(1)

    def product(x: Array, stem: str, e: int) -> Array:
        whole = maps.tensor(f"blk.{maps.i}.{stem}.weight")[e]
        return np.asarray(x @ whole.T + tensor(f"{stem}.bias", e))

    def answer(x: Array, e: int) -> Array:
        if maps.at.ffn in ("experts_plain", "experts_latent"):
            return product(activate(product(x, "ffn_up_exps", e), fn), "ffn_down_exps", e)
        if not maps.at.ffn.startswith("experts_gate_up"):
            gate = product(x, "ffn_gate_exps", e)
            up = product(x, "ffn_up_exps", e)
        else:
            gate, up = np.split(product(x, "ffn_gate_up_exps", e), 2)
        return product(gate_of(gate, up, fn), "ffn_down_exps", e)

    scores = softcap(maps.linear(h if routed is None else routed, "ffn_gate_inp"), at.cap)
    p = 1 / (1 + np.exp(-scores)) if at.gating == "sigmoid" else np.exp(log_softmax(scores))
    bias = "exp_probs_b.bias"
    rank = p + maps.tensor(f"blk.{maps.i}.{bias}").ravel() if maps.has(bias) else p
    latent = {"experts_latent": "ffn_latent", "experts_routed": "ffn_routed"}.get(maps.at.ffn, "")
    inner = maps.linear(h, f"{latent}_down") if latent else h
    if maps.at.ffn == "experts_weighed":
        inner = h / (1 + np.exp(-scores.max(-1, keepdims=True)))
    out = np.zeros(inner.shape)
    for n, x in enumerate(inner):
        groups = rank[n].reshape(at.n_groups, -1)
        best = np.sort(groups, -1)[:, -2 if at.gating == "sigmoid" else -1 :].sum(-1)
        kept = np.argsort(-best, kind="stable")[: at.n_groups_used]
        hidden = np.full(groups.shape, -np.inf)
        hidden[kept] = groups[kept]
        chosen = np.argsort(-hidden.ravel(), kind="stable")[: at.n_used]
        weights = p[n][chosen] / (p[n][chosen].sum() if at.norm else 1.0) * at.scale
        if at.jitter:
            from tests.reference_mixers import sparse_mixer

            chosen, weights = sparse_mixer(scores[n], at.n_used, at.jitter)
        if maps.has("ffn_down_exps.scale"):
            weights = weights * maps.tensor(f"blk.{maps.i}.ffn_down_exps.scale")[chosen]
        for e, weight in zip(chosen, weights, strict=True):
            out[n] += weight * answer(x, e)
            if at.n_ff_chunk:
                chunk = e // at.per_chunk
                gate, up = product(x, "ffn_gate_chexps", chunk), product(x, "ffn_up_chexps", chunk)
                inner = product(gate_of(gate, up, fn), "ffn_down_chexps", chunk)
                out[n] += weight * at.chunk_scale * inner
    if maps.has("ffn_routed_norm.weight"):
        weight = maps.tensor(f"blk.{maps.i}.ffn_routed_norm.weight")
        out = rms_norm(out, weight, maps.config.norm_eps)
    out = maps.linear(out, f"{latent}_up") if latent else out
    if not maps.has("ffn_up_shexp.weight"):
        return out
    up = maps.linear(h, "ffn_up_shexp")
    if at.shared_fused:
        gate, up = np.split(up, 2, axis=-1)
        made = gate_of(gate, up, own)
    elif maps.config.arch.gated:
        made = gate_of(maps.linear(h, "ffn_gate_shexp"), up, own)
    else:
        made = activate(up, own)
    shared = maps.linear(made, "ffn_down_shexp")
    if maps.has("ffn_gate_inp_shexp.weight"):
        shared = shared / (1 + np.exp(-maps.linear(h, "ffn_gate_inp_shexp")))
    return (out + shared) / (2 if at.shared_mean else 1)


def gate_of(gate: Array, up: Array, fn: str) -> Array:
    """What a gate lets through."""
    if fn == "swiglu_clamped":  # gpt-oss
        gate = np.minimum(gate, 7.0)
        return np.asarray(gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7.0, 7.0) + 1))
    if fn.startswith("situ_"):  # Kimi K3
        most, most_up = map(float, fn.removeprefix("situ_").split("_"))
        return np.asarray(softcap(gate, most) / (1 + np.exp(-gate)) * softcap(up, most_up))
    if fn.startswith("silu_of_"):  # Maple
        limit = float(fn.removeprefix("silu_of_"))
        return activate(np.minimum(gate, limit), "silu") * np.clip(up, -limit, limit)
    if fn.startswith("silu_to_"):  # Step 3.5
        limit = float(fn.removeprefix("silu_to_"))
        return np.minimum(activate(gate, "silu"), limit) * np.clip(up, -limit, limit)
    return np.asarray(activate(gate, fn) * up)


def gated(maps: Layer, h: Array) -> Array:
    """What the FFN makes of normed states."""
    fn = maps.at.activation or maps.config.arch.activation
    n_ff = maps.at.n_ff
    if maps.at.ffn == "experts_dense":
        dense = gate_of(maps.linear(h, "ffn_gate"), maps.linear(h, "ffn_up"), fn)
        return (mixture(maps, h) + maps.linear(dense, "ffn_down")) / math.sqrt(2)
    if maps.at.experts is not None:
        return mixture(maps, h)
    if maps.at.ffn == "xielu":
        p, n, b, eps = maps.at.curve
        x = maps.linear(h, "ffn_up")
        bend = np.where(x > 0, p * x * x, n * (np.expm1(np.minimum(x, eps)) - x))
        return maps.linear(bend + b * x, "ffn_down")
    if maps.at.ffn == "plain":
        return maps.linear(activate(maps.linear(h, "ffn_up"), fn), "ffn_down")
    if maps.at.ffn in (
        "gated",
        "gated_post_norm",
        "gated_block_convolved",
        "gated_both_norms_gated",
    ):
        gate = maps.linear(h, "ffn_gate")
        up = maps.linear(h, "ffn_up")
    else:
        gate, up = (maps.linear(h, "ffn_up", rows) for rows in (slice(n_ff), slice(n_ff, None)))
    return maps.linear(maps.norm(gate_of(gate, up, fn), "ffn_sub_norm"), "ffn_down")
