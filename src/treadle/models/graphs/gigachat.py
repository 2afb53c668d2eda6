"""GigaChat 3.5 (Sber, 2026): latent attention in some layers, a gated delta net in the others, and
gates of all norms.

::

    norm(x) = 2 y sigmoid(down silu(up y))            y = rms_norm(x), up and down of a small rank
    x = x + norm(mixer(norm(x)))
    x = x + norm(ffn(norm(x)))

The norms of latent attention's ranks are also multiplied by the root of the states' width by the
rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns import BOTH_NORMS_GATED, BOTH_NORMS_GATED_EXPERTS
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER
from treadle.models.graphs.kinds import LATENT
from treadle.models.structure import gates_of

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata

GAIN = 2.0


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with the rank of the gates of norms, which is the number of
    rows of the gates' first matrices.
    """
    config = reading.read(keys, arch)
    rank = keys.n_rows("output_norm_gate_up.weight")

    def layer(at: Layer) -> Layer:
        ffn = BOTH_NORMS_GATED_EXPERTS if at.experts is not None else BOTH_NORMS_GATED
        mixer = "latent_norm_gated" if at.mixer.startswith(LATENT) else at.mixer
        return replace(at, mixer=mixer, ffn=ffn, n_norm_rank=rank)

    layers = tuple(map(layer, config.layers))
    return replace(config, layers=layers, norm_gate_gain=GAIN, norm_gate_up_first=True)


GIGACHAT35 = replace(
    DECODER,
    rows=(*DECODER.rows, *gates_of("output_norm", "n_embd")),
    sizes=lambda config: {**DECODER.sizes(config), "n_norm_rank": config.layers[0].n_norm_rank},
    read=read,
)
