"""Keys, names and rules shared by families with several residual streams (hyper-connections)."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, same
from treadle.files.metadata import MetadataReader
from treadle.models.graphs.nextn import STREAM_PARTS
from treadle.models.graphs.streams.manifold import ROUNDS
from treadle.models.graphs.streams.parts import EPSILON, N_STREAMS

STREAM_NAMES: Names = {
    f"hc_{half}.{part}": f"hc_{half}_{part}" for half in ("attn", "ffn") for part in STREAM_PARTS
}


def manifold_keys(keys: MetadataReader) -> dict[str, Any]:
    """Return the keys of manifold-constrained hyper-connections: the number of streams, the rounds
    of Sinkhorn normalisation, and its epsilon.
    """
    return {
        N_STREAMS: keys.integer("hc_mult"),
        ROUNDS: keys.integer("hc_sinkhorn_iters"),
        EPSILON: f32(keys.number("hc_eps", lo=0.0, hi=1.0)),
    }


def stream_rules(*spellings: str) -> list[DerivationRule]:
    """Return rules that rename the tensors of attention's and the FFN's streams to the checkpoint
    names in ``STREAM_NAMES``.

    spellings: patterns of the names that folders have. ``{half}`` is attn or ffn, ``{sub}`` attn or
        mlp, ``{part}`` one of ``STREAM_PARTS``.
    """
    return [
        DerivationRule(
            (spelling.format(half=half, sub=sub, part=part),), {f"hc_{half}.{part}.weight": same}
        )
        for spelling in spellings
        for half, sub in (("attn", "attn"), ("ffn", "mlp"))
        for part in STREAM_PARTS
    ]
