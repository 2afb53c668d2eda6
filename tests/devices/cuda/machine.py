"""Kernel tests on the emulated GPU: each item a block of threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tests.devices.cuda.emulator import emulated, load
from tests.kernels.machine import Here
from treadle.isa.isa import Isa
from treadle.isa.nvptx import SM_80
from treadle.kernels.spec import Spec

T = TypeVar("T")
ISA = emulated(SM_80)
# ``python -m tests.devices.cuda`` sets it.
EVERYTHING = os.environ.get("TREADLE_TEST_GPU") == "all"


def some(cases: Sequence[T], n: int) -> list[T]:
    """The first ``n`` cases, or all where the whole grid was asked for."""
    return list(cases if EVERYTHING else cases[:n])


class Blocks(Here):
    """A machine of ``tests/kernels/harness.py``; each launch has another order of threads."""

    def __init__(self) -> None:
        self.seed = 0

    def kernel(self, spec: Spec, isa: Isa) -> Callable[..., None]:
        kernel = load(spec, isa)

        def run(args: int, record: int, begin: int, end: int, scratch: int) -> None:
            self.seed += 1
            blocks = max(1, min(end - begin, 3))
            given: Any = {"items": range(begin, end), "n_ctas": blocks, "seed": self.seed}
            kernel.launch(args, record, scratch=scratch, **given)

        return run
