"""Grok-1 and Grok-2 as llama.cpp's converter writes them, against formulae of their published code
in float64. llama.cpp itself is another judge: its weights of experts add up to 1, and it caps no
scores of theirs. With these two, and with its GELU of half precision, the formulae give its logits
within 2e-5.
"""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.random_folder import softmax
from tests.models.hf_tiny import byte_vocabulary
from tests.models.test_arch_truth import check_truth, ids_of
from tests.stepwise import walk
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, TreadleError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.kernels.run_state import PAGE
from treadle.models.load import load_config

N_EMBD = 64
N_HEAD = 4
N_KV = 2
HEAD_DIM = 16
N_FF = 96
N_EXPERT = 6
N_VOCAB = 320
N_LAYER = 2
Tensors = dict[str, np.ndarray]
KEYS: dict[str, Any] = {
    "context_length": 8192,
    "embedding_length": N_EMBD,
    "block_count": N_LAYER,
    "feed_forward_length": N_FF,
    "attention.head_count": N_HEAD,
    "attention.head_count_kv": N_KV,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": HEAD_DIM,
    "expert_count": N_EXPERT,
    "expert_used_count": 2,
}
# What a text of 40 tokens feels: YaRN, and caps that are near.
SECOND: dict[str, Any] = {
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "expert_feed_forward_length": 32,
    "attn_logit_softcapping": 2.0,
    "router_logit_softcapping": 1.5,
    "final_logit_softcapping": 5.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 8.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "attention.temperature_length": 1024,
    "attention.output_scale": 0.25,
    "embedding_scale": 1.5,
    "logit_scale": 0.75,
}


def shapes(second: bool) -> dict[str, tuple[int, ...]]:
    width = 32 if second else N_FF
    made: dict[str, tuple[int, ...]] = {"token_embd": (N_VOCAB, N_EMBD), "output_norm": (N_EMBD,)}
    if second:
        made["output"] = (N_VOCAB, N_EMBD)
    for i in range(N_LAYER):
        last = "post_ffw_norm" if second else "layer_output_norm"
        norms = ("attn_norm", "attn_output_norm", "ffn_norm", last)
        layer: dict[str, tuple[int, ...]] = {name: (N_EMBD,) for name in norms}
        layer |= {
            "attn_q": (N_HEAD * HEAD_DIM, N_EMBD),
            "attn_k": (N_KV * HEAD_DIM, N_EMBD),
            "attn_v": (N_KV * HEAD_DIM, N_EMBD),
            "attn_output": (N_EMBD, N_HEAD * HEAD_DIM),
            "ffn_gate_inp": (N_EXPERT, N_EMBD),
            "ffn_gate_exps": (N_EXPERT, width, N_EMBD),
            "ffn_up_exps": (N_EXPERT, width, N_EMBD),
            "ffn_down_exps": (N_EXPERT, N_EMBD, width),
        }
        if second:
            layer |= {f"ffn_{one}": (N_FF, N_EMBD) for one in ("gate", "up")}
            layer["ffn_down"] = (N_EMBD, N_FF)
        made |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return made


def write(path: Path, second: bool, **more: Any) -> Tensors:
    """A file of random weights; these, in float64."""
    rng = np.random.default_rng(4)
    made = dict[str, np.ndarray]()
    writer = GGUFWriter(path)
    writer.add("general.architecture", "grok")
    for key, value in (KEYS | (SECOND if second else {}) | more).items():
        writer.add(f"grok.{key}", value)
    for key, value in byte_vocabulary().items():
        writer.add(f"tokenizer.ggml.{key}", value)
    for name, shape in shapes(second).items():
        x = rng.standard_normal(shape)
        x = 1 + 0.25 * x if len(shape) == 1 else x * (1.4 / math.sqrt(shape[-1]))
        rows = (3 * x if name == "output" else x).astype(np.float32)
        writer.add_tensor(f"{name}.weight", shape, "F32", rows)
        made[name] = rows.astype(np.float64)
    writer.write()
    return made


