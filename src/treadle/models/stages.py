"""Pipeline stages: consecutive parts of a model's layers, one for each engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from treadle.errors import TreadleError, UnsupportedError
from treadle.models.graphs import GRAPHS

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.config import Config


def split(gguf: GGUF, config: Config, n: int) -> list[range]:
    """Split the layers into ``n`` ranges of about equal bytes of weights; the output matrix counts
    as part of the last layer. Raises TreadleError if there are fewer than ``n`` layers.
    """
    if not 0 < n <= config.n_layer:
        raise TreadleError(f"{n} stages: the model has {config.n_layer} layers")
    sizes = [0] * config.n_layer
    for name, tensor in gguf.tensors.items():
        if name.startswith("blk."):
            layer = int(name.split(".")[1])
            if layer < config.n_layer:
                sizes[layer] += tensor.n_bytes
    head = "token_embd.weight" if config.tied else "output.weight"
    sizes[-1] += gguf.tensors[head].n_bytes
    return split_evenly(sizes, n)


def split_evenly(sizes: Sequence[int], n: int) -> list[range]:
    """Split ``sizes`` into ``n`` non-empty ranges of indices; range ``i``, from 1, ends where the
    running sum is nearest to ``i / n`` of the total.
    """
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    ends = [0]
    for i in range(1, n):
        share = sums[-1] * i / n
        possible = range(ends[-1] + 1, len(sizes) - (n - i) + 1)
        ends.append(min(possible, key=lambda end: abs(sums[end] - share)))
    ends.append(len(sizes))
    return [range(start, end) for start, end in pairwise(ends)]


def staged(config: Config, layers: range) -> Config:
    """Return the config of the stage that computes ``layers``. Raises UnsupportedError if models of
    this graph cannot be split, or if a layer reads keys and values of one in another stage.
    """
    graph = config.arch.graph
    if "stream" not in GRAPHS[graph].outputs:
        raise UnsupportedError(f"models of the graph {graph!r} cannot be split into stages")
    for i in layers:
        other = config.layers[i].kv_from
        if other not in layers:
            raise UnsupportedError(
                f"L{i} reads the keys and values of L{other}, which is in another stage"
            )
    return replace(config, stage=layers)
