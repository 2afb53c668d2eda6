"""Nanbeige 4.2: a decoder whose layers run several times, with the same weights; each time has its
own keys and values.

::

    x = embed(ids)
    for each loop:
        x = layer(x)                     each of the file's layers
        x = norm(x)                      with the weights of the last norm, unless the file says no
    logits = linear(norm(x))

A config has a record for each layer of each loop: those of loop j follow those of loop j - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER, first, halves_of
from treadle.models.layer import build_layer
from treadle.models.ops import TensorSlice
from treadle.models.structure import Graph, TensorRow, layer_of

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows, TensorName

LOOPS = "num_loops"
SKIPS_NORM = "skip_loop_final_norm"
N_LOOPS_MOST = 64


class LoopedOps:
    """A wrapper of ``ops`` for graphs whose layers run several times: names of a layer's weights
    are replaced by those of the file's layer. ``of(i)`` returns the number of the file's layer
    whose weights layer ``i`` uses. All other ops are those of ``ops``.
    """

    def __init__(self, ops: Ops, of: Callable[[int], int]) -> None:
        self._ops = ops
        self._of = of

    def __getattr__(self, word: str) -> Any:
        return getattr(self._ops, word)

    def _own(self, name: TensorName) -> TensorName:
        if isinstance(name, TensorSlice):
            return TensorSlice(stored_name(name.whole, self._of), name.first, name.n)
        return stored_name(name, self._of)

    def has(self, name: str) -> bool:
        return self._ops.has(stored_name(name, self._of))

    def norm(self, label: str, x: Rows, weight: str, **settings: Any) -> Rows:
        return self._ops.norm(label, x, stored_name(weight, self._of), **settings)

    def linears(self, label: str, x: Rows, weights: Sequence[TensorName]) -> list[Rows]:
        return self._ops.linears(label, x, [self._own(name) for name in weights])

    def linear(self, label: str, x: Rows, weight: TensorName) -> Rows:
        return self._ops.linear(label, x, self._own(weight))


def stored_name(name: str, of: Callable[[int], int]) -> str:
    """Return the name in the file of the tensor ``name``, which may belong to a layer of any loop.
    ``of(i)``: the file's layer whose weights layer ``i`` uses.
    """
    i, rest = layer_of(name)
    return name if i < 0 or of(i) == i else f"blk.{of(i)}.{rest}"


def build(g: Ops) -> Rows:
    """Build the layers of all loops, and the norms between loops; return the states after the
    last.
    """
    config = g.config
    n = config.n_layer // config.n_loops
    looped: Any = LoopedOps(g, lambda i: i % n)
    x = first(g)
    for i in config.stage_layers:
        x = build_layer(looped, i, g.layer(i, x), *halves_of(config.layers[i]))
        x = g.steer(f"L{i}.control", x, layer=i)
        if config.loop_norm and (i + 1) % n == 0 and i + 1 < config.n_layer:
            x = g.norm(f"L{i}.loop_norm", x, "output_norm")
    return g.layer(config.stage_layers.stop, x)


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with a record for each layer of each loop."""
    config = reading.read(keys, arch)
    n_loops = keys.integer(LOOPS, 1, lo=1, hi=N_LOOPS_MOST)
    n = config.n_layer
    layers = tuple(
        replace(layer, kv_from=j * n + layer.kv_from)
        for j in range(n_loops)
        for layer in config.layers
    )
    norm = not keys.flag(SKIPS_NORM, False)
    return replace(config, layers=layers, n_loops=n_loops, loop_norm=norm)


class LoopedGraph(Graph):
    """A graph with the tensors of the file's layers, each once, not once per loop."""

    def tensors(self, config: Config) -> Iterator[tuple[TensorRow, dict[str, tuple[int, ...]]]]:
        n = config.n_layer // config.n_loops
        return super().tensors(replace(config, layers=config.layers[:n]))


# No "stream": layers of several stages would need the same weights.
_OUTPUTS = {name: build for name, build in DECODER.outputs.items() if name != "stream"}
NANBEIGE = LoopedGraph(
    build=build,
    outputs=_OUTPUTS,
    rows=DECODER.rows,
    sizes=DECODER.sizes,
    sublayers=halves_of,
    read=read,
    parts=DECODER.parts,
)
