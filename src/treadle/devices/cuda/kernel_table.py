"""Table of the GPU kernels that replace steps of a plan.

A GPU's plan is the CPU's lowering for the GPU's instruction set. Frequent ops have a GPU kernel
here, found by the ``op`` of the CPU's spec. Other ops run the CPU's kernel with one item per
thread: correct, but slow.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.plan.plan import Plan, Step

Swap = Callable[["Step", "Plan", "Isa"], "Step | None"]

# ``module:function`` by op. The function returns the step's replacement, with the same label and
# the same buffers read and written; None: this step keeps its kernel. The replacement's spec is a
# ``launch_args.PerBlock``, except for scans.
SWAPS = {
    **dict.fromkeys(
        (
            *("add", "add_directions", "add_rows", "block_convolution", "channel_rates"),
            *("clamp", "column_norm", "combine"),
            *("convolution", "embed", "expert_lora_down", "expert_lora_up", "gate"),
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
    """Return the function that replaces steps with this ``op``; None if they keep the CPU's
    kernel.
    """
    if op not in SWAPS:
        return None
    module, _, name = SWAPS[op].partition(":")
    result: Swap = getattr(import_module(module), name)
    return result


def swap(plan: Plan, isa: Isa) -> None:
    """Replace, in place, the steps of a plan that have a GPU kernel; does nothing if ``isa`` has no
    thread blocks (``isa.simt``).
    """
    if isa.simt is None:
        return
    for i, step in enumerate(plan.steps):
        other = find_swap(step.spec.op)
        made = other(step, plan, isa) if other else None
        if made is not None:
            kept = (made.label, set(made.reads), set(made.writes))
            assert kept == (step.label, set(step.reads), set(step.writes)), made
            plan.steps[i] = made
