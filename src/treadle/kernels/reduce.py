"""Reducing many vectors to one value each, all at once."""

from __future__ import annotations

from collections.abc import Callable

from treadle.jit.language import Builder, Val


def reduce_all(k: Builder, vectors: list[Val], op: Callable[[Val, Val], Val]) -> Val:
    """Lane i of the result: ``vectors[i]`` reduced by ``op``. At most as many vectors as lanes.

    All are reduced together: of two vectors, the lower half of each beside the upper half of each
    make two full ones, and ``op`` of them one that holds both. Every vector is reduced in the same
    order, however many there are.
    """
    lanes = vectors[0].ty.lanes
    width = lanes  # lanes that hold what is left of one vector
    level = vectors + vectors[:1] * ((1 << (len(vectors) - 1).bit_length()) - len(vectors))
    while len(level) > 1:
        width //= 2
        lower = [at + i for at in range(0, 2 * lanes, 2 * width) for i in range(width)]
        upper = [i + width for i in lower]
        level = [
            op(k.shuffle(a, b, lower), k.shuffle(a, b, upper))
            for a, b in zip(level[::2], level[1::2], strict=True)
        ]
    whole, n = level[0], lanes // width
    while width > 1:
        width //= 2
        whole = op(whole, k.shuffle(whole, whole, [i ^ width for i in range(lanes)]))
    return k.shuffle(whole, whole, [i % n * (lanes // n) for i in range(lanes)])
