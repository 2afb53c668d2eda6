"""What a graph is made of: a model's own tensors, and sublayers with theirs.

A *graph* is one way for data to flow, a file in ``graphs/``; a *sublayer* is one half of a layer, a
file in ``mixers/`` (what tokens learn of each other) or ``ffns/`` (what each makes of it). Each
declares the tensors that it reads and the sizes that their shapes are written in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, TypeVar

from treadle.base.fast_dataclass import dataclass
from treadle.errors import FileError, UnsupportedError
from treadle.models.cache_spec import PoolSpec, StateSpec

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows

# Matrices that are read by row, met by head, or no product's at all.
UNSCALED = (
    *("token_embd", "per_layer_token_embd", "position_embd", "token_types"),
    *("attn_k_b", "attn_v_b", "attn_kv_b", "ssm_conv1d", "shortconv.conv"),
    *("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"),
)

Sizes = Mapping[str, int]
Made = TypeVar("Made")


@dataclass(frozen=True)
class TensorRow:
    """One tensor's name and shape, numpy order; the shape's words are keys of ``sizes``."""

    name: str  # in a sublayer, behind "blk.N."
    shape: tuple[str, ...]
    optional: bool = False


def with_bias(stem: str, *shape: str, optional: bool = False) -> tuple[TensorRow, TensorRow]:
    """A weight, and the bias that some families add to each of its rows."""
    bias = TensorRow(f"{stem}.bias", shape[:1], optional=True)
    return TensorRow(f"{stem}.weight", shape, optional), bias


@dataclass(frozen=True, eq=False)
class Sublayer:
    """One half of a layer; how it stands on the states says ``models/layer.py``.

    label: of its steps, behind the layer's number.
    before, after, behind: stems of its norms: of what it reads, of what it gives, and of the sum
        of that and the states.
    again: of a norm of one more sum, of what ``behind`` gives and the states before.
    build: ``build(g, i, h)`` gives what is added to the states, made of ``h``, the normed ones.
    rows: its tensors, those of the norms included, of each layer that has it.
    sizes: the words of their shapes; those of the graph are there as well.
    memory: what it remembers of a sequence from one run to the next, with ``layers`` left empty.
    unread: tensors that sound files have in such a layer all the same, and nothing reads.
    """

    label: str
    before: str
    after: str
    behind: str
    build: Callable[[Ops, int, Rows], Rows]
    rows: tuple[TensorRow, ...]
    sizes: Callable[[Layer], Sizes]
    memory: Callable[[Layer], tuple[PoolSpec | StateSpec, ...]] = lambda layer: ()
    again: str = ""
    unread: frozenset[str] = frozenset()


class LateConstants(dict[str, Made]):
    """A package's constants by name; ``late`` ones, ``module.CONSTANT``, are imported when a model
    has them.
    """

    def __init__(self, package: str, here: dict[str, Made], late: dict[str, str]) -> None:
        super().__init__(here)
        self._package, self._late = package, late

    def __missing__(self, name: str) -> Made:
        module, _, constant = self._late[name].partition(".")
        made: Made = getattr(import_module(f"{self._package}.{module}"), constant)
        self[name] = made
        return made

    def every(self) -> list[Made]:
        """All there are, late ones included."""
        return [self[name] for name in dict.fromkeys((*self, *self._late))]


@dataclass(frozen=True)
class Graph:
    """One way for data to flow.

    build: the layers, from the batch's tokens to their states.
    outputs: what plans make of these, by name.
    rows, sizes: its tensors outside layers.
    sublayers: a layer's mixer and its FFN, or the one half that it has.
    read: a file's keys as a Config; raises FileError and UnsupportedError.
    parts: the sublayers of all models that it has, where these are of several kinds.
    """

    build: Callable[[Ops], Rows]
    outputs: Mapping[str, Callable[[Ops, Rows], None]]
    rows: tuple[TensorRow, ...]
    sizes: Callable[[Config], Sizes]
    sublayers: Callable[[Layer], tuple[Sublayer, ...]]
    read: Callable[[ArchMetadata, Arch], Config]
    parts: Callable[[], Iterable[Sublayer]] = tuple

    def tensors(self, config: Config) -> Iterator[tuple[TensorRow, dict[str, tuple[int, ...]]]]:
        """Every row with the shapes of its tensors by their names, in a file's order: a sublayer's
        row has one in each layer of that kind.
        """
        sizes = self.sizes(config)
        for row in self.rows:
            yield row, {row.name: _shape(row, sizes)}
        kinds: dict[Sublayer, dict[int, Sizes]] = {}
        for i, layer in enumerate(config.layers):
            for kind in self.sublayers(layer):
                kinds.setdefault(kind, {})[i] = {**sizes, **kind.sizes(layer)}
        for kind, layers in kinds.items():
            for row in kind.rows:
                yield row, {f"blk.{i}.{row.name}": _shape(row, s) for i, s in layers.items()}

    def unread(self, config: Config, name: str) -> bool:
        """Whether sound files have the tensor where nothing reads it.

        It is one of a layer that predicts further tokens, which few runs have use for, or some such
        layer of the model has it, ``Sublayer.unread``.
        """
        i, stem = layer_of(name)
        if i >= config.n_layer:
            return True
        return i >= 0 and any(stem in kind.unread for kind in self.sublayers(config.layers[i]))

    def pools(self, config: Config) -> tuple[PoolSpec | StateSpec, ...]:
        """What the layers remember: those that are alike share a pool, and the pools of layers
        that see everything come first.
        """
        alike: dict[PoolSpec | StateSpec, list[int]] = {}
        for i, layer in enumerate(config.layers):
            for kind in self.sublayers(layer):
                for memory in kind.memory(layer) if layer.kv_from == i else ():
                    alike.setdefault(memory, []).append(i)
        pools: list[PoolSpec | StateSpec] = []
        for spec in sorted(alike, key=lambda spec: isinstance(spec, PoolSpec) and spec.window > 0):
            n = sum(pool.name.startswith(spec.name) for pool in pools)
            name = f"{spec.name}_{n}" if n else spec.name
            pools.append(replace(spec, name=name, layers=tuple(alike[spec])))
        return tuple(pools)


def layer_of(name: str) -> tuple[int, str]:
    """``blk.3.ffn_up.weight`` is (3, "ffn_up.weight"); outside layers, the layer is -1."""
    layer = re.match(r"blk\.(\d+)\.", name)
    return (int(layer[1]), name[layer.end() :]) if layer else (-1, name)


def _shape(row: TensorRow, sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes[word] for word in row.shape)


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without ones in front, which some converters write and others do not."""
    n = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return shape[n:]


