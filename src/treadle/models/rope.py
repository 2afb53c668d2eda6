"""Rotary position embeddings (rope): the parameters of a table, and their keys in a file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from treadle.base.fast_dataclass import dataclass
from treadle.errors import FileError, UnsupportedError
from treadle.files.keys import SIZE_MAX
from treadle.models.archs import LOCAL_BASE, ROPE_HALVED, YARN_TRUNCATE

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.keys import ArchMetadata

ROPE_SCALINGS = ("none", "linear", "yarn", "llama3", "longrope")
FACTORS = "rope_freqs.weight"
SHORT = "rope_factors_short.weight"
LONG = "rope_factors_long.weight"
# treadle's own key for transformers' "dynamic" scaling, whose base grows with sequences longer than
# the original context. GGUF has none; treadle then limits the context to the original one.
DYNAMIC = "treadle.rope.dynamic"


@dataclass(frozen=True)
class Rope:
    """One rope table: the rotation frequencies of a head's pairs, and their scaling."""

    dims: int  # rotated elements of each head: even, at most head_dim; the rest pass through
    base: float
    scaling: str = "none"  # "none", "linear" or "yarn"; factors are applied in addition
    scale: float = 1.0  # positions are divided by it
    attn_factor: float = 1.0  # cos and sin are multiplied by it
    factors: tuple[float, ...] | None = None  # [dims / 2] of rope_freqs.weight: divide inv_freq
    n_factors: int = 0  # factors in the file if it has some for unrotated pairs; 0: dims / 2
    long_factors: tuple[float, ...] | None = None  # used instead in contexts above n_ctx_orig
    n_ctx_orig: int = 0  # the context length before it was extended
    yarn_ext_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_truncate: bool = True  # the bounds of the interpolation ramp are rounded to whole pairs
    yarn_log_multiplier: float = 0.0  # of the logarithm in YaRN's own factor of cos and sin
    temperature: float = 0.0  # queries are scaled up by it per e-fold of n_ctx_orig
    ahead: int = 0  # positions by which that scaling starts early
    smooth: bool = False  # it grows with each position, not with each n_ctx_orig of them
    dynamic: bool = False  # unsupported scaling above n_ctx_orig: the context is limited to it

    @property
    def n_pairs(self) -> int:
        """Number of pairs for which the file has factors."""
        return self.n_factors or self.dims // 2

    def has_long(self, n_ctx: int) -> bool:
        """Return whether a context of ``n_ctx`` tokens uses the long factors."""
        return self.long_factors is not None and n_ctx > self.n_ctx_orig

    def factors_in(self, n_ctx: int) -> tuple[float, ...] | None:
        """Return the factors for a context of ``n_ctx`` tokens, None for none. In transformers they
        depend on a sequence's length; here they do not, because its cached pages would become
        invalid as it grows.
        """
        return self.long_factors if self.has_long(n_ctx) else self.factors

    def frequencies(self, n_ctx: int = 0) -> tuple[npt.NDArray[np.float64], float]:
        """Return the angle per position of each rotated pair, f64 ``[dims / 2]``, and the factor by
        which cosines and sines are multiplied, for a context of ``n_ctx`` tokens.
        """
        pair = np.arange(self.dims // 2, dtype=np.float64)
        inv_freq = self.base ** (-2.0 * pair / self.dims)
        if (factors := self.factors_in(n_ctx)) is not None:
            inv_freq = inv_freq / np.asarray(factors, dtype=np.float64)
        kept = np.zeros_like(inv_freq)  # the share of each frequency that is not scaled
        attn_factor = self.attn_factor
        if self.scaling == "yarn" and self.yarn_ext_factor != 0.0:
            low, high = self._yarn_range()
            ramp = np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
            kept = (1.0 - ramp) * self.yarn_ext_factor
            # YaRN (arXiv 2309.00071, eq. 22): attention over scaled positions needs a lower softmax
            # temperature.
            log = 0.1 * math.log(max(1.0, self.scale))
            attn_factor *= (1.0 + log) / (1.0 + self.yarn_log_multiplier * log)
        return inv_freq * (kept + (1.0 - kept) / self.scale), attn_factor

    def gains(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return for each position the factor of cosines and sines by which queries are scaled
        (temperature), f64.
        """
        if self.smooth:
            share = (positions + self.ahead) / max(1, self.n_ctx_orig)
            return np.asarray(1.0 + self.temperature * np.log(np.maximum(share, 1.0)))
        turns = (positions + self.ahead) // max(1, self.n_ctx_orig)
        return np.asarray(1.0 + self.temperature * np.log(1.0 + turns))

    def _yarn_range(self) -> tuple[float, float]:
        """Return the first and last pair of YaRN's interpolation ramp: those that turn
        ``yarn_beta_fast`` and ``yarn_beta_slow`` times in the original context.
        """

        def pair_of(n_turns: float) -> float:
            turns = self.n_ctx_orig / (n_turns * 2.0 * math.pi)
            return self.dims * math.log(turns) / (2.0 * math.log(self.base))

        low = pair_of(self.yarn_beta_fast)
        high = pair_of(self.yarn_beta_slow)
        if self.yarn_truncate:
            low = math.floor(low)
            high = math.ceil(high)
        return max(0, low), min(self.dims - 1, high)


def still(temperature: float, every: int, ahead: int = 0, *, smooth: bool = False) -> Rope:
    """Return a table of one unrotated pair, whose cosine is only the query temperature: it grows by
    ``temperature`` per e-fold of ``every`` positions. ``ahead``, ``smooth``: as in ``Rope``.
    """
    return Rope(
        2,
        1.0,
        factors=(math.inf,),
        n_ctx_orig=every,
        temperature=temperature,
        ahead=ahead,
        smooth=smooth,
    )


def read_ropes(keys: ArchMetadata, head_dim: int, n_ctx_train: int) -> tuple[Rope, ...]:
    """Return the rope table of all layers; if layers with a window have a base of their own, the
    table of the other layers, then theirs. Scaling (linear, YaRN, factors) applies to the first
    table only, since layers with a window never see more tokens than in training.

    Raises FileError, UnsupportedError.
    """
    most = rope_dims = keys.integer("rope.dimension_count", head_dim, lo=2, hi=head_dim)
    if halved := keys.flag(ROPE_HALVED, False):
        rope_dims //= 2
    if rope_dims % 2:
        keys.fail("rope.dimension_count", f"{rope_dims} is odd", "pairs")
    scaling = keys.text("rope.scaling.type", "linear")
    if scaling not in ROPE_SCALINGS:
        raise UnsupportedError(
            f"{keys.gguf.path}: {keys.arch}.rope.scaling.type {scaling!r}: "
            f"treadle supports {', '.join(ROPE_SCALINGS)}"
        )
    factor = keys.number("rope.scaling.factor", 0.0, lo=0.0)
    factor = factor or keys.number("rope.scale_linear", 0.0, lo=0.0) or 1.0  # the key's old name
    factors, short, long = (_rope_factors(keys.gguf, name) for name in (FACTORS, SHORT, LONG))
    if scaling == "llama3" and factors is None:
        keys.fail("rope.scaling.type", "is llama3, but its factors are missing", FACTORS)
    if (short is None) != (long is None) or (scaling == "longrope" and long is None):
        keys.fail("rope.scaling.type", f"is {scaling}", f"both {SHORT} and {LONG}")
    if scaling in ("none", "llama3", "longrope") or (scaling == "linear" and factor == 1.0):
        scaling = "none"
        factor = 1.0
    n_factors = most // 2 if halved and factors else 0
    if factors and halved:
        factors = factors[: rope_dims // 2]
    ext_factor = keys.number("rope.scaling.yarn_ext_factor", -1.0, lo=-1.0, hi=1.0)
    base = keys.number("rope.freq_base", 10000.0, lo=1.001)
    if alpha := keys.number("rope.scaling.alpha", 0.0, lo=0.0, hi=1e9):  # Hunyuan's
        base *= alpha ** (rope_dims / max(rope_dims - 2, 1))
    full = Rope(
        dims=rope_dims,
        base=base,
        scaling=scaling,
        scale=factor,
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0, lo=0.0),
        factors=short or factors,
        n_factors=n_factors,
        long_factors=long,
        n_ctx_orig=keys.integer(
            "rope.scaling.original_context_length", n_ctx_train, lo=1, hi=1 << 31
        ),
        yarn_ext_factor=ext_factor if ext_factor >= 0.0 else 1.0,  # negative: not set
        yarn_beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0, lo=1e-3),
        yarn_beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0, lo=1e-3),
        yarn_truncate=keys.flag(YARN_TRUNCATE, True),
        yarn_log_multiplier=keys.number("rope.scaling.yarn_log_multiplier", 0.0, lo=0.0),
        dynamic=keys.gguf.metadata.get(DYNAMIC) is True,
    )
    if keys.get(LOCAL_BASE) is None:
        return (full,)
    head_dim = keys.integer("attention.key_length_swa", head_dim, lo=2, hi=SIZE_MAX)
    dims = keys.integer("rope.dimension_count_swa", min(most, head_dim), lo=2, hi=head_dim)
    if dims % 2:
        keys.fail("rope.dimension_count_swa", f"{dims} is odd", "pairs")
    own = keys.get(LOCAL_BASE) != 0  # 0 means the base of the others
    return full, Rope(dims, keys.number(LOCAL_BASE, lo=1.001) if own else full.base)


def _rope_factors(gguf: GGUF, name: str) -> tuple[float, ...] | None:
    tensor = gguf.tensors.get(name)
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
