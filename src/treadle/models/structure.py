"""Graphs and sublayers: their tensors, and the check of a file's tensors against them.

A *graph* is one data flow, a file in ``graphs/``; a *sublayer* is one half of a layer, a file in
``mixers/`` (mixes information between tokens) or ``ffns/`` (transforms each token). Each declares
the tensors that it reads, with shapes in terms of named sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, TypeVar

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError, UnsupportedError
from treadle.models.config import PoolSpec, StateSpec

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows

# Matrices that are read by row, applied per head, or not used in a product.
UNSCALED = (
    *("token_embd", "per_layer_token_embd", "position_embd", "token_types"),
    *("attn_k_b", "attn_v_b", "attn_kv_b", "ssm_conv1d", "shortconv.conv"),
    *("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "attn_rel_proj"),
    *("shortconv_k", "shortconv_v", "shortconv_attn", "shortconv_mlp"),
)

Sizes = Mapping[str, int]
Made = TypeVar("Made")


@dataclass(frozen=True)
class TensorRow:
    """A tensor that a graph or sublayer reads: its name, without "blk.N." in layers, and its shape
    in numpy order. The shape is made of names, whose numbers ``Graph.sizes`` and ``Sublayer.sizes``
    return. ``optional``: valid files may lack it.
    """

    name: str  # in a sublayer, without "blk.N."
    shape: tuple[str, ...]
    optional: bool = False


def with_bias(stem: str, *shape: str, optional: bool = False) -> tuple[TensorRow, TensorRow]:
    """Return the tensor rows of a weight of this shape, and of its bias ``[shape[0]]``, which is
    always optional; ``optional``: whether the weight is too.
    """
    bias = TensorRow(f"{stem}.bias", shape[:1], optional=True)
    return TensorRow(f"{stem}.weight", shape, optional), bias


@dataclass(frozen=True, eq=False)
class Sublayer:
    """A part of a layer that adds to the residual stream, such as its mixer or FFN;
    ``models/layer.py`` combines them.

    label: label of its steps, after the layer's number.
    before, after, after_sum: stems of its norms: of its input, of its result, and of the residual
        sum.
    after_second_sum: stem of the norm of a second sum: of the normed residual sum and the
        sublayer's input.
    build: ``build(g, i, h)`` returns what is added to the residual stream, computed from the normed
        states ``h``.
    rows: its tensors in each layer that has it, norms included.
    sizes: sizes named in their shapes, in addition to the graph's.
    memory: its cache pools, with ``layers`` left empty.
    unread: tensors that valid files have in such a layer although nothing reads them.
    """

    label: str
    before: str
    after: str
    after_sum: str
    build: Callable[[Ops, int, Rows], Rows]
    rows: tuple[TensorRow, ...]
    sizes: Callable[[Layer], Sizes]
    memory: Callable[[Layer], tuple[PoolSpec | StateSpec, ...]] = lambda layer: ()
    after_second_sum: str = ""
    unread: frozenset[str] = frozenset()


def with_rows(of: Sublayer, *rows: TensorRow) -> Sublayer:
    """Return the sublayer ``of`` with ``rows`` in place of its own rows of these names."""
    given = {row.name: row for row in rows}
    return replace(of, rows=tuple(given.get(row.name, row) for row in of.rows))


UP_FIRST = ("up", "down")  # the matrices of a norm's gate in the order of their use
DOWN_FIRST = ("down", "up")


def gates_of(
    norm: str, width: str, order: tuple[str, str] = UP_FIRST
) -> tuple[TensorRow, TensorRow]:
    """Return the tensor rows of the low-rank gate by which the result of the norm ``norm`` is
    multiplied. ``width``: name of the size of that result.
    """
    first, second = (f"{norm}_gate_{which}.weight" for which in order)
    return TensorRow(first, ("n_norm_rank", width)), TensorRow(second, (width, "n_norm_rank"))


def with_gates(of: Sublayer, *norms: str, order: tuple[str, str] = UP_FIRST) -> Sublayer:
    """Return the sublayer ``of`` with gates of its norms of hidden states ``norms``, which
    become required. ``order``: as of ``gates_of``.
    """

    def row(one: TensorRow) -> TensorRow:
        return replace(one, optional=False) if one.name.removesuffix(".weight") in norms else one

    def sizes(layer: Layer) -> Sizes:
        return {**of.sizes(layer), "n_norm_rank": layer.n_norm_rank}

    gates = (gate for norm in norms for gate in gates_of(norm, "n_embd", order))
    return replace(of, rows=(*map(row, of.rows), *gates), sizes=sizes)


def built_by_graph(
    label: str,
    rows: tuple[TensorRow, ...],
    sizes: Callable[[Layer], Sizes] = lambda layer: {},
    memory: Callable[[Layer], tuple[PoolSpec | StateSpec, ...]] = lambda layer: (),
) -> Sublayer:
    """Return a sublayer that only declares tensors and cache memory of a layer; the graph builds
    its steps itself. ``label``, ``rows``, ``sizes``, ``memory``: as in ``Sublayer``.
    """

    def build(g: Ops, i: int, h: Rows) -> Rows:
        raise AssertionError(f"{label}: the graph builds its steps")

    return Sublayer(
        label=label,
        before="",
        after="",
        after_sum="",
        build=build,
        rows=rows,
        sizes=sizes,
        memory=memory,
    )


class LazyConstants(dict[str, Made]):
    """Constants of a package by name. ``here``: those already imported; ``lazy``: by name, others
    as ``module.CONSTANT``, which are imported on first use. A module that begins with a dot is in
    the parent package.
    """

    def __init__(self, package: str, here: dict[str, Made], lazy: dict[str, str]) -> None:
        super().__init__(here)
        self._package = package
        self._lazy = lazy
        self._own = dict(here)  # and those that were imported

    def __missing__(self, name: str) -> Made:
        module, _, constant = self._lazy[name].rpartition(".")
        result: Made = getattr(import_module(f".{module}", self._package), constant)
        self._own[name] = result
        self[name] = result
        return result

    def is_changed(self) -> bool:
        """Return whether a program has added, replaced or removed constants."""
        changed = any(self._own.get(name) is not made for name, made in [*self.items()])
        return changed or len(self) < len(self._own)

    def names(self) -> list[str]:
        """Return the names of all constants, lazy ones included."""
        return list(dict.fromkeys((*self, *self._lazy)))

    def all_constants(self) -> list[Made]:
        """Return all constants; this imports the lazy ones."""
        return [self[name] for name in self.names()]


def last_with_keys(config: Config) -> Layer:
    """Return the record of the last layer with keys and values, that is, with attention."""
    return next(layer for layer in reversed(config.layers) if layer.n_head_kv)


@dataclass(frozen=True)
class Graph:
    """One data flow, shared by the architectures that name it.

    build: builds the layers; returns the hidden states of the batch's tokens.
    outputs: by name, functions that build an output from these states.
    rows, sizes: its tensors outside layers, and the sizes named in their shapes.
    sublayers: returns the sublayers of a layer, mostly a mixer and an FFN.
    read: reads a file's keys into a Config; raises FileError and UnsupportedError.
    parts: returns all sublayers that models of this graph may have; empty if a layer's are always
        the same.
    apart: each of the outputs is computed from only some of the tensors.
    mtp_layer: returns the record of an MTP layer of such a model (``graphs/nextn.py``).
    """

    build: Callable[[Ops], Rows]
    outputs: Mapping[str, Callable[[Ops, Rows], None]]
    rows: tuple[TensorRow, ...]
    sizes: Callable[[Config], Sizes]
    sublayers: Callable[[Layer], tuple[Sublayer, ...]]
    read: Callable[[ArchMetadata, Arch], Config]
    parts: Callable[[], Iterable[Sublayer]] = tuple
    apart: bool = False
    mtp_layer: Callable[[Config], Layer] = last_with_keys

    def tensors(self, config: Config) -> Iterator[tuple[TensorRow, dict[str, tuple[int, ...]]]]:
        """Yield every tensor row with the shapes of its tensors by name: first the graph's own
        rows, then those of each kind of sublayer. A sublayer's row has a tensor in each layer with
        this sublayer.
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
        """Return whether valid files may have this tensor although nothing reads it.

        Such tensors belong to layers for multi-token prediction, which few runs use, or are listed
        in the layer's ``Sublayer.unread``.
        """
        i, stem = layer_of(name)
        if i >= config.n_layer:
            return True
        return i >= 0 and any(stem in kind.unread for kind in self.sublayers(config.layers[i]))

    def pools(self, config: Config) -> tuple[PoolSpec | StateSpec, ...]:
        """Return the cache pools of the layers that store keys, values or states of their own.
        Layers with equal specs share a pool; pools without a window come first.
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
    """Return the layer and the rest of a tensor's name: (3, "ffn_up.weight") for
    ``blk.3.ffn_up.weight``. Outside layers the layer is -1. A leading "enc." is skipped.
    """
    layer = re.match(r"(?:enc\.)?blk\.(\d+)\.", name)
    return (int(layer[1]), name[layer.end() :]) if layer else (-1, name)


def _shape(row: TensorRow, sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes[word] for word in row.shape)


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without leading axes of size 1, which only some converters write."""
    n = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return shape[n:]


