"""A C function that notes what it is asked for."""

from __future__ import annotations

import ctypes

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
ADVICE = 33


class Asked(list[tuple[int, int, int]]):
    """What a C function was called with: addresses, bytes and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._function = FUNCTION(self._note)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _note(self, address: int, n_bytes: int, number: int) -> int:
        self.append((address, n_bytes, number))
        return -1
