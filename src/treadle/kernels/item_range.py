"""A kernel that calls another kernel with an offset to its items."""

from __future__ import annotations

from typing import ClassVar

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa
from treadle.kernels.spec import Args, Frame, Spec


@dataclass(frozen=True)
class ItemRange(Spec):
    """Call another kernel for a range of its items that begins at item ``first``. ``kernel``:
    address of its code; ``inner``: address of its arguments.
    """

    op: ClassVar[str] = "item_range"
    args = Args("kernel:in inner:in first")

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        """Emit the call."""
        first = frame.first
        items = first + frame.begin, first + frame.end
        k.call_pointer(frame.kernel, None, [frame.inner, frame.block, *items, frame.scratch])
