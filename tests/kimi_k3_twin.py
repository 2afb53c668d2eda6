"""A small Kimi K3 in the layout of its published folder, and its forward pass in plain numpy and
float64: transformers has no class for it. Both follow llama.cpp's graph and converter, and what is
published of the checkpoint, and share nothing with ``tests/reference.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.convert.quantized.unpack import float4

Array = npt.NDArray[np.float64]
N_VOCAB = 320
TEXT: dict[str, Any] = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,  # of nothing
    "hidden_act": "situ",
    "activation_situ_beta": 1.5,
    "activation_situ_linear_beta": 4.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attn_res_block_size": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "routed_scaling_factor": 1.25,
    "num_nextn_predict_layers": 0,
    "linear_attn_config": {
        "full_attn_layers": [4, 5],
        "kda_layers": [1, 2, 3],
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
}
PADDED = 2  # values behind the heads' own, as in the published checkpoint
_EXPERT = "block_sparse_moe.experts."


def shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Each tensor of the text part, by its name behind "language_model."."""
    k, n_head = text["hidden_size"], text["num_attention_heads"]
    state = text["linear_attn_config"]
    inner = n_head * state["head_dim"]
    rank, n_v = text["kv_lora_rank"], text["v_head_dim"]
    n_rope, n_nope = text["qk_rope_head_dim"], text["qk_nope_head_dim"]
    n_ff, latent = text["moe_intermediate_size"], text["routed_expert_hidden_size"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (N_VOCAB, k),
        "model.norm": (k,),
        "model.output_attn_res_norm": (k,),
        "model.output_attn_res_proj": (1, k),
        "lm_head": (N_VOCAB, k),
    }
    for i in range(text["num_hidden_layers"]):
        one: dict[str, tuple[int, ...]] = {"input_layernorm": (k,)}
        one["post_attention_layernorm"] = (k,)
        for half in ("self_attention", "mlp"):
            one |= {f"{half}_res_norm": (k,), f"{half}_res_proj": (1, k)}
        mixer: dict[str, tuple[int, ...]] = {}
        if i + 1 in state["kda_layers"]:
            taps = (inner, 1, state["short_conv_kernel_size"])
            mixer |= {f"{x}_proj": (inner, k) for x in "qkvg"}
            mixer |= {f"{x}_conv1d": taps for x in "qkv"}
            mixer |= {"f_a_proj": (state["head_dim"], k), "f_b_proj": (inner, state["head_dim"])}
            mixer |= {"b_proj": (n_head, k), "o_norm": (state["head_dim"],), "o_proj": (k, inner)}
            found |= {f"model.layers.{i}.self_attn.A_log": (n_head + PADDED,)}
            found |= {f"model.layers.{i}.self_attn.dt_bias": (inner,)}
        else:
            mixer |= {"kv_a_proj_with_mqa": (rank + n_rope, k), "kv_a_layernorm": (rank,)}
            mixer |= {"kv_b_proj": (n_head * (n_nope + n_v), rank), "o_proj": (k, n_head * n_v)}
            n_q = n_head * (n_nope + n_rope)
            if text["q_lora_rank"] is None:
                mixer["q_proj"] = (n_q, k)
            else:
                low = text["q_lora_rank"]
                mixer |= {"q_a_proj": (low, k), "q_a_layernorm": (low,), "q_b_proj": (n_q, low)}
            if text["mla_use_output_gate"]:
                mixer["g_proj"] = (n_head * n_v, k)
        one |= {f"self_attn.{name}": shape for name, shape in mixer.items()}
        if i < text["first_k_dense_replace"]:
            one |= _ffn("mlp.", text["intermediate_size"], k)
        else:
            moe = "block_sparse_moe."
            one[f"{moe}gate"] = (text["num_experts"], k)
            one[f"{moe}routed_expert_down_proj"] = (latent, k)
            one[f"{moe}routed_expert_up_proj"] = (k, latent)
            if text["latent_moe_use_norm"]:
                one[f"{moe}routed_expert_norm"] = (latent,)
            found[f"model.layers.{i}.{moe}gate.e_score_correction_bias"] = (text["num_experts"],)
            for e in range(text["num_experts"]):
                one |= {f"{_EXPERT}{e}.{w}": (n_ff, latent) for w in ("w1", "w3")}
                one[f"{_EXPERT}{e}.w2"] = (latent, n_ff)
            if text["num_shared_experts"]:
                one |= _ffn(f"{moe}shared_experts.", n_ff * text["num_shared_experts"], k)
        found |= {f"model.layers.{i}.{name}": shape for name, shape in one.items()}
    named = ("A_log", "_bias")
    return {n if n.endswith(named) else f"{n}.weight": shape for n, shape in found.items()}


