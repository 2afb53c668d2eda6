"""A layer for multi-token prediction on several streams of states (DeepSeek V4, 2026).

::

    x[s] = eh_proj([norm(embed(ids)), norm(states[s])])     states: the target's streams
    x    = layer(x)
    logits = linear(norm(sum pre x))                        see ``graphs/streams/manifold.py``
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.graphs.nextn import GIVEN, NEXTN_ROWS
from treadle.models.graphs.streams.manifold import MANIFOLD, ahead_streams, build_layers
from treadle.models.graphs.streams.parts import hyper_of

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops) -> Rows:
    """Build the MTP layer. Its inputs are the token ids and GIVEN, the target's streams of hidden
    states, f32 ``[N, n_streams * n_embd]``. Return the streams after the layer.
    """
    n_streams = hyper_of(g.config).n
    x = g.call(
        "projected_streams",
        "nextn",
        g.given(GIVEN, n_streams * g.config.n_embd),
        n=n_streams,
        embd="token_embd",
        norms=("nextn.enorm", "nextn.hnorm"),
        weight="nextn.eh_proj",
    )
    return build_layers(g, x)


NEXTN_STREAMS = replace(
    MANIFOLD,
    build=build,
    outputs={**MANIFOLD.outputs, "ahead": ahead_streams},
    rows=(*MANIFOLD.rows, *NEXTN_ROWS),
    sizes=lambda config: {**MANIFOLD.sizes(config), "twice_n_embd": 2 * config.n_embd},
)
