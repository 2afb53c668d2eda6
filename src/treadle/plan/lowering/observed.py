"""The lowering of plans with hooks: the usual steps, and the places of the states between layers.

States that a plan would keep deferred, such as a norm that every consumer computes in its own
layout, are written in f32 once, so that a hook sees and changes what all of them read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.plan.lowering.deferred import Floats, NormOf
from treadle.plan.lowering.ops import PlanOps

if TYPE_CHECKING:
    from treadle.kernels.activation_layout import ActivationLayout
    from treadle.models.ops import Rows
    from treadle.plan.lowering.deferred import GateUp
    from treadle.plan.plan import Buffer


class ObservedOps(PlanOps):
    """The ops of a plan with hooks; ``Plan.states`` gets the states before each layer, and after
    the last.
    """

    def layer(self, i: int, x: Rows) -> Rows:
        buffer = self.summand(x) if isinstance(x, NormOf) else self.floats(x)
        plan = self.steps.plan
        plan.states.append((len(plan), buffer))
        return Floats(x.label, x.width, buffer)


class UnfusedOps(ObservedOps):
    """``ObservedOps`` without the kernel that fuses gate, up and activation, so that hooks can read
    and change the products.
    """

    def _gate(self, x: GateUp, act: ActivationLayout) -> Buffer:
        up, column = self.place(x.up)
        gate = self.floats(x.gate)
        apart = None if up is gate else up
        return self._pack(x.label, x.fn, gate, act, column, apart)
