"""Attention's part of a run's inputs: pages, work items and their merges."""

from __future__ import annotations

import numpy as np

PAGE = 32  # tokens a page: with f16 a row of transposed keys is one cache line
WORD_BYTES = PAGE // 8  # of a word with a bit for each key of a page
SPLIT = 512  # keys of one item, for sequences with few tokens
MOST_SPLIT = 32  # tokens whose whole contexts can be split at a time; more tokens are items enough
# pages: byte offset from the item to the sequence's page table. sees: a position up to which all of
# its queries see keys, besides those up to their own; 0: none.
ITEM_FIELDS = "token n_tokens position key_begin key_end pages partial sees"
ITEM = np.dtype([(name, "i8") for name in ITEM_FIELDS.split()])
MERGE = np.dtype([(name, "i8") for name in ("token", "n_tokens", "partial", "n_partials")])


def most_partials(n_tokens: int, n_keys: int) -> int:
    """Return the largest number of items that the histories of ``n_tokens`` query tokens can be
    split into, if each sees ``n_keys`` keys; it sizes the buffer of partial results.
    """
    return min(n_tokens, MOST_SPLIT) * (-(-n_keys // SPLIT) + 1)
