"""Which steps of a plan are done by kernels whose items are blocks of threads.

A plan for a GPU is the CPU's lowering with the GPU's row. What is hot has a kernel of its own here,
by the ``op`` of the CPU's spec; what has none is done as it is, an item a thread: right, and slow.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.plan.plan import Plan, Step

Swap = Callable[["Step", "Plan", "Isa"], "Step | None"]

# ``module:function`` by op; the function gives the step in its place, with the same label, the
# same buffers read and written, and a spec of ``gpu.entry.PerBlock``; None: it is not for this one.
SWAPS = {
    **dict.fromkeys(
        (
            *("add", "add_rows", "channel_rates", "column_norm", "combine", "convolution"),
            *("embed", "expert_lora_down", "expert_lora_up", "gate"),
            *("gather", "lora_down", "lora_up", "pooling", "rates", "softcap", "unit_heads"),
        ),
        "treadle.devices.cuda.kernels.spread:swap",
    ),
    "channel_delta": "treadle.devices.cuda.kernels.spread:swap_scan",
    "delta": "treadle.devices.cuda.kernels.spread:swap_scan",
    "gated": "treadle.devices.cuda.kernels.gated:swap",
    "gemm": "treadle.devices.cuda.kernels.gemm:swap",
    "gemv": "treadle.devices.cuda.kernels.gemv:swap",
    "attention": "treadle.devices.cuda.kernels.attention:swap",
    "mamba2": "treadle.devices.cuda.kernels.spread:swap_scan",
    "merge": "treadle.devices.cuda.kernels.merge:swap",
    "norm": "treadle.devices.cuda.kernels.norm:swap_norm",
    "pack": "treadle.devices.cuda.kernels.norm:swap_pack",
    "rope": "treadle.devices.cuda.kernels.rope:swap",
    "route": "treadle.devices.cuda.kernels.route:swap_route",
    "selective": "treadle.devices.cuda.kernels.spread:swap_scan",
    "sort": "treadle.devices.cuda.kernels.route:swap_sort",
    "top": "treadle.devices.cuda.kernels.top:swap_top",
    "top_join": "treadle.devices.cuda.kernels.top:swap_join",
}


def find_swap(op: str) -> Swap | None:
    """What puts another step in the place of one of this ``op``."""
    if op not in SWAPS:
        return None
    module, _, name = SWAPS[op].partition(":")
    made: Swap = getattr(import_module(module), name)
    return made


def swap(plan: Plan, isa: Isa) -> None:
    """Let the kernels for blocks of threads do what they can of a plan, where ``isa`` has such."""
    if isa.simt is None:
        return
    for i, step in enumerate(plan.steps):
        other = find_swap(step.spec.op)
        made = other(step, plan, isa) if other else None
        if made is not None:
            kept = (made.label, set(made.reads), set(made.writes))
            assert kept == (step.label, set(step.reads), set(step.writes)), made
            plan.steps[i] = made
