"""LoRA adapters of matrices that the model has fused or split: q, k and v; experts' gates and ups.

For several matrices that the model fuses to one, the A matrices are stacked. The rows of B that
belong to one matrix are 0 at the ranks of the others. The parts of a split matrix share its A.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from treadle.files.gguf import GGUF
from treadle.models.config import Config, Layer
from treadle.models.lora import Adapter, Floats, LowRank

GATE_OR_UP = re.compile(r"\.ffn_(?:gate|up)_exps\.")
Q_K_V = re.compile(r"(?P<at>blk\.(?P<layer>\d+)\.attn_)(?P<one>qkv|q|k|v)\.weight")
# Takes the name, the pair and the matrix's shape.
Check = Callable[[str, LowRank, tuple[int, ...]], None]


def match_matrices(adapter: Adapter, gguf: GGUF, config: Config, check: Check) -> Adapter:
    """Return the adapter with its pairs (A and B) fused or split like the model's matrices.
    ``check(name, pair, shape)`` raises if a pair does not fit a matrix of that shape.
    """
    ranks = dict(adapter.ranks)
    for name in adapter.ranks:
        if name in gguf.tensors:
            continue
        if name in ranks and GATE_OR_UP.search(name):
            _join_experts(ranks, name, gguf, check)
        match = Q_K_V.fullmatch(name)
        if match and name in ranks and int(match["layer"]) < len(config.layers):
            _join_or_part(ranks, match, gguf, config.layers[int(match["layer"])], check)
    return replace(adapter, ranks=ranks)


def _join_experts(ranks: dict[str, LowRank], name: str, gguf: GGUF, check: Check) -> None:
    whole = GATE_OR_UP.sub(".ffn_gate_up_exps.", name)
    if whole in ranks or whole not in gguf.tensors or len(gguf.tensors[whole].shape) != 3:
        return  # reported later as no tensor of the model
    n, m, k = gguf.tensors[whole].shape
    shapes = {whole.replace("gate_up", one): (n, m // 2, k) for one in ("gate", "up")}
    ranks[whole] = _joined(ranks, shapes, check)


def _join_or_part(
    ranks: dict[str, LowRank], match: re.Match[str], gguf: GGUF, layer: Layer, check: Check
) -> None:
    whole = f"{match['at']}qkv.weight"
    n_q = layer.n_head * layer.head_dim
    n_k = layer.n_head_kv * layer.head_dim
    heights = {"q": n_q, "k": n_k, "v": layer.n_head_kv * layer.head_dim_v}
    parts = {f"{match['at']}{one}.weight": height for one, height in heights.items()}
    if match["one"] != "qkv":
        if whole in ranks or whole not in gguf.tensors:
            return
        k = gguf.tensors[whole].shape[-1]
        ranks[whole] = _joined(ranks, {name: (m, k) for name, m in parts.items()}, check)
    elif parts.keys() <= gguf.tensors.keys() and parts.keys().isdisjoint(ranks):
        low = ranks.pop(whole)
        first = 0
        check(whole, low, (sum(parts.values()), gguf.tensors[min(parts)].shape[-1]))
        for name, m in parts.items():
            b = partial(_rows, low, first, m)
            ranks[name] = replace(low, b=b, b_shape=(m, low.rank))
            first = first + m


def _joined(
    ranks: dict[str, LowRank], shapes: Mapping[str, tuple[int, ...]], check: Check
) -> LowRank:
    """Remove from ``ranks`` the pairs (A and B) of the matrices in ``shapes``, and return one pair
    for the matrix that the model fuses them to.

    ``shapes``: the shape of each matrix by name, in the order of their rows in the fused matrix. A
    matrix without a pair gets zeros. ``check`` raises if a pair does not fit its matrix.
    """
    parts = [ranks.pop(name, None) for name in shapes]
    for (name, shape), low in zip(shapes.items(), parts, strict=True):
        if low is not None:
            check(name, low, shape)
    *each, k = next(iter(shapes.values()))
    each = each[:-1]
    heights = [shape[-2] for shape in shapes.values()]
    rank = sum(low.rank for low in parts if low is not None)
    a_shape = (*each, rank, k)
    b_shape = (*each, sum(heights), rank)
    a = partial(_joined_a, parts)
    b = partial(_joined_b, parts, heights, b_shape)
    return LowRank(rank, 1.0, a, b, a_shape, b_shape)


def _joined_a(parts: Sequence[LowRank | None]) -> Floats:
    return np.concatenate([low.a() for low in parts if low is not None], -2)


def _joined_b(
    parts: Sequence[LowRank | None], heights: Sequence[int], shape: tuple[int, ...]
) -> Floats:
    result = np.zeros(shape, np.float32)
    row = 0
    at = 0
    for low, height in zip(parts, heights, strict=True):
        if low is not None:
            to = result[..., row : row + height, at : at + low.rank]
            to[:] = low.b() * np.float32(low.factor)
            at += low.rank
        row += height
    return result


def _rows(low: LowRank, first: int, n: int) -> Floats:
    return low.b()[first : first + n]
