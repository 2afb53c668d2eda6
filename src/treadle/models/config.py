"""GGUF keys to ``Config``: every hyper-parameter a decoder needs, read once and checked.

Keys that a file lacks get llama.cpp's defaults. Nothing behind this boundary checks again:
numbers are in range, sizes divide, and every tensor that the decoder will name exists in its shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from treadle.errors import FileError, UnsupportedError
from treadle.models.archs import ARCHS, ROPES, Arch, check_tensors

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF

N_LAYER_MAX = 1024
SIZE_MAX = 1 << 24  # of any width: far above what exists, far below what overflows
ROPE_KEY = "treadle.rope"  # in place of the architecture's: weights whose rows are not reordered
WINDOW_KEY = "attention.sliding_window_pattern"
ROPE_SCALINGS = ("none", "linear", "yarn", "llama3")


@dataclass(frozen=True)
class Config:
    """The hyper-parameters of one model; sizes in elements, positions in tokens."""

    arch: Arch
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int  # divides n_head
    head_dim: int  # of queries and keys
    head_dim_v: int
    n_vocab: int  # rows of token_embd: logits per token
    n_ctx_train: int
    norm_eps: float  # of every RMS norm, the q/k norms included
    embd_scale: float  # token embeddings are multiplied by it; 1.0 mostly
    attn_scale: float  # q.k is multiplied by it
    attn_softcap: float  # c: scores become c * tanh(score / c); 0.0: off
    logit_softcap: float  # the same on the logits
    sliding_window: int  # tokens a local layer sees, the current one included; 0: no local layer
    local_layers: tuple[bool, ...]  # [n_layer]: which layers have the window
    rope_dims: int  # rotated elements of each head: even, at most head_dim; the rest pass through
    rope_base: float
    rope_base_local: float  # of the local layers
    rope_scaling: str  # "none", "linear" or "yarn"; rope_factors come on top
    rope_scale: float  # positions are divided by it; 1.0: none
    rope_attn_factor: float  # cos and sin are multiplied by it
    rope_factors: tuple[float, ...] | None  # [rope_dims / 2] of rope_freqs.weight: divide inv_freq
    n_ctx_orig: int  # YaRN: the context before it was stretched
    yarn_ext_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    optional: frozenset[str]  # names, "blk.N." cut off, of the optional tensors that the file has
    ignored: tuple[str, ...]  # tensors that the decoder does not use, none of them a layer's own

    @property
    def tied(self) -> bool:
        """Whether the token embeddings are the output matrix as well."""
        return "output.weight" not in self.optional


def load_config(gguf: GGUF) -> Config:
    """Read and check the hyper-parameters and the tensor table of a language model.

    Raises FileError, naming the key or tensor, for a number out of range, sizes that do not divide,
    a missing tensor, or one whose shape disagrees; UnsupportedError for an architecture, a mixture
    of experts, an encoder, or a rope scaling that treadle does not have.
    """
    arch = _find_arch(gguf)
    keys = _Keys(gguf, arch.name)
    _refuse_other_graphs(keys)
    if not gguf.tensors:
        raise FileError("no tensors: the file holds a vocabulary only", path=gguf.path)
    config = _read_keys(keys, arch)
    optional, ignored = check_tensors(gguf, config)
    _refuse_surplus_layers(keys, ignored, config.n_layer)
    factors = _read_rope_factors(gguf) if "rope_freqs.weight" in optional else None
    if keys.text("rope.scaling.type", "linear") == "llama3" and factors is None:
        keys.fail("rope.scaling.type", "is llama3, which needs its factors", "rope_freqs.weight")
    return replace(config, optional=optional, ignored=ignored, rope_factors=factors)


def _refuse_surplus_layers(keys: _Keys, ignored: Sequence[str], n_layer: int) -> None:
    """A model without its last layers writes nonsense, and so does one whose key says too few."""
    for name in ignored:
        layer = re.match(r"blk\.(\d+)\.", name)
        if layer and int(layer[1]) >= n_layer:
            raise FileError(
                f"is of layer {layer[1]}, and {keys.arch}.block_count is {n_layer}",
                path=keys.gguf.path,
                where=name,
                expected=f"the tensors of {n_layer} layers and no more",
            )


def _find_arch(gguf: GGUF) -> Arch:
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise FileError(
            "is missing" if name is None else f"is {name!r}",
            path=gguf.path,
            where="general.architecture",
            expected="the name of an architecture",
        )
    if name not in ARCHS:
        meant = next((arch for arch in ARCHS if _is_slip(name, arch)), None)
        hint = f"; did its writer mean {meant}?" if meant else ""
        raise UnsupportedError(
            f"{gguf.path}: architecture {name!r:.80}: treadle has {', '.join(ARCHS)}{hint}"
        )
    asked = gguf.metadata.get(ROPE_KEY)
    if asked is None:
        return ARCHS[name]
    for rope in ROPES:
        if rope == asked:
            return replace(ARCHS[name], rope=rope)
    expected = " or ".join(ROPES)
    raise FileError(f"is {asked!r}", path=gguf.path, where=ROPE_KEY, expected=expected)


def _is_slip(name: str, arch: str) -> bool:
    """Whether ``name`` is ``arch`` misspelt: letters' case, a sign, a letter lost or swapped.

    A number more or less, or a letter more, is no slip but another architecture: gemma, gemma3n
    and mllama all exist.
    """
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    if re.sub(r"\D", "", plain) != re.sub(r"\D", "", arch):
        return False
    cut = range(len(arch))
    lost = {arch[:i] + arch[i + 1 :] for i in cut}
    swapped = {arch[:i] + arch[i : i + 2][::-1] + arch[i + 2 :] for i in cut}
    return plain == arch or plain in lost | swapped


def _refuse_other_graphs(keys: _Keys) -> None:
    name, path = keys.arch, keys.gguf.path
    have = f"treadle has dense decoders only ({', '.join(ARCHS)})"
    n_expert = keys.integer("expert_count", 0, lo=0)
    if n_expert or any("_exps." in t or "ffn_gate_inp." in t for t in keys.gguf.tensors):
        raise UnsupportedError(f"{path}: {name} with a mixture of {n_expert} experts: {have}")
    if not keys.flag("attention.causal", True):
        raise UnsupportedError(f"{path}: {name} with attention both ways (an encoder): {have}")


def _read_keys(keys: _Keys, arch: Arch) -> Config:
    """All that the keys say; what the tensors say (the last three fields) is left empty."""
    n_layer = keys.integer("block_count", lo=1, hi=N_LAYER_MAX)
    n_embd = keys.integer("embedding_length", lo=1, hi=SIZE_MAX)
    n_head = keys.per_layer("attention.head_count", n_layer)
    n_head_kv = keys.per_layer("attention.head_count_kv", n_layer, n_head)
    if n_head % n_head_kv:
        keys.fail("attention.head_count_kv", f"{n_head_kv} does not divide {n_head} heads")
    if n_embd % n_head and not keys.has("attention.key_length"):
        keys.fail("attention.head_count", f"{n_head} does not divide embedding_length {n_embd}")
    head_dim = keys.integer("attention.key_length", n_embd // n_head, lo=1, hi=SIZE_MAX)
    n_ctx_train = keys.integer("context_length", lo=1, hi=1 << 31)
    window = keys.integer("attention.sliding_window", 0, lo=0, hi=1 << 31)
    windowed = bool(window) and (arch.window_period > 0 or keys.has(WINDOW_KEY))
    local = _local_layers(keys, arch, n_layer) if windowed else ()
    width = n_embd / n_head if n_layer in arch.width_scaled else head_dim
    return Config(
        arch=arch,
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=keys.per_layer("feed_forward_length", n_layer),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        head_dim_v=keys.integer("attention.value_length", n_embd // n_head, lo=1, hi=SIZE_MAX),
        n_vocab=_n_vocab(keys),
        n_ctx_train=n_ctx_train,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", lo=0.0, hi=1.0),
        embd_scale=math.sqrt(n_embd) if arch.embd_scale else 1.0,
        attn_scale=keys.number("attention.scale", 0.0, lo=0.0) or 1.0 / math.sqrt(width),
        attn_softcap=keys.number("attn_logit_softcapping", 0.0, lo=0.0),
        logit_softcap=keys.number("final_logit_softcapping", 0.0, lo=0.0),
        sliding_window=window if any(local) else 0,
        local_layers=local or (False,) * n_layer,
        **_rope_fields(keys, arch, head_dim, n_ctx_train),
        rope_factors=None,
        optional=frozenset(),
        ignored=(),
    )


def _rope_fields(keys: _Keys, arch: Arch, head_dim: int, n_ctx_train: int) -> dict[str, Any]:
    rope_dims = keys.integer("rope.dimension_count", head_dim, lo=2, hi=head_dim)
    if rope_dims % 2:
        keys.fail("rope.dimension_count", f"{rope_dims} is odd", "pairs")
    scaling = keys.text("rope.scaling.type", "linear")
    if scaling not in ROPE_SCALINGS:
        raise UnsupportedError(
            f"{keys.gguf.path}: {keys.arch}.rope.scaling.type {scaling!r}: "
            f"treadle has {', '.join(ROPE_SCALINGS)}"
        )
    factor = keys.number("rope.scaling.factor", 0.0, lo=0.0)
    factor = factor or keys.number("rope.scale_linear", 0.0, lo=0.0) or 1.0  # the key's old name
    if scaling in ("none", "llama3") or (scaling == "linear" and factor == 1.0):
        scaling, factor = "none", 1.0
    ext_factor = keys.number("rope.scaling.yarn_ext_factor", -1.0, lo=-1.0, hi=1.0)
    return {
        "rope_dims": rope_dims,
        "rope_base": keys.number("rope.freq_base", 10000.0, lo=1.001),
        "rope_base_local": keys.number("rope.freq_base_swa", arch.rope_base_local, lo=1.001),
        "rope_scaling": scaling,
        "rope_scale": factor,
        "rope_attn_factor": keys.number("rope.scaling.attn_factor", 1.0, lo=0.0),
        "n_ctx_orig": keys.integer(
            "rope.scaling.original_context_length", n_ctx_train, lo=1, hi=1 << 31
        ),
        "yarn_ext_factor": ext_factor if ext_factor >= 0.0 else 1.0,  # negative: not set
        "yarn_beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0, lo=1e-3),
        "yarn_beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0, lo=1e-3),
    }


def _local_layers(keys: _Keys, arch: Arch, n_layer: int) -> tuple[bool, ...]:
    """Which layers have the window: the key is a period, or one flag per layer."""
    key = WINDOW_KEY
    flags = keys.get(key)
    if isinstance(flags, Sequence) and not isinstance(flags, (str, bytes)):
        if len(flags) != n_layer or any(flag not in (0, 1) for flag in flags):
            keys.fail(key, f"has {len(flags)} entries", f"{n_layer} flags")
        return tuple(bool(flag) for flag in flags)
    period = keys.integer(key, arch.window_period, lo=0, hi=N_LAYER_MAX)
    return tuple(period == 0 or i % period < period - 1 for i in range(n_layer))


def _n_vocab(keys: _Keys) -> int:
    """Rows of the token embeddings, which the vocabulary must agree with."""
    embd = keys.gguf.tensors.get("token_embd.weight")
    if embd is None or len(embd.shape) != 2 or not 1 <= embd.shape[0] <= SIZE_MAX:
        raise FileError(
            "is missing" if embd is None else f"has shape {list(embd.shape)}",
            path=keys.gguf.path,
            where="token_embd.weight",
            expected="shape [n_vocab, n_embd]",
        )
    n_vocab = embd.shape[0]
    tokens = keys.gguf.metadata.get("tokenizer.ggml.tokens")
    n_tokens = len(tokens) if isinstance(tokens, Sequence) else None
    if n_tokens is None:
        n_tokens = keys.integer("vocab_size", n_vocab, lo=1, hi=SIZE_MAX)
    if n_tokens != n_vocab:
        raise FileError(
            f"has {n_vocab} rows",
            path=keys.gguf.path,
            where="token_embd.weight",
            expected=f"{n_tokens}, the size of the vocabulary",
        )
    return n_vocab


def _read_rope_factors(gguf: GGUF) -> tuple[float, ...]:
    tensor = gguf.tensors["rope_freqs.weight"]
    if tensor.format is None or tensor.format.block > 1:
        found = f"has ggml type {tensor.ggml_type}"
        raise FileError(found, path=gguf.path, where=tensor.name, expected="floats, such as F32")
    factors = tensor.format.dequantize_rows(tensor.data).astype(np.float64)
    if not bool(np.all(np.isfinite(factors) & (factors > 0.0))):
        found = "holds a factor that is not a positive number"
        raise FileError(found, path=gguf.path, where=tensor.name, offset=tensor.offset)
    return tuple(factors.tolist())


_REQUIRED: Any = object()


class _Keys:
    """The architecture's own keys: typed, ranged, and named in full when one is wrong."""

    def __init__(self, gguf: GGUF, arch: str) -> None:
        self.gguf = gguf
        self.arch = arch

    def fail(self, key: str, found: str, expected: str | None = None) -> NoReturn:
        raise FileError(found, path=self.gguf.path, where=f"{self.arch}.{key}", expected=expected)

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.gguf.metadata

    def get(self, key: str) -> Any:
        return self.gguf.metadata.get(f"{self.arch}.{key}")

    def integer(self, key: str, default: int = _REQUIRED, *, lo: int, hi: int = SIZE_MAX) -> int:
        value = self._value(key, default, f"an integer from {lo} to {hi}")
        if isinstance(value, bool) or not isinstance(value, int) or not lo <= value <= hi:
            self.fail(key, f"is {value!r}", f"an integer from {lo} to {hi}")
        return value

    def number(self, key: str, default: float = _REQUIRED, *, lo: float, hi: float = 1e12) -> float:
        value = self._value(key, default, f"a number from {lo:g} to {hi:g}")
        # NaN fails the comparison as well
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not lo <= value <= hi:
            self.fail(key, f"is {value!r}", f"a number from {lo:g} to {hi:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            self.fail(key, f"is {value!r}", "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default, "a string")
        if not isinstance(value, str):
            self.fail(key, f"is {value!r}", "a string")
        return value

    def per_layer(self, key: str, n_layer: int, default: int = _REQUIRED) -> int:
        """A size of at least 1, given once or as an array with one entry per layer, all equal."""
        value = self.get(key)
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            return self.integer(key, default, lo=1)
        if len(value) != n_layer:
            self.fail(key, f"has {len(value)} entries", f"{n_layer}, one per layer")
        sizes = list(value)
        if any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) for n in sizes):
            self.fail(key, "holds something else", "integers")
        if min(sizes) != max(sizes):
            raise UnsupportedError(
                f"{self.gguf.path}: {self.arch}.{key} differs between layers "
                f"(from {min(sizes)} to {max(sizes)}): treadle has decoders of equal layers only"
            )
        if not 1 <= sizes[0] <= SIZE_MAX:
            self.fail(key, f"is {sizes[0]}", f"an integer from 1 to {SIZE_MAX}")
        return int(sizes[0])

    def _value(self, key: str, default: Any, expected: str) -> Any:
        value = self.get(key)
        if value is None:
            if default is _REQUIRED:
                self.fail(key, "the key is missing", expected)
            return default
        return value
