"""Keys of an indexer, which chooses the keys that latent attention attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import FileError
from treadle.files.metadata import SIZE_MAX
from treadle.models.archs import INDEX_HALVED
from treadle.models.config import Indexer
from treadle.models.graphs.kinds import Q_RANK

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Latent
    from treadle.models.keys import ArchMetadata

INDEX_HEADS = "attention.indexer.head_count"
INDEX_DIM = "attention.indexer.key_length"
INDEX_TOP = "attention.indexer.top_k"
NORM_EPS = 1e-6  # of the norm of keys: transformers' and llama.cpp's
MOST_HEADS = 256


def read_indexer(keys: ArchMetadata, arch: Arch, latent: Latent | None) -> Indexer:
    """Return the sizes of the indexer of latent attention, whose sizes are ``latent`` (not None).

    Its queries are products of attention's low-rank queries, which the model must have; it rotates
    as many dims as attention does. Raises FileError for sizes out of range, or without that rank.
    """
    assert latent is not None
    if not latent.n_q_rank:
        expected = "the rank of queries, of which those of the indexer are made"
        raise FileError("is missing", path=keys.gguf.path, where=Q_RANK, expected=expected)
    return Indexer(
        n_head=keys.integer(INDEX_HEADS, lo=1, hi=MOST_HEADS),
        head_dim=keys.integer(INDEX_DIM, lo=latent.n_rope, hi=SIZE_MAX),
        top=keys.integer(INDEX_TOP, lo=1, hi=SIZE_MAX),
        rope="neox" if keys.flag(INDEX_HALVED, False) else arch.rope,
        norm_eps=NORM_EPS,
    )