class Grok:
    """The formulae: of xAI's code of Grok-1, and of SGLang's of Grok-2."""

    def __init__(self, w: Tensors, keys: dict[str, Any]) -> None:
        self.w = w
        self.keys = keys
        self.attn_scale = keys.get("attention.output_scale", 0.08838834764831845)
        self.attn_cap = keys.get("attn_logit_softcapping", 30.0)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        eps = float(np.float32(1e-5))
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.w[name])

    def angles(self, n: int) -> tuple[np.ndarray, float]:
        """Of each position and pair, and what cos and sin are multiplied by."""
        pair = np.arange(HEAD_DIM // 2)
        speed = 10000.0 ** (-2 * pair / HEAD_DIM)
        factor = 1.0
        if scale := self.keys.get("rope.scaling.factor"):
            n_ctx = self.keys["rope.scaling.original_context_length"]
            log = math.log(10000.0)
            turns = [
                HEAD_DIM * math.log(n_ctx / (beta * 2 * math.pi)) / (2 * log)
                for beta in (self.keys["rope.scaling.yarn_beta_fast"], 1.0)
            ]
            low = max(0, math.floor(turns[0]))
            high = min(HEAD_DIM - 1, math.ceil(turns[1]))
            kept = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
            speed = speed * (kept + (1 - kept) / scale)
            factor = 1 + 0.1 * math.log(scale)
        return np.arange(n)[:, None] * speed, factor

    def attention(self, h: np.ndarray, at: str) -> np.ndarray:
        n = len(h)
        q, k, v = (
            (h @ self.w[f"{at}.attn_{x}"].T).reshape(n, -1, HEAD_DIM).swapaxes(0, 1) for x in "qkv"
        )
        angle, factor = self.angles(n)
        cos, sin = (np.concatenate([f(angle)] * 2, -1) * factor for f in (np.cos, np.sin))

        def turned(x: np.ndarray) -> np.ndarray:
            a, b = np.split(x, 2, -1)
            return np.asarray(x * cos + np.concatenate([-b, a], -1) * sin)

        k, v = (np.repeat(x, N_HEAD // N_KV, 0) for x in (turned(k), v))
        score = turned(q) @ k.swapaxes(1, 2) * self.attn_scale
        score = self.attn_cap * np.tanh(score / self.attn_cap)
        score = np.where(np.tril(np.ones((n, n), bool)), score, -np.inf)
        y = (softmax(score) @ v).swapaxes(0, 1).reshape(n, -1)
        return np.asarray(y @ self.w[f"{at}.attn_output"].T)

    def feed(self, x: np.ndarray, matrices: list[np.ndarray]) -> np.ndarray:
        gate, up, down = matrices
        y = x @ gate.T
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        return np.asarray((y * (x @ up.T)) @ down.T)

    def experts(self, h: np.ndarray, at: str) -> np.ndarray:
        score = h @ self.w[f"{at}.ffn_gate_inp"].T
        if cap := self.keys.get("router_logit_softcapping"):
            score = cap * np.tanh(score / cap)
        p = softmax(score)
        three = [f"{at}.ffn_{x}" for x in ("gate", "up", "down")]
        out = np.zeros_like(h)
        for i, x in enumerate(h):
            chosen = np.argsort(-p[i])[:2]
            total = p[i, chosen].sum() if self.keys.get("expert_weights_norm") else 1.0
            for e in chosen:
                matrices = [self.w[f"{name}_exps"][e] for name in three]
                out[i] += p[i, e] / total * self.feed(x, matrices)
        if three[0] not in self.w:
            return out
        return np.asarray((out + self.feed(h, [self.w[name] for name in three])) / math.sqrt(2))

    def logits(self, ids: list[int]) -> np.ndarray:
        x = self.w["token_embd"][ids] * self.keys.get("embedding_scale", 78.38367176906169)
        for i in range(N_LAYER):
            at = f"blk.{i}"
            last = f"{at}.post_ffw_norm"
            last = last if last in self.w else f"{at}.layer_output_norm"
            h = self.attention(self.norm(x, f"{at}.attn_norm"), at)
            x = x + self.norm(h, f"{at}.attn_output_norm")
            x = x + self.norm(self.experts(self.norm(x, f"{at}.ffn_norm"), at), last)
        head = self.w.get("output", self.w["token_embd"])
        y = self.norm(x, "output_norm") @ head.T * self.keys.get("logit_scale", 0.5773502691896257)
        cap = self.keys.get("final_logit_softcapping")
        return np.asarray(cap * np.tanh(y / cap) if cap else y)


@pytest.mark.slow
@pytest.mark.parametrize("second", [False, True], ids=["grok-1", "grok-2"])
def test_in_every_way(second: bool, tmp_path: Path) -> None:
    weights = write(tmp_path / "grok.gguf", second)
    truth = Grok(weights, KEYS | (SECOND if second else {})).logits(ids_of())
    assert truth.std() > 0.5
    check_truth(tmp_path / "grok.gguf", truth)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("router_logit_softcapping", 0.0),
        ("attn_logit_softcapping", 30.0),
        ("final_logit_softcapping", 0.0),
        ("expert_weights_norm", True),
        ("rope.scaling.yarn_beta_fast", 1.5),
    ],
)
def test_each_number_counts(key: str, value: Any, tmp_path: Path) -> None:
    weights = write(tmp_path / "grok.gguf", True, **{key: value})
    usual = Grok(weights, KEYS | SECOND).logits(ids_of())
    truth = Grok(weights, KEYS | SECOND | {key: value}).logits(ids_of())
    with treadle.load(tmp_path / "grok.gguf", threads=2, kv="f32") as model:
        found = model.logits(ids_of())
    assert np.abs(found - truth).max() <= 1e-5 * np.abs(truth).max()
    assert np.abs(usual - truth).max() > 1e-3 * np.abs(truth).max()


@pytest.mark.slow
def test_every_step_agrees_with_its_twin(tmp_path: Path) -> None:
    """In batches of several texts, and of one token; a fork and texts found in pages have the bits
    of one go.
    """
    write(tmp_path / "grok.gguf", True)
    ids = np.random.default_rng(4).integers(3, N_VOCAB, 2 * PAGE + 12).tolist()
    with treadle.load(tmp_path / "grok.gguf", threads=2, kv="f32", n_sequences=3) as model:
        engine = model.engine
        with closing(engine.cache.sequence()) as long, closing(engine.cache.sequence()) as one:
            engine.run([BatchItem(long, ids[:40], 0)])
            for batch in (
                [BatchItem(long, ids[40:60]), BatchItem(one, ids[:3])],
                [BatchItem(long, [6])],
            ):
                worst = max(walk(engine, batch), key=lambda compared: compared.error)
                assert worst.error <= 1, (worst.label, worst.kind, worst.error)
    with treadle.load(tmp_path / "grok.gguf", deterministic=True, n_sequences=3) as model:
        truth = model.logits(ids)[-1]
        engine = model.engine
        engine.cache.forget()
        with closing(model.session()) as first, closing(model.session()) as second:
            assert np.array_equal(first.prefill(ids), truth)
            assert second.match(ids) == 2 * PAGE
            assert np.array_equal(second.prefill(ids), truth)
            with closing(engine.cache.fork(second.seq)) as fork:
                rows = [
                    engine.run([BatchItem(seq, [5], 1)])[0].copy() for seq in (second.seq, fork)
                ]
            assert np.array_equal(rows[0], rows[1])


def test_texts_that_are_too_long(tmp_path: Path) -> None:
    """Scores grow behind token 1024 of Grok-2, which neither treadle nor llama.cpp computes."""
    path = tmp_path / "grok.gguf"
    write(path, True)
    with treadle.load(path) as model:
        assert model.engine.cache.n_ctx == 1024
    said = r"context=1025: .* after token 1024 \(attention\.temperature_length\).* at most 1024"
    with pytest.raises(TreadleError, match=said):
        treadle.load(path, context=1025)
    write(path, False)
    with treadle.load(path, context=1025) as model:
        assert model.engine.cache.n_ctx == 1025


def test_layers_without_experts(tmp_path: Path) -> None:
    write(tmp_path / "grok.gguf", False)
    with open_gguf(tmp_path / "grok.gguf") as file:
        file.metadata = {k: it for k, it in file.metadata.items() if k != "grok.expert_count"}
        with pytest.raises(FileError, match=r"grok\.expert_count: the key is missing"):
            load_config(file)
