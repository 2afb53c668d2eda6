"""Gemma 3n: layers compute one of several streams of states, and correct the others (AltUp).

::

    x = streams(embed(ids))
    for each layer:
        p = predicted(x), y = p[0], h = norm(y)
        y = (y + norm(attention(h)) + h + norm(low_rank(h))) / sqrt(2)
        y = y + norm(ffn(norm(y)))
        x = corrected(p, y)
        x[1:] += norm(own(scale * x[0]))
    logits = linear(norm(mean(x)))

The gates of the first layers are sparse. As in Gemma 4, the last layers read other layers' keys and
values, and there are per-layer embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.archs import N_OWN
from treadle.models.ffns.layer_embeddings import OWN
from treadle.models.ffns.sparse import SPARSE
from treadle.models.ffns.streams import ALTUP, HALF, LAUREL, corrected, joined, predicted, spread
from treadle.models.graphs import gemma4, reading
from treadle.models.graphs.decoder import DECODER, UNSTAGED_OUTPUTS, halves_of
from treadle.models.mixers.names import SHARED
from treadle.models.structure import Sizes, Sublayer, TensorRow

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows

N_STREAMS = "altup.num_inputs"
ACTIVE = "altup.active_idx"
CUTS = "activation_sparsity_scale"
N_STREAMS_MAX = 8
TABLE, *MORE = gemma4.ROWS
ROWS = (
    # Checkpoints have no rows for tokens of images and sound, which use the first row.
    TensorRow(TABLE.name, ("n_rows_own", "n_owns")),
    *(replace(row, optional=False) for row in MORE),
    TensorRow("altup_proj.weight", ("n_more", "n_embd", "n_embd")),
    TensorRow("altup_unembd_proj.weight", ("n_more", "n_embd", "n_embd")),
)


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with streams, per-layer embeddings, and the layers whose gates are
    sparse or that read another layer's keys and values.
    """
    config = reading.read(keys, arch)
    # A float, 10.0, in the first files.
    shared = keys.number(gemma4.N_SHARED, 0.0, lo=0, hi=config.n_layer)
    if shared != int(shared):
        keys.fail(gemma4.N_SHARED, f"is {shared}", "a whole number")
    if (active := keys.integer(ACTIVE, 0, lo=0)) != 0:
        keys.refuse(ACTIVE, f"is {active}: treadle supports only 0")
    n_own = keys.integer(N_OWN, lo=1, hi=SIZE_MAX)
    cuts = _cuts(keys, config.n_layer)
    sources = gemma4.sources_of(keys, config, int(shared))
    layers: list[Layer] = []
    for i, (at, cut) in enumerate(zip(config.layers, cuts, strict=True)):
        at = replace(at, v_norm=True, n_own=n_own, kv_from=sources[i])
        at = replace(at, ffn=SPARSE, cut=cut) if math.isfinite(cut) else at
        layers.append(at if sources[i] == i else replace(at, mixer=SHARED))
    return replace(
        config,
        layers=tuple(layers),
        n_streams=keys.integer(N_STREAMS, 4, lo=2, hi=N_STREAMS_MAX),
        n_laurel=keys.n_rows("blk.0.laurel_l.weight"),
        n_rows_own=min(keys.n_rows(TABLE.name), config.n_vocab),
    )


def _cuts(keys: ArchMetadata, n_layer: int) -> list[float]:
    """Return each layer's gate threshold in standard deviations above the mean; minus infinity for
    dense gates. Raises FileError if the file has not one number for each layer.
    """
    given = keys.get(CUTS)
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        keys.fail(CUTS, keys.missing if given is None else f"is {given!r:.60}", "an array")
    if len(given) != n_layer:
        keys.fail(CUTS, f"has {len(given)} entries", f"{n_layer}, one per layer")
    for cut in given:
        if not isinstance(cut, float) or not (abs(cut) < 100 or cut == -math.inf):
            keys.fail(CUTS, f"holds {cut!r:.60}", "numbers from -100 to 100, or -inf")
    return list(given)


def build(g: Ops) -> Rows:
    """Build the layers; return the mean of the streams after the last (``joined``)."""
    x = spread(g, g.embed("token_embd", "token_embd", g.config.embd_scale))
    for i in g.config.stage_layers:
        x = g.steer(f"L{i}.control", _layer(g, i, x), layer=i)
    return joined(g, x)


def _layer(g: Ops, i: int, x: Rows) -> Rows:
    """Build layer ``i`` on the streams ``x``, f32 ``[N, n_streams * n_embd]``; return the new
    streams.
    """
    mixer, ffn = halves_of(g.config.layers[i])
    at = f"L{i}"
    blk = f"blk.{i}"
    x = predicted(g, i, x)
    first = g.columns(x, 0, g.config.n_embd)
    norm = f"{blk}.{mixer.before}"
    h = g.norm(f"{at}.attn.norm", first, norm)
    norms = norm, f"{blk}.{mixer.after}", f"{blk}.{LAUREL.after}"
    mixed = mixer.build(g, i, h)
    low = LAUREL.build(g, i, h)
    y = g.call("laurel", f"{at}.laurel.sum", first, mixed, low, norms=norms, scale=HALF)
    h = ffn.build(g, i, g.norm(f"{at}.ffn.norm", y, f"{blk}.{ffn.before}"))
    y = g.add(y, g.norm(f"{at}.ffn.post_norm", h, f"{blk}.{ffn.after}"))
    h = OWN.build(g, i, corrected(g, i, x, y))
    return g.call("add_beside", f"{at}.own.post_norm", x, h, weight=f"{blk}.{OWN.after}")


def parts_of(layer: Layer) -> tuple[Sublayer, ...]:
    """Return all sublayers of a layer: its mixer and FFN, AltUp, LAuReL and the per-layer
    embeddings.
    """
    return *halves_of(layer), ALTUP, LAUREL, OWN


def _sizes(config: Config) -> Sizes:
    n = config.n_streams
    n_own = config.layers[0].n_own
    own = {"n_own": n_own, "n_owns": n_own * config.n_layer, "n_laurel": config.n_laurel}
    own["n_rows_own"] = config.n_rows_own
    return {**DECODER.sizes(config), **own, "n_streams": n, "n_pairs": n * n, "n_more": n - 1}


GEMMA3N = replace(
    DECODER,
    build=build,
    outputs=UNSTAGED_OUTPUTS,
    rows=(*DECODER.rows, *ROWS),
    sizes=_sizes,
    sublayers=parts_of,
    read=read,
    parts=lambda: (*DECODER.parts(), ALTUP, LAUREL, OWN),
)