def _ffn(at: str, n: int, k: int) -> dict[str, tuple[int, ...]]:
    return {f"{at}gate_proj": (n, k), f"{at}up_proj": (n, k), f"{at}down_proj": (k, n)}


def draw(text: dict[str, Any], seed: int = 1) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights that keep activations near 1 and logits apart."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes(text).items():
        x = rng.standard_normal(shape)
        if name.endswith("A_log"):
            x = 0.5 * x
            x[-PADDED:] = 0.0
        elif name.endswith("_bias"):
            x = 0.5 * x
        elif len(shape) == 1:
            x = 1.0 + 0.25 * x
        elif "embed_tokens" in name:
            x = 0.35 * x
        elif name == "lm_head.weight":
            x = 3.0 * x / np.sqrt(shape[-1])
        else:
            x = 1.4 * x / np.sqrt(shape[-1])
        made[name] = x.astype(np.float32)
    return made


def pack(tensors: dict[str, npt.NDArray[np.float32]]) -> dict[str, Any]:
    """The same with experts as compressed-tensors' MXFP4; ``tensors`` become what these mean."""
    found: dict[str, Any] = {}
    rng = np.random.default_rng(5)
    for name, weight in tensors.items():
        if _EXPERT not in name:
            found[name] = weight
            continue
        m, k = weight.shape
        codes = rng.integers(0, 256, (m, k // 2)).astype(np.uint8)
        scales = rng.integers(124, 126, (m, k // 32)).astype(np.uint8)
        found[f"{name}_packed"] = codes
        found[f"{name}_scale"] = scales
        each = np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, -1)
        tensors[name] = (float4(codes) * each).astype(np.float32)
    return found


def save(folder: Path, text: dict[str, Any], tensors: dict[str, Any], **more: Any) -> Path:
    """Write the folder, with a part of a tower in it, and return it."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"vt_hidden_size": 32},
        "tie_word_embeddings": False,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    named["vision_tower.encoder.blocks.0.norm0.weight"] = np.ones(32, np.float32)
    named["mm_projector.proj.0.weight"] = np.ones((4, 4), np.float32)
    save_file(named, folder / "model.safetensors")
    return folder


# -- the forward pass -----------------------------------------------------------------------------


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


class Twin:
    """The forward pass of a text part. ``tensors`` by their names behind "language_model."."""

    def __init__(self, text: dict[str, Any], tensors: dict[str, npt.NDArray[np.float32]]) -> None:
        self.text = text
        self.tensors = tensors

    def __call__(self, name: str) -> Array:
        return self.tensors[name].astype(np.float64)

    def norm(self, x: Array, name: str, eps: float | None = None) -> Array:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + (eps or self.text["rms_norm_eps"]))
        return np.asarray(x / scale * self(f"{name}.weight"))

    def logits(self, ids: list[int]) -> Array:
        """Logits [n_tokens, n_vocab]."""
        total = self("model.embed_tokens.weight")[ids]
        blocks: list[Array] = []
        for i in range(self.text["num_hidden_layers"]):
            at = f"model.layers.{i}."
            h = self.residual(blocks, total, f"{at}self_attention_res") if blocks else total
            if i % self.text["attn_res_block_size"] == 0:
                blocks.append(total)
                total = np.zeros_like(total)
            h = self.norm(h, f"{at}input_layernorm")
            kda = i + 1 in self.text["linear_attn_config"]["kda_layers"]
            total = total + (self.delta(h, at) if kda else self.latent(h, at))
            h = self.residual(blocks, total, f"{at}mlp_res")
            h = self.norm(h, f"{at}post_attention_layernorm")
            dense = i < self.text["first_k_dense_replace"]
            total = total + (self.ffn(h, f"{at}mlp.") if dense else self.experts(h, at))
        h = self.residual(blocks, total, "model.output_attn_res")
        return self.norm(h, "model.norm") @ self("lm_head.weight").T

    def residual(self, blocks: list[Array], total: Array, name: str) -> Array:
        """Blocks' sums and the current one, by the softmax of the projection of their norms."""
        rows = np.stack([*blocks, total], 1)
        scores = (self.norm(rows, f"{name}_norm") @ self(f"{name}_proj.weight").T)[..., 0]
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share = share / share.sum(-1, keepdims=True)
        return np.asarray(np.einsum("tb,tbk->tk", share, rows))

    def situ(self, gate: Array, up: Array) -> Array:
        b, c = (self.text[f"activation_situ_{x}beta"] for x in ("", "linear_"))
        up = up if c is None else c * np.tanh(up / c)
        return np.asarray(b * np.tanh(gate / b) * sigmoid(gate) * up)

    def ffn(self, h: Array, at: str) -> Array:
        gate, up = (h @ self(f"{at}{x}_proj.weight").T for x in ("gate", "up"))
        return self.situ(gate, up) @ self(f"{at}down_proj.weight").T

    def experts(self, h: Array, at: str) -> Array:
        at = f"{at}block_sparse_moe."
        p = sigmoid(h @ self(f"{at}gate.weight").T)
        rank = p + self(f"{at}gate.e_score_correction_bias")
        chosen = np.argsort(-rank, -1, kind="stable")[:, : self.text["num_experts_per_token"]]
        inner = h @ self(f"{at}routed_expert_down_proj.weight").T
        out = np.zeros_like(inner)
        for t, experts in enumerate(chosen):
            weights = p[t][experts]
            if self.text["moe_renormalize"]:
                weights = weights / weights.sum()
            for e, weight in zip(experts, weights, strict=True):
                w1, w2, w3 = (self(f"{at}experts.{e}.w{n}.weight") for n in (1, 2, 3))
                made = self.situ(inner[t] @ w1.T, inner[t] @ w3.T) @ w2.T
                out[t] += self.text["routed_scaling_factor"] * weight * made
        if self.text["latent_moe_use_norm"]:
            out = self.norm(out, f"{at}routed_expert_norm")
        out = out @ self(f"{at}routed_expert_up_proj.weight").T
        return out + self.ffn(h, f"{at}shared_experts.") if self.text["num_shared_experts"] else out

    def latent(self, h: Array, at: str) -> Array:
        at = f"{at}self_attn."
        n = self.text["num_attention_heads"]
        rank, n_nope = self.text["kv_lora_rank"], self.text["qk_nope_head_dim"]
        if self.text["q_lora_rank"] is None:
            q = h @ self(f"{at}q_proj.weight").T
        else:
            q = self.norm(h @ self(f"{at}q_a_proj.weight").T, f"{at}q_a_layernorm", 1e-6)
            q = q @ self(f"{at}q_b_proj.weight").T
        q = q.reshape(len(h), n, -1)
        row = h @ self(f"{at}kv_a_proj_with_mqa.weight").T
        shared = np.repeat(row[:, None, rank:], n, 1)
        row = self.norm(row[:, :rank], f"{at}kv_a_layernorm", 1e-6)
        kv = (row @ self(f"{at}kv_b_proj.weight").T).reshape(len(h), n, -1)
        key = np.concatenate([kv[..., :n_nope], shared], -1)
        scores = np.einsum("qhd,khd->hqk", q, key) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(len(h), dtype=bool), scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share = share / share.sum(-1, keepdims=True)
        y = np.einsum("hqk,khd->qhd", share, kv[..., n_nope:]).reshape(len(h), -1)
        if self.text["mla_use_output_gate"]:
            y = y * sigmoid(h @ self(f"{at}g_proj.weight").T)
        return np.asarray(y @ self(f"{at}o_proj.weight").T)

    def delta(self, h: Array, at: str) -> Array:
        at = f"{at}self_attn."
        n = self.text["num_attention_heads"]
        state_of = self.text["linear_attn_config"]

        def heads(x: Array) -> Array:
            return x.reshape(len(h), n, -1)

        def projected(x: str) -> Array:
            y = h @ self(f"{at}{x}_proj.weight").T
            taps = self(f"{at}{x}_conv1d.weight")[:, 0]
            past = np.concatenate([np.zeros((taps.shape[1] - 1, y.shape[1])), y])
            parts = [past[j:][: len(y)] * taps[:, j] for j in range(taps.shape[1])]
            return heads(silu(np.sum(parts, axis=0)))

        q, k, v = map(projected, "qkv")
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        q = q / np.sqrt(q.shape[-1])
        g = h @ self(f"{at}f_a_proj.weight").T @ self(f"{at}f_b_proj.weight").T
        g = heads(g + self(f"{at}dt_bias"))
        rate = np.exp(self(f"{at}A_log"))[:n, None]
        bound = state_of.get("gate_lower_bound")
        g = -rate * np.logaddexp(0, g) if bound is None else bound * sigmoid(rate * g)
        beta = sigmoid(h @ self(f"{at}b_proj.weight").T)
        state = np.zeros((n, k.shape[-1], v.shape[-1]))
        out = np.zeros_like(v)
        for t in range(len(h)):
            state = state * np.exp(g[t])[..., None]
            miss = v[t] - np.einsum("hk,hkv->hv", k[t], state)
            state = state + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * miss)
            out[t] = np.einsum("hk,hkv->hv", q[t], state)
        y = self.norm(out, f"{at}o_norm") * sigmoid(heads(h @ self(f"{at}g_proj.weight").T))
        return y.reshape(len(h), -1) @ self(f"{at}o_proj.weight").T
