"""Latent attention's two matrices of each head, made of the one that a file has.

Rows of ``kv_b`` are a head's, one head after another: the first make its key, the last its value.
Queries are multiplied by the first, turned (``k_b``); what attention gives, by the last (``v_b``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.files.tensor import Bytes, Tensor
from treadle.formats import by_name

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.lowering.steps import Steps

F16_MOST = 65504.0


def cut_heads(steps: Steps, layer: int, whole: str) -> None:
    """Make ``k_b`` and ``v_b`` of a layer's ``whole``, in memory, once a model.

    Values keep their format. Keys keep it where a weight is a number by itself. Blocks lie along
    rows, so what is turned leaves them: it becomes F16, whose 11 bits are more than codes have.
    """
    weights, sizes = steps.weights, steps.config.layers[layer].latent
    assert sizes is not None
    steps.plan.tensors_used.add(f"{whole}.weight")
    names = [f"{whole.removesuffix('kv_b')}{map_}.weight" for map_ in ("k_b", "v_b")]
    if names[1] in weights.made:
        return
    tensor, fmt = weights.tensor(f"{whole}.weight"), weights.format(f"{whole}.weight")
    n_head = steps.config.layers[layer].n_head
    rows = fmt.join(tensor.arrays).reshape(n_head, sizes.n_nope + sizes.n_v, -1)
    for name, part, turned in (
        (names[0], rows[:, : sizes.n_nope], True),
        (names[1], rows[:, sizes.n_nope :], False),
    ):
        to, part = fmt, np.ascontiguousarray(part)
        if len(tensor.arrays) > 1 or (turned and fmt.block > 1):
            to, part = _numbers(fmt, part)
        if turned:
            part = np.ascontiguousarray(part.view(to.dtype).swapaxes(1, 2)).view(np.uint8)
        shape = (*part.shape[:2], part.shape[2] // to.dtype.itemsize * to.block)
        part.flags.writeable = False
        at = tensor.path, 0, part.reshape(-1)
        weights.made[name] = Tensor(name, shape, to.ggml_id, to, part.nbytes, *at)


def _numbers(fmt: Format, rows: Bytes) -> tuple[Format, Bytes]:
    """In F16, or in F32 where that ends too soon."""
    floats = fmt.dequantize_rows(rows)
    to = by_name("F16" if np.abs(floats).max() <= F16_MOST else "F32")
    return to, to.quantize_rows(floats)