def needed_tensors(
    graph: Graph, config: Config, names: Container[str]
) -> Iterator[tuple[TensorRow, str, tuple[int, ...]]]:
    """Each tensor that a file with tensors of these names must have: its row, name and shape.

    One that may be absent is in every layer of its kind, or in none: a file that has it in some of
    them only is damaged. What ``Arch.lacks`` names is in every layer of all kinds, or in none; with
    "blk.N." in front that layer alone may be without, and without the bias of such a weight.
    """
    arch, rows = config.arch, list(graph.tensors(config))
    some = {row.name for row, places in rows if any(name in names for name in places)}
    for row, places in rows:
        spare = row.name in arch.lacks and row.name not in some
        if row.optional and row.name not in arch.needs:
            spare = not any(name in names for name in places)
        for name, shape in () if spare else places.items():
            weight = name.removesuffix(".bias") + ".weight" if name.endswith(".bias") else name
            if name in names or weight not in arch.lacks:
                yield row, name, shape


def check_tensors(
    gguf: GGUF, graph: Graph, config: Config
) -> tuple[frozenset[str], tuple[str, ...]]:
    """Compare a file's tensor table with the rows.

    Returns ``(Config.optional, Config.ignored)``. Raises FileError, naming the tensor, where one is
    missing, is in some only of the layers that may have it, has another shape, or is of another
    kind of layer than the one it is in.
    """
    known: set[str] = set()
    optional: set[str] = set()
    for row, name, shape in needed_tensors(graph, config, gguf.tensors):
        if name not in gguf.tensors:
            what, expected = "the tensor is missing", f"shape {list(shape)}"
        elif _bare(gguf.tensors[name].shape) != _bare(shape):
            what = f"shape {list(gguf.tensors[name].shape)}"
            expected = f"{list(shape)} ({', '.join(row.shape)})"
        else:
            known.add(name)
            if row.optional or row.name in config.arch.lacks:
                optional.add(row.name)
            continue
        raise FileError(what, path=gguf.path, where=name, expected=expected)
    ignored = tuple(name for name in gguf.tensors if name not in known)
    _refuse_other_kinds(gguf, graph, config, ignored)
    return frozenset(optional), ignored


def find_factors(
    gguf: GGUF, config: Config, ignored: Sequence[str]
) -> tuple[frozenset[str], tuple[str, ...]]:
    """Of tensors that no row names, the numbers beside matrices by which their products are
    multiplied, of experts one for each: llama.cpp's converter writes them for NVFP4 checkpoints.

    Returns ``(Config.factors, Config.ignored)``. Raises FileError for one of another shape, and
    UnsupportedError for one of what is no matrix of a product.
    """
    found = set()
    for name in ignored:
        stem = name.removesuffix(".scale")
        matrix = gguf.tensors.get(f"{stem}.weight")
        if stem == name or matrix is None or f"{stem}.weight" in ignored:
            continue
        if stem.endswith(UNSCALED) or len(matrix.shape) < 2:
            what = f"a factor of {stem}.weight: not supported"
            raise UnsupportedError(f"{gguf.path}: {name}: {what}")
        experts = config.layers[max(0, layer_of(name)[0])].experts
        n = experts.n if experts is not None and len(matrix.shape) > 2 else 1
        if prod(shape := gguf.tensors[name].shape) != n:
            raise FileError(f"shape {list(shape)}", path=gguf.path, where=name, expected=f"[{n}]")
        found.add(name)
    return frozenset(found), tuple(name for name in ignored if name not in found)


def _refuse_other_kinds(gguf: GGUF, graph: Graph, config: Config, ignored: Sequence[str]) -> None:
    """A layer whose keys lost its experts or its heads would compute without them."""
    doubtful = [
        name for name in ignored if layer_of(name)[0] >= 0 and not graph.unread(config, name)
    ]
    known = {row.name for kind in graph.parts() for row in kind.rows} if doubtful else set()
    for name in doubtful:
        i, stem = layer_of(name)
        if stem in known:
            layer = config.layers[i]
            parts = " and ".join(filter(None, (layer.mixer, layer.ffn)))
            raise FileError(
                f"is unused: by the file's keys layer {i} is {parts}",
                path=gguf.path,
                where=name,
                expected="keys for a layer that has this tensor",
            )
