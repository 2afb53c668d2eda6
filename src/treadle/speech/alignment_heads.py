"""Alignment heads of OpenAI's models, for files that do not list them.

OpenAI chose those heads of the decoder's cross attention whose weights follow the words in time. A
model is recognised by its sizes; large-v1 has the sizes of large-v2, and gets its heads.
"""

from __future__ import annotations

from collections.abc import Mapping

N_VOCAB_ENGLISH = 51864
N_VOCAB_V3 = 51866

Heads = Mapping[int, tuple[int, ...]]  # by layer
_SIZES = {  # layers and heads of the decoder
    (4, 6): "tiny",
    (6, 8): "base",
    (12, 12): "small",
    (24, 16): "medium",
    (32, 20): "large",
    (4, 20): "turbo",
}
_HEADS: Mapping[str, Heads] = {
    "tiny.en": {1: (0,), 2: (0, 5), 3: (0, 1, 2, 3, 4)},
    "tiny": {2: (2,), 3: (0, 2, 3, 4, 5)},
    "base.en": {3: (3,), 4: (7,), 5: (1, 5, 7)},
    "base": {3: (1,), 4: (2, 3, 7), 5: (1, 2, 4, 6)},
    "small.en": {
        6: (6,),
        7: (0, 3, 8),
        8: (2, 5, 7),
        9: (0, 4, 8, 10),
        10: (0, 1, 2, 3, 6, 11),
        11: (2, 4),
    },
    "small": {5: (3, 9), 8: (0, 4, 7, 8), 9: (0, 7, 9), 10: (5,)},
    "medium.en": {
        11: (4,),
        14: (1, 12, 14),
        15: (4,),
        16: (0, 4, 9),
        17: (12, 14),
        18: (7, 10, 15),
        20: (0, 3, 9, 14),
        21: (12,),
    },
    "medium": {13: (15,), 15: (4, 15), 16: (1,), 20: (0,), 23: (4,)},
    "large": {
        10: (12,),
        13: (17,),
        16: (11, 12, 13),
        17: (15, 16),
        18: (4, 11, 19),
        19: (11,),
        21: (2, 3),
        22: (3, 9, 12),
        23: (5, 7, 13),
        25: (5,),
        26: (1, 12),
        27: (15,),
    },
    "large.v3": {
        7: (0,),
        10: (17,),
        12: (18,),
        13: (12,),
        16: (1,),
        17: (14,),
        19: (11,),
        21: (4,),
        24: (1,),
        25: (6,),
    },
    "turbo.v3": {2: (4, 11), 3: (3, 6, 11, 14)},
}


def usual_heads(n_layer: int, n_head: int, n_vocab: int) -> tuple[tuple[int, int], ...]:
    """Return (layer, head) of each alignment head of OpenAI's model with these sizes (of the
    decoder); for sizes that none of its models has, all heads of the upper half of the layers.
    """
    suffix = {N_VOCAB_ENGLISH: ".en", N_VOCAB_V3: ".v3"}.get(n_vocab, "")
    heads = _HEADS.get(_SIZES.get((n_layer, n_head), "") + suffix)
    if heads is None or n_vocab < N_VOCAB_ENGLISH:
        heads = dict.fromkeys(range(n_layer // 2, n_layer), tuple(range(n_head)))
    return tuple((layer, head) for layer, listed in heads.items() for head in listed)
