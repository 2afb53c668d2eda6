"""The models that ``tools/logits_digest.py`` runs: those of the shared data, and small random ones
for what the data lacks. The same seed makes the same file everywhere.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import treadle
from treadle.files.gguf import GGUFWriter
from treadle.formats import FORMATS, by_name

DEMO = Path(treadle.__file__).parent / "data" / "demo.gguf"
STRIP = 128  # rows that are quantised; all others repeat them in another order


@dataclass(frozen=True)
class Shape:
    """Sizes of a random decoder, and what its architecture has besides."""

    arch: str = "llama"
    n_layer: int = 2
    n_embd: int = 256
    n_ff: int = 512
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_vocab: int = 320
    n_ctx: int = 2048
    keys: Mapping[str, Any] = field(default_factory=dict)  # without the architecture's prefix
    biases: tuple[str, ...] = ()  # stems that have one
    norms: tuple[str, ...] = ()  # beside attn_norm and ffn_norm
    factors: bool = False  # rope_freqs.weight
    tied: bool = False
    formats: Mapping[str, str] = field(default_factory=dict)  # by stem, where not the model's

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of a layer's matrices, by stem."""
        q = self.n_head * self.head_dim
        kv = self.n_head_kv * self.head_dim
        return {
            "attn_q": (q, self.n_embd),
            "attn_k": (kv, self.n_embd),
            "attn_v": (kv, self.n_embd),
            "attn_output": (self.n_embd, q),
            "ffn_gate": (self.n_ff, self.n_embd),
            "ffn_up": (self.n_ff, self.n_embd),
            "ffn_down": (self.n_embd, self.n_ff),
        }

    def norm_sizes(self) -> dict[str, int]:
        """Lengths of a layer's norms, by stem."""
        per_head = ("attn_q_norm", "attn_k_norm")
        stems = ("attn_norm", "ffn_norm", *self.norms)
        return {stem: self.head_dim if stem in per_head else self.n_embd for stem in stems}


QK_NORM = ("attn_q_norm", "attn_k_norm")
# Every K is three blocks of the longest kind, so that a format needs few kernels.
ONE_K = Shape(n_layer=1, n_embd=768, n_head=12, n_ff=768)
WIDE = Shape(n_layer=1, n_embd=1536, n_ff=4608, n_head=12, head_dim=128)  # several blocks of K
GEMMA = {
    "attention.sliding_window": 64,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
RANDOM: dict[str, tuple[Shape, str]] = {
    "qwen2": (Shape("qwen2", biases=("attn_q", "attn_k", "attn_v"), tied=True), "Q8_0"),
    "qwen3": (Shape("qwen3", head_dim=128, norms=QK_NORM), "Q4_K"),
    "gemma3": (
        Shape(
            "gemma3",
            7,
            head_dim=96,
            n_head_kv=1,
            keys=GEMMA,
            tied=True,
            norms=(*QK_NORM, "post_attention_norm", "post_ffw_norm"),
        ),
        "BF16",
    ),
    "bias": (Shape(biases=tuple(Shape().matrices())), "F32"),
    "yarn": (
        Shape(
            keys={
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 512,
            }
        ),
        "F16",
    ),
    "llama3": (Shape(n_head_kv=1, factors=True), "Q4_0"),
    "mixed": (
        Shape(formats={"ffn_gate": "F16", "attn_q": "Q4_0", "attn_v": "Q6_K", "ffn_down": "BF16"}),
        "Q8_0",
    ),
}
WIDE_FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "IQ4_XS")
MLX = (
    "MLX2_G64",
    "MLX3_G64",
    "MLX4_G64",
    "MLX5_G64",
    "MLX6_G64",
    "MLX8_G64",
    "MLX4_G32_BF16",
    "MLX4_G128_F32",
    "MLX6_G32_BF16",
    "MLX8_G128_F32",
)


@dataclass(frozen=True)
class Subject:
    """A model: ``make(folder)`` gives the path of its file."""

    name: str
    make: Callable[[Path], Path]
    random: bool = False


def existing(path: Path, folder: Path) -> Path:
    """A file that need not be made."""
    return path


def subjects(data: Path) -> list[Subject]:
    """All of them; the shared data's are left out where the folder is absent."""
    found = [Subject("demo", partial(existing, DEMO))]
    for path in sorted(data.glob("models/**/*.gguf")) + sorted(data.glob("arch/*.gguf")):
        shard = path.stem.partition("-of-")[0].rpartition("-")[2]
        if not (shard.isdigit() and int(shard) > 1):
            name = path.relative_to(data).with_suffix("").as_posix().removeprefix("models/")
            found.append(Subject(name, partial(existing, path)))
    made = {f"random/{name}": (shape, fmt) for name, (shape, fmt) in RANDOM.items()}
    made |= {f"wide/{fmt}": (WIDE, fmt) for fmt in WIDE_FORMATS}
    made |= {f"format/{fmt.name}": (ONE_K, fmt.name) for fmt in FORMATS.values()}
    for name, (shape, fmt) in made.items():
        found.append(Subject(name, partial(write_gguf, shape, fmt), random=True))
    return found + [Subject(f"format/{fmt}", partial(write_mlx, ONE_K, fmt), True) for fmt in MLX]


# -- random weights ---------------------------------------------------------------------------


