"""Part of a step: some of its items, as a step of their own.

The step loop counts items from 0. So a part is a step whose kernel is ``ItemRange``, which adds the
first item and calls the step's kernel. Steps that are run whole do not pass through it.
"""

from __future__ import annotations

import numpy as np

from treadle.devices.cpu.memory_layouts import STEP


class ItemRangeStep:
    """The STEP record that runs part of another step, and its arguments; rewritten for each part.

    ``address``: of the record. ``kernel``: address of the compiled ``ItemRange``.
    """

    def __init__(self, kernel: int) -> None:
        self._kernel = kernel
        self._record = np.zeros(1, STEP)
        self._args = np.zeros(3, np.int64)
        self.address = int(self._record.ctypes.data)

    def set(self, step: np.void, items: range) -> None:
        """Write the record: it runs ``items`` of ``step``, a STEP record. No run may be using
        it.
        """
        self._args[:] = step["kernel"], step["args"], items.start
        args = int(self._args.ctypes.data)
        self._record[0] = (self._kernel, args, len(items), 0, 1, step["whole"])
