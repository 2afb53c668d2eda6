"""The demo model in PyTorch: a llama decoder over stacked weights, and its optimiser.

Weights of all layers are stacked, [n_layer, rows, columns], under their GGUF stems: one cast to
bfloat16 a step serves every layer, and Muon orthogonalises all layers in one batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
NORM_EPS = 1e-5
ROPE_BASE = 10000.0
ATTENTION_BLOCK = 256
# The matrices that Muon trains; embeddings and norms go to AdamW.
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True)
class Size:
    """The shape of a llama decoder with tied embeddings."""

    n_vocab: int
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_ctx: int

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def n_embd_kv(self) -> int:
        return self.n_head_kv * self.head_dim


def initial_weights(size: Size, seed: int) -> Weights:
    """Float32 master weights; the matrices that write to the residual stream begin at zero."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    n = size.n_layer
    d = size.n_embd
    kv = size.n_embd_kv
    ff = size.n_ff
    std = 0.7 / math.sqrt(d)
    return {
        "token_embd": normal(size.n_vocab, d, std=0.02),
        "attn_norm": torch.ones(n, d),
        "attn_q": normal(n, d, d, std=std),
        "attn_k": normal(n, kv, d, std=std),
        "attn_v": normal(n, kv, d, std=std),
        "attn_output": torch.zeros(n, d, d),
        "ffn_norm": torch.ones(n, d),
        "ffn_gate": normal(n, ff, d, std=std),
        "ffn_up": normal(n, ff, d, std=std),
        "ffn_down": torch.zeros(n, d, ff),
        "output_norm": torch.ones(d),
    }


