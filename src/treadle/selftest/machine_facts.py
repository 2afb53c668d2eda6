"""Facts of a machine for a report that its user can publish: no names of users, files or hosts."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING, Any

from treadle import __version__
from treadle.jit.compile import compiler_versions
from treadle.jit.host import host_features
from treadle.machine import topology
from treadle.machine.memory import host_memory
from treadle.profiling.facts import FEATURES
from treadle.system import SYSTEM
from treadle.system import machine as architecture

if TYPE_CHECKING:
    from treadle.api.model import Model


def machine_facts(model: Model) -> dict[str, Any]:
    """Return the CPU, the instruction set in use, the system, and versions, by name."""
    import numpy as np

    features = host_features()
    device = model.engine.device
    return {
        "cpu": topology.cpu_name(),
        "architecture": architecture(),
        "features": [name for name in FEATURES.get(architecture(), {}) if name in features],
        "virtual": topology.is_virtual(),
        "isa": device.isa.name,
        "device": getattr(device, "name", None) or "cpu",
        "threads": model.n_threads,
        "processors": len(topology.affinity()),
        "memory_bytes": host_memory()[0],
        "largest_cache_bytes": topology.cache_bytes(),
        "system": platform.system(),
        "system_release": platform.release(),
        "system_calls": SYSTEM.__class__.__name__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "python_bits": 64 if sys.maxsize > 1 << 32 else 32,
        "numpy": np.__version__,
        **compiler_versions(),
        "treadle": __version__,
    }
