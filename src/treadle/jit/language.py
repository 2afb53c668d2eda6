"""Names for type annotations in kernels, formats and instruction sets.

At run time they are ``Any``, so making a plan or reading a file does not load the compiler.
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
