"""Published measurements on hardware, by others, to compare the counts with."""

from __future__ import annotations

from bench.kernel_study.rows import VecDotF16
from bench.kernel_study.spec import Study

# vec_dot_f16 of llama.cpp on one core of a Banana Pi BPI-F3 (SpacemiT X60 at 1.6 GHz, VLEN 256),
# 1024 values, caches hot, in ns, by LMUL, unroll and barrier. Every figure is a whole number of
# ticks of a clock of 24 MHz: 7, 8 or 9 of them, so two settings one tick apart may be equal.
VEC_DOT_F16_NS = {
    (1, 1, False): 375,
    (1, 2, False): 333,
    (1, 2, True): 333,
    (1, 4, False): 333,
    (1, 4, True): 375,
    (1, 8, False): 375,
    (1, 8, True): 375,
    (2, 1, False): 375,
    (2, 2, False): 291,
    (2, 2, True): 291,
    (2, 4, False): 333,
    (2, 4, True): 333,
    (4, 1, False): 291,
    (4, 2, False): 291,
    (4, 2, True): 333,
}
X60_GHZ = 1.6


def hot_ns(spec: Study) -> int | None:
    """The published time of a setting, where there is one."""
    if isinstance(spec, VecDotF16):
        return VEC_DOT_F16_NS.get((spec.lmul, spec.unroll, spec.barrier))
    return None
