"""Decoder architectures: one row of named traits each, over one decoder.

A trait says how a graph differs from Llama's; what a tensor's presence can say is no trait
(biases, q/k norms, post norms, tied output, rope factors: see ``LAYER_TENSORS``). The data flow
that all rows share, per layer::

    h = norm(x) -> q, k, v (+ bias) -> q/k norm -> rope -> attention -> output (+ bias) -> post norm
    x = x + h
    h = norm(x) -> act(gate) * up -> down -> post norm
    x = x + h
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from treadle.errors import FileError

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.config import Config

QK_NORM = frozenset({"attn_q_norm.weight", "attn_k_norm.weight"})
POST_NORM = frozenset({"post_attention_norm.weight", "post_ffw_norm.weight"})
QKV_BIAS = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias"})

Rope = Literal["norm", "neox"]
ROPES: tuple[Rope, ...] = ("norm", "neox")


@dataclass(frozen=True)
class Arch:
    """The traits of one architecture, named as GGUF's ``general.architecture`` names it.

    rope: which elements of a head turn together: ``norm`` is (2i, 2i+1), ``neox`` (i, i + dims/2).
    activation: on the gate: ``silu``, or ``gelu`` (the tanh approximation).
    needs: optional layer tensors that every sound file of this architecture has.
    embd_scale: token embeddings are multiplied by sqrt(n_embd).
    window_period: of every ``window_period`` layers the last sees everything and the others see
        ``attention.sliding_window`` tokens; 0: all see everything and that key means nothing, as in
        llama.cpp (Qwen2 files carry a window that the model does not use).
    rope_base_local: default rope base of the layers with a window; such layers ignore rope scaling.
    width_scaled: layer counts of the sizes whose attention scale is 1/sqrt(n_embd / n_head)
        where the others have 1/sqrt(head_dim): Gemma 3 27B says so in no key.
    """

    name: str
    rope: Rope = "neox"
    activation: Literal["silu", "gelu"] = "silu"
    needs: frozenset[str] = frozenset()
    embd_scale: bool = False
    window_period: int = 0
    rope_base_local: float = 10000.0
    width_scaled: frozenset[int] = frozenset()


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("llama", rope="norm"),  # Llama 1 to 3, Mistral, TinyLlama
        Arch("qwen2", needs=QKV_BIAS),
        Arch("qwen3", needs=QK_NORM),
        Arch(
            "gemma3",
            activation="gelu",
            needs=QK_NORM | POST_NORM,
            embd_scale=True,
            window_period=6,
            width_scaled=frozenset({62}),
        ),
    )
}


@dataclass(frozen=True)
class TensorRow:
    """One tensor's name and shape, numpy order; the shape's words are keys of ``dims(config)``."""

    name: str
    shape: tuple[str, ...]
    optional: bool = False


MODEL_TENSORS: tuple[TensorRow, ...] = (
    TensorRow("token_embd.weight", ("n_vocab", "n_embd")),
    TensorRow("output_norm.weight", ("n_embd",)),
    TensorRow("output.weight", ("n_vocab", "n_embd"), optional=True),  # absent: tied to token_embd
    TensorRow("rope_freqs.weight", ("n_rope_freq",), optional=True),  # Llama 3: divides inv_freq
)

LAYER_TENSORS: tuple[TensorRow, ...] = (  # each behind "blk.N."
    TensorRow("attn_norm.weight", ("n_embd",)),
    TensorRow("attn_q.weight", ("n_q", "n_embd")),
    TensorRow("attn_q.bias", ("n_q",), optional=True),
    TensorRow("attn_k.weight", ("n_k", "n_embd")),
    TensorRow("attn_k.bias", ("n_k",), optional=True),
    TensorRow("attn_v.weight", ("n_v", "n_embd")),
    TensorRow("attn_v.bias", ("n_v",), optional=True),
    TensorRow("attn_q_norm.weight", ("head_dim",), optional=True),  # per head, before rope
    TensorRow("attn_k_norm.weight", ("head_dim",), optional=True),
    TensorRow("attn_output.weight", ("n_embd", "n_attn")),
    TensorRow("attn_output.bias", ("n_embd",), optional=True),
    TensorRow("post_attention_norm.weight", ("n_embd",), optional=True),  # before the residual add
    TensorRow("ffn_norm.weight", ("n_embd",)),
    TensorRow("ffn_gate.weight", ("n_ff", "n_embd")),
    TensorRow("ffn_gate.bias", ("n_ff",), optional=True),
    TensorRow("ffn_up.weight", ("n_ff", "n_embd")),
    TensorRow("ffn_up.bias", ("n_ff",), optional=True),
    TensorRow("ffn_down.weight", ("n_embd", "n_ff")),
    TensorRow("ffn_down.bias", ("n_embd",), optional=True),
    TensorRow("post_ffw_norm.weight", ("n_embd",), optional=True),  # before the residual add
)


def dims(config: Config) -> dict[str, int]:
    """The sizes that tensor shapes are written in."""
    return {
        "n_vocab": config.n_vocab,
        "n_embd": config.n_embd,
        "n_ff": config.n_ff,
        "head_dim": config.head_dim,
        "n_q": config.n_head * config.head_dim,
        "n_k": config.n_head_kv * config.head_dim,
        "n_v": config.n_head_kv * config.head_dim_v,
        "n_attn": config.n_head * config.head_dim_v,
        "n_rope_freq": config.rope_dims // 2,
    }


def check_tensors(gguf: GGUF, config: Config) -> tuple[frozenset[str], tuple[str, ...]]:
    """Compare a file's tensor table with the rows.

    Returns ``(Config.optional, Config.ignored)``. Raises FileError, naming the tensor, where one is
    missing, is in some layers only, or has another shape.
    """
    size = dims(config)
    known: set[str] = set()
    optional: set[str] = set()

    def check(name: str, row: TensorRow, needed: bool) -> None:
        shape = tuple(size[word] for word in row.shape)
        tensor = gguf.tensors.get(name)
        if tensor is None:
            if needed:
                raise FileError(
                    "the tensor is missing",
                    path=gguf.path,
                    where=name,
                    expected=f"shape {list(shape)}",
                )
            return
        if tensor.shape != shape:
            raise FileError(
                f"shape {list(tensor.shape)}",
                path=gguf.path,
                where=name,
                expected=f"{list(shape)} ({', '.join(row.shape)})",
            )
        known.add(name)
        if row.optional:
            optional.add(row.name)

    for row in MODEL_TENSORS:
        check(row.name, row, needed=not row.optional)
    for row in LAYER_TENSORS:
        # an optional tensor that layer 0 has is needed in every layer, and the other way round
        names = [f"blk.{i}.{row.name}" for i in range(config.n_layer)]
        needed = not row.optional or row.name in config.arch.needs
        needed = needed or any(name in gguf.tensors for name in names)
        for name in names:
            check(name, row, needed)
    return frozenset(optional), tuple(name for name in gguf.tensors if name not in known)


def layer_window(config: Config, i: int) -> int:
    """How many tokens layer ``i`` sees, the current one included; 0: all of them."""
    return config.sliding_window if config.local_layers[i] else 0


def layer_rope(config: Config, i: int) -> int:
    """Which of the two rope tables layer ``i`` reads: 0 global, 1 local (layers with a window)."""
    return int(config.local_layers[i])


def rope_frequencies(config: Config, local: bool) -> tuple[npt.NDArray[np.float64], float]:
    """Angle per position of each rotated pair, and what cos and sin are multiplied by.

    Returns ``(inv_freq [rope_dims / 2], attn_factor)``. Scaling (linear, YaRN, Llama 3's factors)
    stretches the global layers only: one with a window never looks farther than in training.
    """
    pair = np.arange(config.rope_dims // 2, dtype=np.float64)
    if local:
        return config.rope_base_local ** (-2.0 * pair / config.rope_dims), 1.0
    inv_freq = config.rope_base ** (-2.0 * pair / config.rope_dims)
    if config.rope_factors is not None:
        inv_freq = inv_freq / np.asarray(config.rope_factors, dtype=np.float64)
    kept = np.zeros_like(inv_freq)  # the share of each pair that is not stretched
    attn_factor = config.rope_attn_factor
    if config.rope_scaling == "yarn" and config.yarn_ext_factor != 0.0:
        low, high = _yarn_range(config)
        ramp = np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
        kept = (1.0 - ramp) * config.yarn_ext_factor
        # YaRN (arXiv 2309.00071, eq. 22): attention over stretched positions needs a cooler softmax
        attn_factor *= 1.0 + 0.1 * math.log(max(1.0, config.rope_scale))
    return inv_freq * (kept + (1.0 - kept) / config.rope_scale), attn_factor


def _yarn_range(config: Config) -> tuple[float, float]:
    """The pairs that turn ``beta_fast`` and ``beta_slow`` times within the original context."""

    def pair_of(n_turns: float) -> float:
        turns = config.n_ctx_orig / (n_turns * 2.0 * math.pi)
        return config.rope_dims * math.log(turns) / (2.0 * math.log(config.rope_base))

    low = max(0, math.floor(pair_of(config.yarn_beta_fast)))
    high = min(config.rope_dims - 1, math.ceil(pair_of(config.yarn_beta_slow)))
    return low, high
