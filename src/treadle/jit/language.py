"""The names that annotations of kernels, formats and instruction sets need.

While a program runs they are Any: who makes a plan, or reads a file, loads no compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.isa.isa import Isa as Isa
    from treadle.jit.builder import Builder as Builder
    from treadle.jit.values import Operand as Operand
    from treadle.jit.values import Val as Val
    from treadle.jit.values import Var as Var
else:
    Builder = Isa = Operand = Val = Var = Any
