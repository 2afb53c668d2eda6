"""BLAKE2 from Python's own C module: ``hashlib`` loads OpenSSL too, a fiftieth of a start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hashlib import blake2b as blake2b
else:
    try:
        from _blake2 import blake2b
    except ImportError:  # a Python built without it
        from hashlib import blake2b as blake2b

DIGEST_BYTES = 16  # of keys and names of files


def hex_digest(data: Any) -> str:
    """Return a hash of ``data``, bytes or an array, in ``2 * DIGEST_BYTES`` hexadecimal digits."""
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
