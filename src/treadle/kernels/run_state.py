"""The inputs and results of a run, as the engine writes and reads them and kernels see them: the
block of RUN_STATE, records of attention's work, and those of the largest logits. Without the
kernels, so that a run imports little.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import numpy as np

from treadle.base.fast_classes import NamedTuple

LINE = 64  # bytes in a cache line
# Batches up to these sizes have a gemv of their own; larger ones are packed and tiled.
GEMV_TOKENS = (1, 2, 4)

# Everything that changes from run to run lies in one block: ``engine/batch.py`` writes it, and the
# compiled steps read it. It begins with these fields, then EACH once for every pool and rope table:
# those of the second are named ``kv_indices1``, and so on. Counts are numbers; the other fields are
# byte offsets of arrays from the block's beginning.
FIELDS = (
    "n_tokens",  # rows of the batch
    "n_outputs",  # rows whose logits are requested
    "n_parts",  # sequences in the batch
    "n_sampled",  # rows of logits whose top-k is requested, each with its mask
    "tokens",  # i32 [n_tokens]
    "output_rows",  # i32 [n_outputs]: which rows
    "parts",  # PART [n_parts]
    "sampled",  # SAMPLED [n_sampled]
    "n_loras",  # tiles of rows, in plans with adapters
    "loras",  # LORA [n_loras]
    "part_pages",  # i64 [n_parts, 2]: see PART_PAGES
)
EACH = (
    "n_attn_items",  # attention: work items for sequences with many tokens
    "n_attn_few",  # the same for sequences with few tokens
    "n_attn_merges",  # query groups whose keys are split among work items
    "kv_indices",  # i64 [n_tokens]: page * page_size + place, where to write
    "attn_items",  # ITEM [n_attn_items]
    "attn_few",  # ITEM [n_attn_few]
    "attn_merges",  # MERGE [n_attn_merges]
    "rope",  # f32 [n_tokens, 2, rope_dims / 2]: cosines, then sines
)
# One sequence: its first row, number of rows, position of the first row; its state slot (at
# position 0: none, zeros) and the slot for the state after these tokens; and the position from
# which its tokens are of the second type.
PART_FIELDS = "token", "n_tokens", "position", "state", "next", "second"
PART = np.dtype([(name, "i8") for name in PART_FIELDS])
# The pages of a sequence: the byte offset, from the block's beginning, of its list of pages in the
# first pool, i64 [n], and n. Its lists in the other pools, of the same length, come after it.
PART_PAGES = np.dtype([(name, "i8") for name in ("list", "n")])

# In plans with adapters: at most LORA_ROWS rows of one sequence. The first row, the number of rows,
# and the byte offset from this record to their scales, f32 [n_adapters].
LORA = np.dtype([(name, "i8") for name in ("token", "n_tokens", "scales")])
LORA_ROWS = 16

# In plans for batches with pictures: the name of their rows in ``Plan.takes``, and the columns
# before the values, so that these begin at a cache line (``elementwise/media_rows.py``).
MEDIA = "media"
MEDIA_HEAD = 16


def run_state(n: int) -> np.dtype[Any]:
    """Return the numpy dtype of a run's state, all fields i64: FIELDS, then the fields EACH ``n``
    times, for the larger of the numbers of pools and of rope tables.
    """
    each = [numbered(name, i) for i in range(n) for name in EACH]
    return np.dtype([(name, "i8") for name in (*FIELDS, *each)])


def numbered(field: str, index: int) -> str:
    """Return the name in RUN_STATE of ``field``, one of EACH, for the pool or rope table number
    ``index``.
    """
    return f"{field}{index or ''}"


RUN_STATE = run_state(1)


@cache
def run_offset(field: str) -> int:
    """Return the byte offset of ``field`` in a run's state."""
    if field in FIELDS:
        return 8 * FIELDS.index(field)
    stem = field.rstrip("0123456789")
    index = int(field[len(stem) :] or 0)
    return 8 * (len(FIELDS) + index * len(EACH) + EACH.index(stem))


def round_up(n: int, multiple: int) -> int:
    """Round ``n`` up to a multiple of ``multiple``."""
    return -(-n // multiple) * multiple


# -- attention: pages, work items and their merges ------------------------------------------------

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


# -- requests for a row's largest logits, and their results ---------------------------------------

N_TOP = 64  # above common top_k values and the most alternatives of APIs
TOTAL = 8 * N_TOP  # byte offset of the sum in a result


class AsyncMask(Protocol):
    """A grammar mask that is still being computed when the run begins."""

    def wait(self) -> bytes:
        """Wait for the mask, and return it: one bit for each token id, as in ``LogitsQuery``."""


class LogitsQuery(NamedTuple):
    """A request for a row's N_TOP largest logits. ``mask``: one bit for each token id, 1 if it is
    allowed, lowest bit first; a AsyncMask is waited for before the first step that reads masks.
    ``first``: only the largest one (and its equals). ``total``: also the sum of exponentials.
    """

    mask: bytes | AsyncMask | None = None
    first: bool = False
    total: bool = False


QUERIES = 2  # most queries of one row; at most one has a mask
# A row of the logits; the byte offset of its mask from the run's block, 0 for none.
SAMPLED = np.dtype([(name, "i8") for name in ("row", "mask", "first", "total")])
# A row's result: values and ids, the largest first, ties by lowest id; the sum of exp(x -
# values[0]).
RESULT = np.dtype(
    {
        "names": ["values", "ids", "total"],
        "formats": [("f4", N_TOP), ("i4", N_TOP), "f8"],
        "offsets": [0, 4 * N_TOP, 8 * N_TOP],
        "itemsize": 8 * N_TOP + 64,
    }
)
# Relative error of ``total``, in u = 2**-24. exp is accurate to 2 units (2u), its argument to u
# times its distance from the maximum, whose mean under the softmax is below ln(n_vocab) + 1 < 17. A
# sum of FLUSH terms adds 15u. Joining adds another exp, with an argument accurate to 17u.
TOTAL_ERROR = 64 * 2.0**-24
