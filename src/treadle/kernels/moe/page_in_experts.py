"""Prefetch of the chosen experts' pages from disk, if memory does not hold all weights."""

from __future__ import annotations

from typing import Any, ClassVar

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa
from treadle.jit.types import i32, i64
from treadle.kernels.matmul.matmul import TILE
from treadle.kernels.spec import Args, Frame, Spec, load_record


@dataclass(frozen=True)
class Fetch(Spec):
    """Ask the system for the memory pages of the chosen experts: call
    ``call(address, bytes, advice)``, a C function such as madvise, for an expert's part of each of
    ``n`` arrays, rounded down to the start of its page (of ``page`` bytes).

    ``w``: an array's address; ``length``: bytes of an expert's part; ``pitch``: bytes from one
    expert's part to the next. The experts are ``chosen``'s, i32, or if ``tiled`` those of
    ``tiles``, as ``Sort`` writes them. Items: the entries of ``chosen``, or the tiles. The
    function's result is ignored: pages that were not fetched are read when a product needs them.
    """

    op: ClassVar[str] = "fetch"
    args = Args("chosen:in? tiles:in? call:const advice page", each="w length pitch")
    n: int
    tiled: bool = False

    @property
    def needs(self) -> set[str]:
        return self.args.required | {"tiles" if self.tiled else "chosen"}

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        call = frame.call
        advice = frame.advice.to(i32)
        with k.loop(frame.end, start=frame.begin) as item:
            if self.tiled:
                at = frame.tiles + (8 + item * TILE.itemsize)
                expert = load_record(k, at, TILE)["expert"]
            else:
                expert = k.load(frame.chosen + item * 4, i32).to(i64)
            for i in range(self.n):
                begin = frame.each("w", i) + expert * frame.each("pitch", i)
                early = begin % frame.page
                length = frame.each("length", i) + early
                k.call_pointer(call, i32, [begin - early, length, advice])

    def run_ref(self, args: Any, run: Any) -> None:
        """Do nothing: the step changes no value."""
