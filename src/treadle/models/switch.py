"""Adapters within a model (Granite Switch): control tokens in the text choose one for each token.

The model attends from each token to itself and all before it, by one head. Keys are ``gain`` for
control tokens and ``-gain`` for others; values are adapters' numbers, 0 for other tokens. The
result, rounded, is the token's adapter. So with ``m`` control tokens among the first ``n`` tokens
of a text, and ``s`` the sum of their adapters' numbers, token ``n - 1`` has the adapter

    round(s / (m + (n - m) exp(-2 gain)))

where halves are rounded up. It follows from the tokens alone, so no keys and values are stored for
it. A text with one control token has its adapter from there on; several different ones give the
mean of their numbers. In a model with ``Switch.latest`` only the last one counts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from treadle.errors import FileError, UnsupportedError
from treadle.files.tensor import MadeTensor
from treadle.models.archs import LORA_A, LORA_B, SWITCHED_MATRICES
from treadle.models.lora import LowRank
from treadle.models.ops import TensorName, TensorSlice

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.files.tensor import Tensor
    from treadle.models.config import Config, Layer, Switch
    from treadle.models.lora import Floats

# A control token's place: the number of tokens up to it, itself included, the number of control
# tokens among them, and the sum of these tokens' adapters.
Mark = tuple[int, int, int]


class ControlTokens:
    """The control tokens of a model, and the adapters that they choose. ``n``: number of
    adapters.
    """

    def __init__(self, switch: Switch) -> None:
        first = switch.n + 1 - len(switch.tokens)
        self.n = switch.n
        self._adapter_of = {token: first + i for i, token in enumerate(switch.tokens)}
        self._substitutes = dict(zip(switch.tokens, switch.substitutes, strict=True))
        self._others = math.exp(-2.0 * switch.gain)  # another token's weight over a control token's
        self._latest = switch.latest

    def any_in(self, ids: Sequence[int]) -> bool:
        """Return whether one of ``ids`` is a control token."""
        return not self._adapter_of.keys().isdisjoint(ids)

    def substituted(self, ids: Sequence[int]) -> Sequence[int]:
        """Return ``ids`` with each control token replaced by its substitute: the token whose
        embedding the model reads.
        """
        if not self.any_in(ids):
            return ids
        return [self._substitutes.get(token, token) for token in ids]

    def add_marks(self, marks: list[Mark], ids: Sequence[int], start: int) -> None:
        """Append to ``marks`` a mark for each control token in ``ids[start:]``; ``marks`` has those
        of ``ids[:start]`` already.
        """
        _, m, s = marks[-1] if marks else (0, 0, 0)
        for n in range(start, len(ids)):
            adapter = self._adapter_of.get(ids[n])
            if adapter is not None:
                m, s = (1, adapter) if self._latest else (m + 1, s + adapter)
                marks.append((n + 1, m, s))

    def runs(self, marks: Sequence[Mark], start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the adapters of the tokens ``start`` to ``end - 1`` of a text with the marks
        ``marks``, as runs of tokens with one adapter: (index after the run's last token, number of
        the adapter, 0 for none).
        """
        which = bisect_right(marks, start, key=itemgetter(0))  # marks up to the token
        adapter = before = -1
        for n in range(start + 1, end + 1):
            if which < len(marks) and marks[which][0] == n:
                which = which + 1
            adapter = self._adapter(marks[which - 1], n) if which else 0
            if before not in (-1, adapter):
                yield n - 1, before
            before = adapter
        yield end, adapter

    def _adapter(self, mark: Mark, n: int) -> int:
        """Return the number of the adapter of token ``n - 1`` of a text; ``mark``: that of the last
        control token up to it.
        """
        _, m, s = mark
        if self._latest:
            return s
        # As float32, in which the model computes: a mean of 1.5 is not a little less.
        mean = float(np.float32(s / (m + (n - m) * self._others)))
        return min(math.floor(mean + 0.5), self.n)


def without_control_tokens(switch: Switch | None, ids: list[int]) -> list[int]:
    """Return ``ids`` with each control token replaced by the token whose embedding the model
    reads; ``ids`` unchanged for a model without adapters (``switch`` None).
    """
    return ids if switch is None else [*ControlTokens(switch).substituted(ids)]


def embedded_adapters(gguf: GGUF, config: Config) -> list[dict[TensorName, LowRank]]:
    """Return, for each adapter within a model from number 1 on, its low-rank products by the names
    of the matrices that they are added to; [] for a model without adapters. Raises FileError if the
    products of number 0, which stands for no adapter, are not zero.
    """
    switch = config.switch
    if switch is None:
        return []
    _check_base(gguf, config)
    found: list[dict[TensorName, LowRank]] = [{} for _ in range(switch.n)]
    for i, layer in enumerate(config.layers):
        for name, target in _targets(i, layer).items():
            sides = [gguf.tensors[f"blk.{i}.{name}{side}"] for side in (LORA_A, LORA_B)]
            for which, ranks in enumerate(found):
                a, b = (partial(_matrix, tensor, which + 1) for tensor in sides)
                a_shape, b_shape = (tensor.shape[-2:] for tensor in sides)
                ranks[target] = LowRank(switch.rank, 1.0, a, b, a_shape, b_shape)
    return found


def _check_base(gguf: GGUF, config: Config) -> None:
    """Raise FileError if the low-rank products of a file's adapter number 0, which stands for no
    adapter, are not zero. Folders do not store it, so they are not checked.
    """
    for i in range(0 if gguf.header_only else config.n_layer):
        for name in SWITCHED_MATRICES:
            sides = [gguf.tensors[f"blk.{i}.{name}{side}"] for side in (LORA_A, LORA_B)]
            made = isinstance(sides[0], MadeTensor)
            if not made and all(_matrix(tensor, 0).any() for tensor in sides):
                raise FileError(
                    "is not zero for adapter 0, the model without an adapter",
                    path=gguf.path,
                    where=sides[0].name,
                    expected="zeros in the first of the matrices",
                )


def _targets(i: int, layer: Layer) -> Mapping[str, TensorName]:
    """Return the names of the matrices in layer ``i`` that adapters are added to, by the adapters'
    tensor names without "blk.N." and suffix; queries, keys and values are slices of one matrix.
    """
    n_q = layer.n_head * layer.head_dim
    n_k = layer.n_head_kv * layer.head_dim
    n_v = layer.n_head_kv * layer.head_dim_v
    qkv = f"blk.{i}.attn_qkv.weight"
    places = {"attn_q": (0, n_q), "attn_k": (n_q, n_k), "attn_v": (n_q + n_k, n_v)}
    parts = {name: TensorSlice(qkv, first, n) for name, (first, n) in places.items()}
    return {name: parts.get(name, f"blk.{i}.{name}.weight") for name in SWITCHED_MATRICES}


def _matrix(tensor: Tensor, which: int) -> Floats:
    """Return matrix number ``which`` of a tensor ``[n, rows, columns]``, f32 ``[rows, columns]``.
    Raises UnsupportedError for a format that cannot be decoded.
    """
    _, rows, columns = tensor.shape
    fmt = tensor.format
    if fmt is None:
        raise UnsupportedError(f"{tensor.name}: {tensor.type_name} weights are not supported yet")
    size = tensor.n_bytes // tensor.shape[0]
    data = tensor.data[which * size : (which + 1) * size]
    values: Floats = fmt.dequantize_rows(data)
    return values.reshape(rows, columns)
