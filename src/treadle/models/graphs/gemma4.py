"""Gemma 4: a decoder with two kinds of layers, with a window and without, that have different head
widths. Some sizes have per-layer embeddings, or last layers that read other layers' keys and
values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.errors import FileError
from treadle.files.metadata import SIZE_MAX
from treadle.models.archs import N_OWN
from treadle.models.ffns.layer_embeddings import OWN
from treadle.models.ffns.parallel import BESIDE
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER, build, halves_of
from treadle.models.mixers.names import KEYS_ALONE, SHARED
from treadle.models.structure import Sizes, Sublayer, TensorRow

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata

N_SHARED = "attention.shared_kv_layers"
ROWS = (
    TensorRow("per_layer_token_embd.weight", ("n_vocab", "n_owns"), optional=True),
    TensorRow("per_layer_model_proj.weight", ("n_owns", "n_embd"), optional=True),
    TensorRow("per_layer_proj_norm.weight", ("n_own",), optional=True),
)


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with each layer's head widths, mixer and FFN."""
    config = reading.read(keys, arch)
    n_own = keys.integer(N_OWN, 0, lo=0, hi=SIZE_MAX)
    for row in ROWS if n_own else ():
        if row.name not in keys.gguf.tensors:
            raise FileError("the tensor is missing", path=keys.gguf.path, where=row.name)
    head_dim, head_dim_v = (
        keys.integer(f"attention.{name}_length_swa", most, lo=1, hi=SIZE_MAX)
        for name, most in (
            ("key", config.layers[0].head_dim),
            ("value", config.layers[0].head_dim_v),
        )
    )
    keys_alone = _values_are_keys(keys, config)
    layers: list[Layer] = []
    n_shared = keys.integer(N_SHARED, 0, lo=0, hi=config.n_layer)
    for i, source in enumerate(sources_of(keys, config, n_shared)):
        at = replace(config.layers[i], v_norm=True, n_own=n_own, kv_from=source)
        if at.window:
            at = replace(at, head_dim=head_dim, head_dim_v=head_dim_v)
        elif keys_alone:
            at = replace(at, mixer=KEYS_ALONE)
        if at.experts is not None:
            at = replace(at, ffn=BESIDE[at.ffn])
        layers.append(at if source == i else replace(at, mixer=SHARED))
    return replace(config, layers=tuple(layers))


def _values_are_keys(keys: ArchMetadata, config: Config) -> bool:
    """Return whether the file has no matrix for values in any layer without a window: these
    layers then use their keys as values.
    """
    wide = (i for i, at in enumerate(config.layers) if not at.window)
    names = (f"blk.{i}.{stem}.weight" for i in wide for stem in ("attn_v", "attn_qkv"))
    return not any(name in keys.gguf.tensors for name in names)


def sources_of(keys: ArchMetadata, config: Config, n_shared: int) -> list[int]:
    """Return for each layer the number of the layer whose keys and values it reads: its own, or,
    for the last ``n_shared`` layers, that of the last layer before these with the same window.
    Raises FileError if no layer before these has that window.
    """
    n_own = config.n_layer - n_shared
    last = dict[int, int]()
    sources = list[int]()
    for i, at in enumerate(config.layers):
        if i < n_own:
            last[at.window] = i
        elif at.window not in last:
            keys.fail(
                N_SHARED,
                f"leaves layer {i} without keys and values",
                "an earlier layer of the same kind",
            )
        sources.append(last[at.window])
    return sources


def parts_of(layer: Layer) -> tuple[Sublayer, ...]:
    """Return a layer's mixer and FFN, and its per-layer embeddings if it has some."""
    return *halves_of(layer), *((OWN,) if layer.n_own else ())


def _sizes(config: Config) -> Sizes:
    n_own = config.layers[0].n_own
    return {**DECODER.sizes(config), "n_own": n_own, "n_owns": n_own * config.n_layer}


GEMMA4 = replace(
    DECODER,
    build=lambda g: build(g, parts_of),
    rows=(*DECODER.rows, *ROWS),
    sizes=_sizes,
    sublayers=parts_of,
    read=read,
    parts=lambda: (*DECODER.parts(), OWN),
)
