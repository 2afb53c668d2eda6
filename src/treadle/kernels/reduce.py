"""Reduction of many vectors to one value each, together."""

from __future__ import annotations

from collections.abc import Callable

from treadle.jit.language import Builder, Val


def reduce_all(k: Builder, vectors: list[Val], op: Callable[[Val, Val], Val]) -> Val:
    """Reduce the lanes of ``vectors[i]`` by ``op`` to one value, in lane i of the result. There are
    at most as many vectors as lanes.

    Two vectors are combined at a time: their lower halves side by side and their upper halves side
    by side are two full vectors, and ``op`` gives one that holds both. The order of reduction is
    the same for every vector, however many there are.
    """
    lanes = vectors[0].ty.lanes
    width = lanes  # lanes still used by one vector
    level = vectors + vectors[:1] * ((1 << (len(vectors) - 1).bit_length()) - len(vectors))
    while len(level) > 1:
        width //= 2
        lower = [at + i for at in range(0, 2 * lanes, 2 * width) for i in range(width)]
        upper = [i + width for i in lower]
        level = [
            op(k.shuffle(a, b, lower), k.shuffle(a, b, upper))
            for a, b in zip(level[::2], level[1::2], strict=True)
        ]
    whole = level[0]
    n = lanes // width
    while width > 1:
        width //= 2
        whole = op(whole, k.shuffle(whole, whole, [i ^ width for i in range(lanes)]))
    return k.shuffle(whole, whole, [i % n * (lanes // n) for i in range(lanes)])