def grow(small: Weights, into: Weights) -> Weights:
    """The small model inside a new one's shapes, computing the same.

    What the small one lacks is new: rows keep their fresh values, columns that read them are zero,
    and so is what new layers add. Those stand evenly among the old ones.
    """
    n_old = len(small["attn_norm"])
    n_new = len(into["attn_norm"])
    out = {"token_embd": small["token_embd"], "output_norm": small["output_norm"]}
    for stem in into.keys() - out.keys():
        out[stem] = torch.zeros_like(into[stem]) if stem == "ffn_down" else into[stem].clone()
        for layer, old in enumerate(small[stem]):
            rows = tuple(slice(n) for n in old.shape)
            out[stem][(layer * n_new // n_old, *rows)] = old
    return {stem: out[stem].clone() for stem in into}


def dropout_masks(size: Size, n_tokens: int, rate: float, seed: int) -> Tensor:
    """Scaled keep masks [2 * n_layer + 1, n_tokens, n_embd], shared by the windows of a batch."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2 * size.n_layer + 1, n_tokens, size.n_embd)
    keep = torch.rand(shape, generator=generator) >= rate
    return keep.to(torch.bfloat16) / (1 - rate)


def rope_table(size: Size, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [n_tokens, head_dim / 2]."""
    half = size.head_dim // 2
    frequency = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(n_tokens, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on halves, x [batch, n_tokens, heads, head_dim]; export reorders q and k into pairs."""
    a, b = x.chunk(2, dim=-1)
    cos = cos[:, None].to(x.dtype)
    sin = sin[:, None].to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), gain, NORM_EPS)


def forward(
    weights: Weights,
    size: Size,
    ids: Tensor,
    rope: tuple[Tensor, Tensor],
    masks: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Logits [batch, n_tokens, n_vocab] in dtype for ids [batch, n_tokens]."""
    w = {stem: value.to(dtype) for stem, value in weights.items()}
    layers = {stem: value.unbind(0) for stem, value in w.items() if value.ndim == 3}
    layers |= {stem: w[stem].unbind(0) for stem in ("attn_norm", "ffn_norm")}
    keep = list(masks.to(dtype).unbind(0)) if masks is not None else [None] * (2 * size.n_layer + 1)
    x = F.embedding(ids, w["token_embd"])
    x = _drop(x, keep[-1])
    for n in range(size.n_layer):
        layer = {stem: value[n] for stem, value in layers.items()}
        x = x + _drop(_attention(layer, size, _norm(x, layer["attn_norm"]), rope), keep[2 * n])
        x = x + _drop(_ffn(layer, _norm(x, layer["ffn_norm"])), keep[2 * n + 1])
    return F.linear(_norm(x, w["output_norm"]), w["token_embd"])


def _drop(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else x * keep


def _attention(layer: Weights, size: Size, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    batch, n, d = x.shape
    fused = torch.cat((layer["attn_q"], layer["attn_k"], layer["attn_v"]))
    heads = F.linear(x, fused).view(batch, n, -1, size.head_dim)
    q, k, v = heads.split((size.n_head, size.n_head_kv, size.n_head_kv), dim=2)
    q = _rotate(q, *rope)
    k = _rotate(k, *rope)
    groups = size.n_head // size.n_head_kv
    k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
    y = _attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return F.linear(y.transpose(1, 2).reshape(batch, n, d), layer["attn_output"])


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [batch, heads, n_tokens, head_dim].

    PyTorch's fused attention has a slow backward pass on CPUs: spelt out, training is faster there.
    """
    if q.is_cuda or not q.requires_grad:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = []
    for start in range(0, q.shape[2], ATTENTION_BLOCK):  # keys after a block are never looked at
        block = q[:, :, start : start + ATTENTION_BLOCK] * q.shape[-1] ** -0.5
        n = start + block.shape[2]
        bias = torch.full((block.shape[2], n), -1e4, dtype=q.dtype).triu(start + 1)
        scores = block @ k[:, :, :n].transpose(-1, -2) + bias
        out.append(scores.softmax(dim=-1) @ v[:, :, :n])
    return torch.cat(out, dim=2)


def _ffn(layer: Weights, x: Tensor) -> Tensor:
    gate, up = F.linear(x, torch.cat((layer["ffn_gate"], layer["ffn_up"]))).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, layer["ffn_down"])


class Optimizer:
    """Muon for the matrices, AdamW without decay for embeddings and norms; plain state tensors."""

    muon_rate = 0.015
    muon_decay = 0.05
    momentum = 0.95
    adam_rate = 3e-3
    beta1 = 0.9
    beta2 = 0.95
    eps = 1e-8

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.state: Weights = {}
        for stem, value in weights.items():
            self.state[f"{stem}.m"] = torch.zeros_like(value)
            if stem not in MATRICES:
                self.state[f"{stem}.v"] = torch.zeros_like(value)

    def step(self, gradients: Weights, step: int, rate: float) -> None:
        """One update; rate in 0..1 scales both learning rates."""
        with torch.no_grad():
            self._step(gradients, step, rate)

    def _step(self, gradients: Weights, step: int, rate: float) -> None:
        total = torch.stack([g.float().square().sum() for g in gradients.values()]).sum().sqrt()
        scale = torch.clamp(1.0 / (total + 1e-6), max=1.0)
        for stem, gradient in gradients.items():
            if stem in MATRICES:
                self._muon(stem, gradient, rate)
            else:
                self._adam(stem, gradient * scale, step, rate)

    def _muon(self, stem: str, gradient: Tensor, rate: float) -> None:
        weight = self.weights[stem]
        m = self.state[f"{stem}.m"]
        m.lerp_(gradient, 1 - self.momentum)
        update = orthogonal(gradient.lerp(m, self.momentum))
        rows, columns = weight.shape[-2:]
        lr = self.muon_rate * rate
        weight.mul_(1 - lr * self.muon_decay)
        weight.add_(update, alpha=-lr * math.sqrt(max(1.0, rows / columns)))

    def _adam(self, stem: str, gradient: Tensor, step: int, rate: float) -> None:
        weight = self.weights[stem]
        m = self.state[f"{stem}.m"]
        v = self.state[f"{stem}.v"]
        m.lerp_(gradient, 1 - self.beta1)
        v.lerp_(gradient.square(), 1 - self.beta2)
        size = self.adam_rate * rate / (1 - self.beta1 ** (step + 1))
        root = (v / (1 - self.beta2 ** (step + 1))).sqrt_().add_(self.eps)
        weight.addcdiv_(m, root, value=-size)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest half-orthogonal matrices of a stack, roughly: five Newton-Schulz iterations."""
    # the quintic of the Muon optimiser (Jordan et al., 2024)
    a = 3.4445
    b = -4.7750
    c = 2.0315
    x = matrices.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)
