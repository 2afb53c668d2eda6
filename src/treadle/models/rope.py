"""Rotary positions: a table's parameters, and how a file gives them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from treadle.errors import FileError, UnsupportedError

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.archs import Arch
    from treadle.models.keys import Keys

ROPE_SCALINGS = ("none", "linear", "yarn", "llama3")


@dataclass(frozen=True)
class Rope:
    """One table of rotations by position: which pairs of a head turn how fast."""

    dims: int  # rotated elements of each head: even, at most head_dim; the rest pass through
    base: float
    scaling: str = "none"  # "none", "linear" or "yarn"; factors come on top
    scale: float = 1.0  # positions are divided by it
    attn_factor: float = 1.0  # cos and sin are multiplied by it
    factors: tuple[float, ...] | None = None  # [dims / 2] of rope_freqs.weight: divide inv_freq
    n_ctx_orig: int = 0  # YaRN: the context before it was stretched
    yarn_ext_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0

    def frequencies(self) -> tuple[npt.NDArray[np.float64], float]:
        """Angle per position of each rotated pair, ``[dims / 2]``, and what cos and sin are
        multiplied by.
        """
        pair = np.arange(self.dims // 2, dtype=np.float64)
        inv_freq = self.base ** (-2.0 * pair / self.dims)
        if self.factors is not None:
            inv_freq = inv_freq / np.asarray(self.factors, dtype=np.float64)
        kept = np.zeros_like(inv_freq)  # the share of each pair that is not stretched
        attn_factor = self.attn_factor
        if self.scaling == "yarn" and self.yarn_ext_factor != 0.0:
            low, high = self._yarn_range()
            ramp = np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
            kept = (1.0 - ramp) * self.yarn_ext_factor
            # YaRN (arXiv 2309.00071, eq. 22): attention over stretched positions needs a cooler
            # softmax.
            attn_factor *= 1.0 + 0.1 * math.log(max(1.0, self.scale))
        return inv_freq * (kept + (1.0 - kept) / self.scale), attn_factor

    def _yarn_range(self) -> tuple[float, float]:
        """The pairs that turn ``beta_fast`` and ``beta_slow`` times in the original context."""

        def pair_of(n_turns: float) -> float:
            turns = self.n_ctx_orig / (n_turns * 2.0 * math.pi)
            return self.dims * math.log(turns) / (2.0 * math.log(self.base))

        low = max(0, math.floor(pair_of(self.yarn_beta_fast)))
        high = min(self.dims - 1, math.ceil(pair_of(self.yarn_beta_slow)))
        return low, high


def read_ropes(keys: Keys, arch: Arch, head_dim: int, n_ctx_train: int) -> tuple[Rope, Rope]:
    """The rope of layers that see everything, and of those with a window: scaling (linear, YaRN,
    Llama 3's factors) stretches the first alone, for the others never look farther than in
    training.
    """
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
    factors = _rope_factors(keys.gguf)
    if keys.text("rope.scaling.type", "linear") == "llama3" and factors is None:
        keys.fail("rope.scaling.type", "is llama3, which needs its factors", "rope_freqs.weight")
    ext_factor = keys.number("rope.scaling.yarn_ext_factor", -1.0, lo=-1.0, hi=1.0)
    full = Rope(
        dims=rope_dims,
        base=keys.number("rope.freq_base", 10000.0, lo=1.001),
        scaling=scaling,
        scale=factor,
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0, lo=0.0),
        factors=factors,
        n_ctx_orig=keys.integer(
            "rope.scaling.original_context_length", n_ctx_train, lo=1, hi=1 << 31
        ),
        yarn_ext_factor=ext_factor if ext_factor >= 0.0 else 1.0,  # negative: not set
        yarn_beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0, lo=1e-3),
        yarn_beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0, lo=1e-3),
    )
    base_local = keys.number("rope.freq_base_swa", arch.rope_base_local, lo=1.001)
    return full, Rope(rope_dims, base_local)


def _rope_factors(gguf: GGUF) -> tuple[float, ...] | None:
    tensor = gguf.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.format is None or tensor.format.block > 1:
        found = f"has ggml type {tensor.ggml_type}"
        raise FileError(found, path=gguf.path, where=tensor.name, expected="floats, such as F32")
    factors = tensor.format.dequantize_rows(tensor.data).astype(np.float64)
    if not bool(np.all(np.isfinite(factors) & (factors > 0.0))):
        found = "holds a factor that is not a positive number"
        raise FileError(found, path=gguf.path, where=tensor.name, offset=tensor.offset)
    return tuple(factors.tolist())