def needed_tensors(
    graph: Graph, config: Config, names: Container[str]
) -> Iterator[tuple[TensorRow, str, tuple[int, ...]]]:
    """Yield (row, name, shape) of each tensor that a file must have if it has the tensors
    ``names``.

    An optional tensor must be in every layer of its kind, or in none. A tensor in ``Arch.lacks``
    must be in every layer of all kinds, or in none; if it is named with "blk.N.", only that layer
    may lack it, and its bias.
    """
    arch = config.arch
    rows = list(graph.tensors(config))
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
    """Check a file's tensors against the rows of its graph.

    Return the values of ``Config.optional`` and ``Config.ignored``. Raises FileError, naming the
    tensor, if one is missing, is only in some of the layers that may have it, has a wrong shape, or
    belongs to another kind of layer.
    """
    known: set[str] = set()
    optional: set[str] = set()
    for row, name, shape in needed_tensors(graph, config, gguf.tensors):
        if name not in gguf.tensors:
            what = "the tensor is missing"
            expected = f"shape {list(shape)}"
        elif _without_leading_ones(gguf.tensors[name].shape) != _without_leading_ones(shape):
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
    """Return the values of ``Config.factors`` and ``Config.ignored``: of the names ``ignored``,
    those of scale factors of matrices (one number, or one for each expert), and the rest.
    llama.cpp's converter writes such factors for NVFP4 checkpoints.

    Raises FileError for a wrong shape, UnsupportedError for a factor of a tensor that is not the
    matrix of a product.
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
    """Raise FileError for an ignored tensor that another kind of sublayer of this graph reads: the
    file has lost keys, such as those of experts or heads.
    """
    doubtful = [
        name for name in ignored if layer_of(name)[0] >= 0 and not graph.unread(config, name)
    ]
    known = {row.name for kind in graph.parts() for row in kind.rows} if doubtful else set()
    for name in doubtful:
        i, stem = layer_of(name)
        if stem in known and i < config.n_layer:
            layer = config.layers[i]
            parts = " and ".join(filter(None, (layer.mixer, layer.ffn)))
            raise FileError(
                f"is unused: by the file's keys layer {i} is {parts}",
                path=gguf.path,
                where=name,
                expected="keys for a layer that has this tensor",
            )
