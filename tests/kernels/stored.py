"""Arrays that a run's processes make once, beside its kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np

import treadle.formats


@cache
def of_formats() -> str:
    """A digest of the sources of formats: what a kept folder has of others is not read."""
    digest = sha256()
    for path in sorted(Path(treadle.formats.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def stored(name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array of this name, made by formats' sources, where no process has stored it yet."""
    folder = Path(os.environ["TREADLE_CACHE"])
    path = folder / f"{name}-{of_formats()}.npy"
    if path.exists():
        return np.load(path)  # type: ignore[no-any-return]
    array = make()
    own = folder / f"{path.stem}.{os.getpid()}"
    with own.open("wb") as file:
        np.save(file, array)
    own.replace(path)
    return array
