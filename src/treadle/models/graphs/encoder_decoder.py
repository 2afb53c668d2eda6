"""T5: an encoder, which reads a prompt, and a decoder, which generates text and attends to the
encoder's rows.

Both are in one file. The encoder is another graph with its own ``Config`` (``Config.encoder``). The
graph ``ENCODER_DECODER_KEYS`` stores the keys and values of the encoder's rows, once for each
prompt (``cross.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.archs import ARCHS, BUCKETS, GATE, N_BUCKETS
from treadle.models.graphs import GRAPHS
from treadle.models.graphs.cross import CROSS_DECODER, CROSS_KEYS, thirds_of
from treadle.models.graphs.decoder import DECODER
from treadle.models.graphs.reading import read_config
from treadle.models.keys import ENC, N_DECODER_LAYER, N_LAYER_MAX, ArchMetadata
from treadle.models.mixers.cross import CROSS
from treadle.models.structure import Graph, Sizes, TensorRow, layer_of

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.archs import Arch
    from treadle.models.config import Config

EMBEDDINGS = "token_embd.weight"  # of both
START = "decoder_start_token_id"
LOGIT_SCALE = "logit_scale"  # treadle's; llama.cpp scales no logits of T5


def encoder_view(gguf: GGUF) -> GGUF:
    """Return a view of a file with the encoder's tensors only, under the names of the encoder's
    graph.
    """
    made = copy.copy(gguf)
    own = {n.removeprefix(ENC): at for n, at in gguf.tensors.items() if n.startswith(ENC)}
    both = {n: at for n, at in gguf.tensors.items() if n == EMBEDDINGS}
    made.tensors = both | own
    return made


def encoder_config(config: Config) -> Config:
    """Return the config of the encoder, with the optional tensors that the file has of it.
    ``config``: the decoder's, as ``load_config`` returns it.
    """
    assert config.encoder is not None
    own = frozenset(name.removeprefix(ENC) for name in config.optional if name.startswith(ENC))
    return replace(config.encoder, optional=own)


def keys_config(config: Config) -> Config:
    """Return the config of the graph that stores the keys and values of the encoder's rows.
    ``config``: the decoder's.
    """
    arch = replace(config.arch, graph="encoder_decoder_keys")
    return replace(config, arch=arch, ignored=(), encoder=None)


def _read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the decoder's config, with the encoder's in ``Config.encoder``. The FFNs of the first
    T5 have no gate; models whose embeddings are the output matrix scale logits. llama.cpp's files
    have no key for either.
    """
    tensors = keys.gguf.tensors
    has_gate = any(f"blk.0.{name}" in tensors for name in GATE)
    plain = arch if has_gate else replace(arch, gated=False, activation="relu")
    n_encoder = keys.integer("block_count", lo=1, hi=N_LAYER_MAX)
    n_decoder = keys.integer(N_DECODER_LAYER, n_encoder, lo=1, hi=N_LAYER_MAX)
    own = copy.copy(keys)
    own.values = {**keys.values, "block_count": n_decoder}
    config = read_config(own, plain)
    if not keys.has(LOGIT_SCALE) and "output.weight" not in tensors:
        config = replace(config, logit_scale=config.n_embd**-0.5)
    view = encoder_view(keys.gguf)
    encoder = ARCHS[arch.encoder]
    lacking = dict(encoder.keys)
    inner = ArchMetadata(view, arch.name, lacking.items())
    inner.values = {k: v for k, v in keys.values.items() if k != LOGIT_SCALE}
    config = replace(
        config,
        n_buckets=keys.integer(BUCKETS, lo=N_BUCKETS[0], hi=N_BUCKETS[-1]),
        encoder=GRAPHS[encoder.graph].read(inner, encoder),
        start_id=keys.integer(START, 0, lo=0, hi=config.n_vocab - 1),
    )
    return config.attending_to(config.n_ctx_train)


def _sizes(config: Config) -> Sizes:
    own = {"n_buckets": config.n_buckets, "n_head": config.layers[0].n_head}
    return {**DECODER.sizes(config), **own}


class EncoderDecoder(Graph):
    """A decoder's graph for files that have an encoder's tensors too."""

    def tensors(self, config: Config) -> Iterator[tuple[TensorRow, dict[str, tuple[int, ...]]]]:
        """Yield the decoder's rows as ``Graph.tensors``, then the encoder's, whose names begin with
        ``ENC``.
        """
        yield from super().tensors(config)
        assert config.encoder is not None
        for row, places in GRAPHS[config.encoder.arch.graph].tensors(config.encoder):
            if row.name != EMBEDDINGS:
                named = {ENC + name: shape for name, shape in places.items()}
                yield replace(row, name=ENC + row.name), named

    def unread(self, config: Config, name: str) -> bool:
        """Return whether valid files may have this tensor of the decoder although nothing reads it:
        those in ``CROSS.unread`` (of cross attention). Unlike in other graphs, tensors of layers
        beyond the last one are not among them, since such files have no MTP layers.
        """
        i, stem = layer_of(name)
        return not name.startswith(ENC) and 0 <= i < config.n_layer and stem in CROSS.unread


ENCODER_DECODER = EncoderDecoder(
    build=CROSS_DECODER.build,
    outputs=CROSS_DECODER.outputs,
    rows=(
        *DECODER.rows,
        # Relative attention bias of all layers that have none of their own.
        TensorRow("blk.0.attn_rel_b.weight", ("n_buckets", "n_head"), optional=True),
    ),
    sizes=_sizes,
    sublayers=thirds_of,
    read=_read,
    parts=lambda: (*DECODER.parts(), CROSS),
)
ENCODER_DECODER_KEYS = replace(CROSS_KEYS, rows=ENCODER_DECODER.rows, sizes=_sizes)
