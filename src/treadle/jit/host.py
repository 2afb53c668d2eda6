"""Features of this CPU, by LLVM's names.

LLVM detects them once for each kind of CPU, and the cache folder keeps them: a start that compiles
nothing does not load LLVM.
"""

from __future__ import annotations

import json
from collections.abc import Set
from contextlib import suppress
from functools import lru_cache

from treadle.errors import CacheError
from treadle.jit.cache import checked_folder, hex_digest, write_whole
from treadle.system import SYSTEM

# Intel's matrix registers: a process must request them from the operating system.
FEATURES_TO_REQUEST = frozenset({"amx-tile"})


@lru_cache(maxsize=1)
def host_features() -> frozenset[str]:
    """Return the features (LLVM's names) that this CPU has and the operating system permits."""
    about = SYSTEM.cpu_description()
    if about is None:
        return permitted(_detected())
    import llvmlite  # its version alone

    key = hex_digest(f"{llvmlite.__version__}\0{about}".encode())
    with suppress(OSError, ValueError, CacheError):
        known = json.loads((checked_folder() / f"cpu-{key}.json").read_bytes())
        if isinstance(known, list) and all(isinstance(name, str) for name in known):
            return permitted(set(known))
    found = _detected()
    with suppress(OSError, CacheError):
        write_whole(checked_folder() / f"cpu-{key}.json", json.dumps(sorted(found)).encode())
    return permitted(found)


def _detected() -> Set[str]:
    import llvmlite.binding as llvm

    known = {name for name, on in llvm.get_host_cpu_features().items() if on}
    return known | SYSTEM.cpu_features()


def permitted(features: Set[str]) -> frozenset[str]:
    """Return ``features`` (LLVM's names) without those that the operating system refuses to this
    process. Makes no system call if ``features`` has none that must be requested from it.
    """
    refused = (
        FEATURES_TO_REQUEST
        if features & FEATURES_TO_REQUEST and not SYSTEM.request_tiles()
        else frozenset()
    )
    return frozenset(features) - refused
