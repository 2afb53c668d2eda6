"""Table of the ops that the wgpu device supports, with the functions that make their dispatches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.devices.wgpu import attention, products, rows, top
from treadle.devices.wgpu.shader import Dispatch, Printer
from treadle.errors import UnsupportedError

if TYPE_CHECKING:
    from treadle.plan.plan import Step

PRINTERS: dict[str, Printer] = {
    "embed": rows.embed,
    "norm": rows.norm,
    "column_norm": rows.column_norm,
    "pack": rows.pack,
    "add": rows.add,
    "add_rows": rows.add_rows,
    "add_directions": rows.add_directions,
    "softcap": rows.softcap,
    "pooling": rows.pooling,
    "gemv": products.gemv,
    "gemm": products.gemm,
    "gated": products.gated,
    "rope": attention.rope,
    "attention": attention.attention,
    "merge": attention.merge,
    "top": top.top,
    "top_join": top.join_top,
}


def calls_of(step: Step) -> list[Dispatch]:
    """Return a step's dispatches. Raises UnsupportedError, with its label, for an op without a
    shader.
    """
    if step.spec.op not in PRINTERS:
        raise UnsupportedError(
            f"{step.label}: the wgpu device does not support {step.spec.op}: it runs only dense "
            "decoders and encoders (no experts, recurrent layers or LoRA)"
        )
    return PRINTERS[step.spec.op](step)
