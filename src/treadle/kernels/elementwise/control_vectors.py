"""Control vectors: directions added to the hidden states of some sequences."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, ptr
from treadle.kernels.elementwise.elementwise import map_row
from treadle.kernels.run_state import LORA
from treadle.kernels.spec import Args, Frame, Spec, load_record


@dataclass(frozen=True)
class AddDirections(Spec):
    """Add control vectors: ``x[n] += s w[v]`` for each v of ``n_vectors``, one after the other; s
    is the scale of vector v in the row's sequence. Rows whose scales are 0 are not written.

    ``x``: f32 rows of ``n_streams`` times ``k`` values; the vector is added to each stream. ``w``:
    f32 ``[n_vectors, k]``. ``first``: index of vector 0's scale in a LORA record. Items: the LORA
    records.
    """

    op: ClassVar[str] = "add_directions"
    args = Args("x:inout w:const stride first n_vectors")
    k: int
    n_streams: int = 1

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        loras = frame.run("loras", ptr)
        stride = frame.stride * 4
        with k.loop(frame.end, start=frame.begin) as item:
            at = loras + item * LORA.itemsize
            record = load_record(k, at, LORA)
            scales = at + record["scales"] + frame.first * 4
            with k.loop(frame.n_vectors) as v:
                scale = k.load(scales + v * 4, f32)
                with k.if_(k.abs(scale) > 0.0):
                    w = frame.w + v * (4 * self.k)
                    with k.loop(record["n_tokens"]) as i:
                        row = frame.x + (record["token"] + i) * stride
                        for stream in range(self.n_streams):
                            x = row + 4 * self.k * stream
                            map_row(k, self.k, x, _added(k, scale), x, w)

    def run_ref(self, args: Any, run: Any) -> None:
        w = args.w.reshape(-1)[: args.n_vectors * self.k].reshape(-1, self.k).astype(np.float64)
        width = self.k * self.n_streams
        x = args.x.reshape(-1, args.stride)
        for token, n, scales in run.loras:
            rows = x[token : token + n, :width]
            for v, scale in enumerate(scales[args.first : args.first + args.n_vectors].tolist()):
                if scale:
                    rows[:] = rows + np.tile(scale * w[v], self.n_streams)


def _added(k: Builder, scale: Val) -> Any:
    """Return the function ``(x, w) -> x + scale * w`` of vectors."""
    return lambda x, w: k.fma(w, k.splat(scale, w.ty), x)
