"""Rotary position embeddings (rope): the parameters of a table (``rope_keys.py`` reads
them).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fast_classes import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

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
    temperature: float = 0.0  # queries are scaled up by it per e-fold of n_ctx_orig; see ``gains``
    ahead: int = 0  # positions by which that scaling starts early
    smooth: bool = False  # the scaling grows with each position, not with each n_ctx_orig of them
    dynamic: bool = False  # unsupported scaling above n_ctx_orig: the context is limited to it

    @property
    def n_pairs(self) -> int:
        """Number of factors that the file has: one per rotated pair, or more (``n_factors``)."""
        return self.n_factors or self.dims // 2

    def has_long(self, n_ctx: int) -> bool:
        """Return whether a context of ``n_ctx`` tokens uses ``long_factors`` in place of
        ``factors``.
        """
        return self.long_factors is not None and n_ctx > self.n_ctx_orig

    def factors_in(self, n_ctx: int) -> tuple[float, ...] | None:
        """Return the factors that divide frequencies, one per rotated pair, in a context of
        ``n_ctx`` tokens; None if the table has none. In transformers they depend on a sequence's
        length; here they do not, because its cached pages would become invalid as it grows.
        """
        return self.long_factors if self.has_long(n_ctx) else self.factors

    def frequencies(self, n_ctx: int = 0) -> tuple[npt.NDArray[np.float64], float]:
        """Return the angle per position of each rotated pair, f64 ``[dims / 2]``, and the factor by
        which cosines and sines are multiplied, for a context of ``n_ctx`` tokens (0: one so short
        that no factors for long contexts apply).
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
        """Return for each position the factor by which queries are scaled there (temperature), f64
        ``[n]``; it is applied to their cosines and sines.
        """
        if self.smooth:
            share = (positions + self.ahead) / max(1, self.n_ctx_orig)
            return np.asarray(1.0 + self.temperature * np.log(np.maximum(share, 1.0)))
        turns = (positions + self.ahead) // max(1, self.n_ctx_orig)
        return np.asarray(1.0 + self.temperature * np.log(1.0 + turns))

    def _yarn_range(self) -> tuple[float, float]:
        """Return the first and last pair of YaRN's interpolation ramp, as numbers that need not be
        whole: those that turn ``yarn_beta_fast`` and ``yarn_beta_slow`` times in the original
        context.
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


def scale_only(temperature: float, every: int, ahead: int = 0, *, smooth: bool = False) -> Rope:
    """Return a table that scales queries and rotates nothing: its only pair has angle 0, and the
    query temperature as its cosine. That grows by ``temperature`` per e-fold of ``every``
    positions. ``ahead``, ``smooth``: as in ``Rope``.
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
