"""GigaChat 3.5 in plain numpy and float64, of a checkpoint's own tensors: its layers as the modules
of the servers that run it say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def silu(x: Array) -> Array:
    return np.asarray(x * sigmoid(x))


class Published:
    """A checkpoint's ``tensors`` by name, and its ``config``."""

    def __init__(self, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> None:
        self.tensors = {name: x.astype(np.float64) for name, x in tensors.items()}
        self.config = config

    def linear(self, x: Array, name: str) -> Array:
        return np.asarray(x @ self.tensors[f"{name}.weight"].T)

    def rms(self, x: Array) -> Array:
        square = (x * x).mean(-1, keepdims=True)
        return np.asarray(x / np.sqrt(square + self.config["rms_norm_eps"]))

    def norm(self, x: Array, name: str, scale: float = 1.0) -> Array:
        y = self.rms(x) * (1 + self.tensors[f"{name}.weight"])
        rank = silu(self.linear(y, f"{name}.gate_up_projection"))
        return np.asarray(
            y * 2 * scale * sigmoid(self.linear(rank, f"{name}.gate_down_projection"))
        )

    def mlp(self, x: Array, at: str) -> Array:
        limit = self.config["swiglu_limit"]
        gate = np.minimum(self.linear(x, f"{at}.gate_proj"), limit)
        up = np.clip(self.linear(x, f"{at}.up_proj"), -limit, limit)
        return self.linear(silu(gate) * up, f"{at}.down_proj")

    def experts(self, x: Array, at: str) -> Array:
        scores = sigmoid(self.linear(x, f"{at}.gate"))
        out = self.mlp(x, f"{at}.shared_experts")
        bias = self.tensors[f"{at}.gate.e_score_correction_bias"]
        for t, score in enumerate(scores):
            best = np.argsort(-(score + bias))[: self.config["num_experts_per_tok"]]
            weights = score[best] / score[best].sum() * self.config["routed_scaling_factor"]
            for e, weight in zip(best, weights, strict=True):
                out[t] += weight * self.mlp(x[t : t + 1], f"{at}.experts.{e}")[0]
        return out

    def delta(self, x: Array, at: str) -> Array:
        """Each key head has its queries, keys, values and gates side by side, and its values'
        beta and alpha.
        """
        n = len(x)
        n_k, n_v = (self.config[f"linear_num_{of}_heads"] for of in ("key", "value"))
        dim = self.config["linear_key_head_dim"]
        share = n_v // n_k
        cuts = np.cumsum([dim, dim, share * dim])
        parts = np.split(self.linear(x, f"{at}.in_proj_qkvz").reshape(n, n_k, -1), cuts, -1)
        z = parts.pop().reshape(n, n_v, dim)
        both = self.linear(x, f"{at}.in_proj_ba").reshape(n, n_k, 2 * share)
        b, a = (half.reshape(n, n_v) for half in np.split(both, 2, -1))
        u = np.concatenate([part.reshape(n, -1) for part in parts], -1)
        taps = self.tensors[f"{at}.conv1d.weight"][:, 0]
        past = np.concatenate([np.zeros((taps.shape[1] - 1, u.shape[1])), u])
        u = silu(np.sum([past[j : j + n] * taps[:, j] for j in range(taps.shape[1])], 0))
        q, k, v = np.split(u, [n_k * dim, 2 * n_k * dim], -1)

        def unit(rows: Array) -> Array:
            rows = rows.reshape(n, n_k, dim)
            rows = rows / np.sqrt((rows * rows).sum(-1, keepdims=True) + 1e-6)
            return np.repeat(rows, share, 1)

        q, k, v = unit(q) / math.sqrt(dim), unit(k), v.reshape(n, n_v, dim)
        rate = np.logaddexp(0, a + self.tensors[f"{at}.dt_bias"])
        decay = np.exp(-np.exp(self.tensors[f"{at}.A_log"]) * rate)
        state = np.zeros((n_v, dim, dim))
        out = np.zeros((n, n_v, dim))
        for t in range(n):
            state = state * decay[t][:, None, None]
            wrong = (v[t] - np.einsum("hkv,hk->hv", state, k[t])) * sigmoid(b[t])[:, None]
            state = state + k[t][:, :, None] * wrong[:, None]
            out[t] = np.einsum("hkv,hk->hv", state, q[t])
        y = self.rms(out) * (1 + self.tensors[f"{at}.norm.weight"]) * 2 * sigmoid(z)
        return self.linear(y.reshape(n, -1), f"{at}.out_proj")

    def turned(self, x: Array) -> Array:
        """The pairs of neighbours of ``x [n, heads, dims]`` by YaRN's frequencies."""
        rope = self.config["rope_parameters"]
        dims = x.shape[-1]
        base = rope["rope_theta"]
        usual = base ** (-np.arange(0, dims, 2) / dims)

        def pair(turns: float) -> float:
            length = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
            return float(dims * math.log(length) / (2 * math.log(base)))

        low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), dims - 1)
        far = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
        frequencies = usual * (1 - far) + usual / rope["factor"] * far
        angles = np.arange(len(x))[:, None, None] * frequencies
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    def attention(self, x: Array, at: str) -> Array:
        n = len(x)
        config = self.config
        heads, wide = config["num_attention_heads"], config["hidden_size"]
        nope, rank = config["qk_nope_head_dim"], config["kv_lora_rank"]
        q = self.linear(x, f"{at}.q_a_proj")
        q = self.norm(q, f"{at}.q_a_layernorm", math.sqrt(wide / q.shape[1]))
        q, q_turned = np.split(self.linear(q, f"{at}.q_b_proj").reshape(n, heads, -1), [nope], -1)
        row, k_turned = np.split(self.linear(x, f"{at}.kv_a_proj_with_mqa"), [rank], -1)
        row = self.norm(row, f"{at}.kv_a_layernorm", math.sqrt(wide / rank))
        k, v = np.split(self.linear(row, f"{at}.kv_b_proj").reshape(n, heads, -1), [nope], -1)
        score = np.einsum("qhd,khd->hqk", q, k)
        pair = self.turned(q_turned), self.turned(k_turned[:, None])[:, 0]
        score = score + np.einsum("qhd,kd->hqk", *pair)
        rope = config["rope_parameters"]
        scale = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
        score = score * scale**2 / math.sqrt(nope + config["qk_rope_head_dim"])
        weight = np.exp(np.where(np.tril(np.ones((n, n))) > 0, score, -np.inf))
        weight = weight / weight.sum(-1, keepdims=True)
        y = np.einsum("hqk,khd->qhd", weight, v).reshape(n, -1)
        return self.linear(y * sigmoid(self.linear(x, f"{at}.gate_proj")), f"{at}.o_proj")

    def logits(self, ids: list[int]) -> Array:
        x = self.tensors["model.embed_tokens.weight"][ids]
        for i in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{i}"
            full = i in self.config["full_attention_layers"]
            h = self.norm(x, f"{at}.input_layernorm")
            h = (self.attention if full else self.delta)(h, f"{at}.self_attn")
            x = x + self.norm(h, f"{at}.post_self_attn_layernorm")
            h = self.norm(x, f"{at}.post_attention_layernorm")
            dense = i < self.config["first_k_dense_replace"]
            h = (self.mlp if dense else self.experts)(h, f"{at}.mlp")
            x = x + self.norm(h, f"{at}.post_feedforward_layernorm")
        return self.linear(self.norm(x, "model.norm"), "lm_head")
