"""Row order: matrices whose rows GGUF orders differently than transformers, and the reordering."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.models.archs import ARCHS

if TYPE_CHECKING:
    from treadle.convert.hf.config import HfConfig

Rows = npt.NDArray[Any]
Layout = Callable[[Rows], Rows]

IN_PLACE = "neox"  # transformers' RoPE
_TURNED = ("attn_q.weight", "attn_q.bias", "attn_k.weight", "attn_k.bias")
# Adapters' matrices [n, rows, rank] of queries and keys (Granite Switch).
_TURNED_STACKS = ("attn_q.lora_b", "attn_k.lora_b")
_IN_LAYERS = ("attn_", "ffn_")
_FUSED = ("attn_qkv.weight", "attn_qkv.bias")


def layout_of(
    name: str, shape: tuple[int, ...], hyper: HfConfig, *, linear: bool = False
) -> tuple[Layout | None, tuple[int, ...]]:
    """Return the function that brings a tensor into GGUF's row order (None if it has it), and the
    resulting shape. Row order of RoPE is separate: see ``rope_row_order``.

    ``name``: GGUF's, without the layer; ``linear``: the tensor is [out, in] in every family.
    """
    n_k = hyper.sizes["n_k"]
    if hyper.family.by_head and name in _FUSED and shape[0] == hyper.sizes["n_q"] + 2 * n_k:
        return partial(by_matrix, n_head=hyper.n_head, n_head_kv=hyper.n_head_kv), shape
    if hyper.family.transposed and not linear and len(shape) == 2 and name.startswith(_IN_LAYERS):
        return _transposed, shape[::-1]
    if hyper.n_skipped and name == "position_embd.weight":
        return partial(_rows_from, n=hyper.n_skipped), (shape[0] - hyper.n_skipped, *shape[1:])
    return None, shape


def rope_row_order(name: str, shape: tuple[int, ...], hyper: HfConfig) -> Layout | None:
    """Return the function that makes the two rows of each RoPE pair adjacent, as in GGUF files;
    None for tensors without RoPE rows. Only for converters: a model run in place keeps its rows,
    and its metadata says so.
    """
    if hyper.family.paired or ARCHS[hyper.family.arch].rope in (IN_PLACE, "none"):
        return None
    share = rope_fraction(hyper)
    head_dim = hyper.sizes["q_norm"]
    if name in _TURNED:
        return partial(halves_to_pairs, n_head=shape[0] // head_dim, share=share)
    if name in _TURNED_STACKS:
        return partial(_turned_stack, n_head=shape[1] // head_dim, share=share)
    if name in _FUSED and not hyper.family.by_head:
        n_turned = hyper.sizes["n_q"] + hyper.sizes["n_k"]
        return partial(_first_turned, n=n_turned, n_head=n_turned // head_dim, share=share)
    return None


def halves_to_pairs(rows: Rows, n_head: int, share: float = 1.0) -> Rows:
    """Reorder rows [n_head * d, ..] so that rows i and i + d/2 of each head become adjacent.
    ``share``: the fraction of each head, from its first row, to which this applies.
    """
    if share != 1.0:
        heads = rows.reshape(n_head, -1, *rows.shape[1:])
        n = round(heads.shape[1] * share)
        pairs = halves_to_pairs(heads[:, :n].reshape(n_head * n, *rows.shape[1:]), n_head)
        turned = pairs.reshape(n_head, n, *rows.shape[1:])
        return np.concatenate([turned, heads[:, n:]], 1).reshape(rows.shape)
    halves = rows.reshape(n_head, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _turned_stack(rows: Rows, n_head: int, share: float) -> Rows:
    """Apply ``halves_to_pairs`` to each matrix of a stack [n, rows, ..], with these ``n_head`` and
    ``share``.
    """
    return np.stack([halves_to_pairs(each, n_head, share) for each in rows])


def _first_turned(rows: Rows, n: int, n_head: int, share: float) -> Rows:
    """Apply ``halves_to_pairs`` to the first ``n`` rows, the queries and keys of a fused qkv
    matrix; ``n_head``: the heads of both together.
    """
    return np.concatenate([halves_to_pairs(rows[:n], n_head, share), rows[n:]])


def rope_fraction(hyper: HfConfig) -> float:
    """Return the fraction of each head that RoPE rotates."""
    turned = hyper.metadata.get(f"{hyper.family.arch}.rope.dimension_count")
    return 1.0 if turned is None else int(turned) * hyper.n_head / hyper.sizes["n_q"]


def by_matrix(rows: Rows, n_head: int, n_head_kv: int) -> Rows:
    """Reorder a fused qkv matrix from (queries, key, value) of each key head to all queries, then
    all keys, then all values. ``n_head``, ``n_head_kv``: the numbers of query and key heads.
    """
    groups = rows.reshape(n_head_kv, n_head // n_head_kv + 2, -1, *rows.shape[1:])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in parts])


def _transposed(rows: Rows) -> Rows:
    return np.ascontiguousarray(rows.T)


def _rows_from(rows: Rows, n: int) -> Rows:
    return np.ascontiguousarray(rows[n:])
