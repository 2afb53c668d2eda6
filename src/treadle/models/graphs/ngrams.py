"""N-gram embeddings: their keys, and the tensors of the layer that adds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.config import Ngrams, StateSpec
from treadle.models.graphs.indexing import MOST_HEADS
from treadle.models.structure import TensorRow, built_by_graph

if TYPE_CHECKING:
    from treadle.models.config import Config, Hyper, Layer
    from treadle.models.keys import ArchMetadata

LAYERS = "ple.layers"
NGRAM_SIZE = "ple.ngram_size"
NGRAM_HEADS = "ple.heads_per_ngram"
NGRAM_CONV = "ple.conv_kernel"
NGRAM_END = "ple.eos_token_id"
NGRAM_ROW = "embedding_length_per_layer_input"
MULTIPLIERS = "ple.layer_multipliers"
SIZES = "ple.head_vocab_sizes"
OFFSETS = "ple.head_offsets"
TABLE = "per_layer_token_embd.weight"
MOST_GRAMS = 8
MOST_TAPS = 16


def read_ngrams(keys: ArchMetadata, config: Config) -> Ngrams:
    """Return the sizes of n-gram embeddings and the parameters of their hashes. Raises FileError
    for too few of these, or if a hash could choose a row beyond the table's.
    """
    n = keys.integer(NGRAM_SIZE, lo=2, hi=MOST_GRAMS)
    heads = keys.integer(NGRAM_HEADS, lo=1, hi=MOST_HEADS)
    n_heads = (n - 1) * heads
    sizes = keys.integers(SIZES, 1, 1 << 40)
    offsets = keys.integers(OFFSETS, 0, 1 << 40)
    most = ((1 << 63) - 1) // config.n_vocab
    multipliers = keys.integers(MULTIPLIERS, 0, most)
    for key, found, expected in (
        (SIZES, sizes, n_heads),
        (OFFSETS, offsets, n_heads),
        (MULTIPLIERS, multipliers, n),
    ):
        if len(found) < expected:
            keys.fail(key, f"has {len(found)} entries", f"{expected}")
    n_rows = keys.n_rows(TABLE)
    ends = [s + o for s, o in zip(sizes[:n_heads], offsets[:n_heads], strict=True)]
    if n_rows and max(ends) > n_rows:
        keys.fail(SIZES, f"needs row {max(ends) - 1}", f"one of the {n_rows} of {TABLE}")
    return Ngrams(
        n=n,
        heads=heads,
        n_row=keys.integer(NGRAM_ROW, lo=1, hi=SIZE_MAX),
        end=keys.integer(NGRAM_END, lo=0, hi=config.n_vocab - 1),
        n_conv=keys.integer(NGRAM_CONV, lo=2, hi=MOST_TAPS),
        multipliers=tuple(multipliers[:n]),
        sizes=tuple(sizes[:n_heads]),
        offsets=tuple(offsets[:n_heads]),
        n_rows=n_rows or max(ends),
    )


def _ngrams_of(layer: Layer) -> tuple[Ngrams, Hyper]:
    assert layer.ngrams is not None
    assert layer.hyper is not None
    return layer.ngrams, layer.hyper


def _ngram_memory(layer: Layer) -> tuple[StateSpec, ...]:
    grams, hyper = _ngrams_of(layer)
    n_values = grams.n_before * hyper.n * hyper.n_embd + grams.n - 1
    return (StateSpec("ngrams", (), n_values, beside=True),)


NGRAMS = built_by_graph(
    "ngrams",
    rows=(
        TensorRow("ple_key.weight", ("n_streams_embd", "n_gram_embd")),
        TensorRow("ple_value.weight", ("n_embd", "n_gram_embd")),
        TensorRow("ple_norm_key.weight", ("n_streams_embd",)),
        TensorRow("ple_norm_query.weight", ("n_streams_embd",)),
        TensorRow("ple_norm_conv.weight", ("n_streams_embd",)),
        TensorRow("ple_conv1d.weight", ("n_streams_embd", "n_gram_taps")),
    ),
    sizes=lambda layer: {
        "n_gram_embd": _ngrams_of(layer)[0].n_embd,
        "n_gram_taps": _ngrams_of(layer)[0].n_conv,
    },
    memory=_ngram_memory,
)
