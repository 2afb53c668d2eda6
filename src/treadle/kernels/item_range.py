"""A kernel that calls another one for items from a first one on."""

from __future__ import annotations

from typing import ClassVar

from treadle.base.fast_dataclass import dataclass
from treadle.jit.language import Builder, Isa
from treadle.kernels.spec import Args, Frame, Spec


@dataclass(frozen=True)
class ItemRange(Spec):
    """Calls another kernel for items from ``first`` on. ``kernel``: its address; ``inner``: that of
    its arguments.
    """

    op: ClassVar[str] = "item_range"
    args = Args("kernel:in inner:in first")

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        """Emit the kernel."""
        first = frame.first
        items = first + frame.begin, first + frame.end
        k.call_pointer(frame.kernel, None, [frame.inner, frame.block, *items, frame.scratch])
