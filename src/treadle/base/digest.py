"""BLAKE2 from Python's own C module: ``hashlib`` loads OpenSSL too, a fiftieth of a start."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import blake2b as blake2b
else:
    try:
        from _blake2 import blake2b
    except ImportError:  # a Python built without it
        from hashlib import blake2b as blake2b