@lru_cache(maxsize=4)
def strip(fmt: str, k: int) -> np.ndarray:
    """Rows of ``k`` normal weights as bytes, uint8 [STRIP, row bytes]: products stay near 1.4."""
    rows = np.random.default_rng(k).standard_normal((STRIP, k), np.float32)
    return by_name(fmt).quantize_rows(rows * np.float32(1.4 / math.sqrt(k)))


def matrix(name: str, fmt: str, m: int, k: int) -> np.ndarray:
    """The bytes of ``m`` rows."""
    return strip(fmt, k)[np.random.default_rng(list(name.encode())).integers(0, STRIP, m)]


def vector(name: str, n: int) -> np.ndarray:
    """A norm's weights, a bias, or divisors of frequencies; float32 [n]."""
    x = np.random.default_rng(list(name.encode())).standard_normal(n).astype(np.float32)
    if name.endswith("bias"):
        return x * np.float32(0.5)
    if name.startswith("rope_freqs"):
        return 1 + np.abs(x)
    return 1 + x * np.float32(0.25)


def tensors(shape: Shape, fmt: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and format of each tensor; norms and biases are F32."""
    yield "token_embd.weight", (shape.n_vocab, shape.n_embd), fmt
    for i in range(shape.n_layer):
        for stem, size in shape.matrices().items():
            yield f"blk.{i}.{stem}.weight", size, shape.formats.get(stem, fmt)
            if stem in shape.biases:
                yield f"blk.{i}.{stem}.bias", size[:1], "F32"
        for stem, n in shape.norm_sizes().items():
            yield f"blk.{i}.{stem}.weight", (n,), "F32"
    yield "output_norm.weight", (shape.n_embd,), "F32"
    if shape.factors:
        yield "rope_freqs.weight", (shape.head_dim // 2,), "F32"
    if not shape.tied:
        yield "output.weight", (shape.n_vocab, shape.n_embd), fmt


def write_gguf(shape: Shape, fmt: str, folder: Path) -> Path:
    """A GGUF file with a vocabulary of bytes."""
    writer = GGUFWriter(folder / "model.gguf")
    writer.add("general.architecture", shape.arch)
    keys: dict[str, Any] = {
        "block_count": shape.n_layer,
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **shape.keys,
    }
    for key, value in keys.items():
        writer.add(f"{shape.arch}.{key}", value)
    controls = ["<unk>", "<s>", "</s>"]
    n_bytes = 256
    n_fill = shape.n_vocab - len(controls) - n_bytes
    words = [f"<0x{byte:02X}>" for byte in range(n_bytes)] + [f"\u2581{i}" for i in range(n_fill)]
    vocabulary: dict[str, Any] = {
        "model": "llama",
        "tokens": controls + words,
        "scores": [0.0] * shape.n_vocab,
        "token_type": [2, 3, 3] + [6] * n_bytes + [1] * n_fill,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    for key, value in vocabulary.items():
        writer.add(f"tokenizer.ggml.{key}", value)
    for name, size, kind in tensors(shape, fmt):
        data = matrix(name, kind, *size) if len(size) == 2 else vector(name, *size)
        writer.add_tensor(name, size, kind, data)
    writer.write()
    return writer.path


# -- MLX --------------------------------------------------------------------------------------

HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """``model.layers.0.mlp.up_proj`` of ``blk.0.ffn_up.weight``."""
    *layer, stem, _ = name.split(".")
    return ".".join([*(("model.layers", layer[1]) if layer else ()), HF_NAMES[stem]])


def write_mlx(shape: Shape, fmt: str, folder: Path) -> Path:
    """A directory as mlx-lm writes it: config.json and one safetensors file, no vocabulary."""
    kind = by_name(fmt)
    floats = {"e": "F16", "f": "F32"}.get(kind.dtype["d"].char, "BF16")
    arrays: dict[str, tuple[str, np.ndarray]] = {}  # safetensors' type, and bytes of each row
    for name, size, _ in tensors(shape, fmt):
        if len(size) == 1:
            arrays[f"{hf_name(name)}.weight"] = "F32", vector(name, *size).view(np.uint8)
            continue
        parts = kind.split(matrix(name, fmt, *size))
        for part, number, data in zip(
            ("weight", "scales", "biases"), ("U32", floats, floats), parts, strict=True
        ):
            arrays[f"{hf_name(name)}.{part}"] = number, data
    write_safetensors(folder / "model.safetensors", arrays)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape.n_layer,
        "hidden_size": shape.n_embd,
        "intermediate_size": shape.n_ff,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.n_head_kv,
        "head_dim": shape.head_dim,
        "vocab_size": shape.n_vocab,
        "max_position_embeddings": shape.n_ctx,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "quantization": {
            "group_size": kind.block,
            "bits": 8 * kind.dtype["qs"].itemsize // kind.block,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_safetensors(path: Path, arrays: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """``arrays``: each array's type by safetensors' name, and its bytes, uint8 [..., bytes]."""
    n_bytes = {"U32": 4, "F32": 4, "F16": 2, "BF16": 2}
    header = {}
    at = 0
    for name, (kind, data) in arrays.items():
        size = [*data.shape[:-1], data.shape[-1] // n_bytes[kind]]
        header[name] = {"dtype": kind, "shape": size, "data_offsets": [at, at + data.nbytes]}
        at += data.nbytes
    text = json.dumps(header).encode()
    body = b"".join(data.tobytes() for _, data in arrays.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
