"""Models that several objects of a process share, such as the components of a framework."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakValueDictionary

from treadle.api.model import Model, load

_MODELS: WeakValueDictionary[tuple[str | None, str], Model] = WeakValueDictionary()
_LOCK = threading.Lock()


def load_shared(model: Model | str | os.PathLike[str] | None = None, **options: Any) -> Model:
    """Return ``model`` itself if it is loaded; else the model that ``treadle.load(model,
    **options)`` opens (None: the small model in the package), once for all callers in this process
    that pass the same path and options.

    Nobody need close it: it is freed with its last reference. Raises the errors of ``load``;
    TypeError for ``options`` with a loaded model, and for another type of ``model``.
    """
    if isinstance(model, Model):
        if options:
            names = ", ".join(options)
            raise TypeError(f"{names}: settings of treadle.load, but the model is loaded already")
        return model
    if not isinstance(model, str | os.PathLike | None):
        found = type(model).__name__
        raise TypeError(f"model is {found}: expected a treadle.Model, a path or a name")
    path = None if model is None else os.fspath(model)
    key = (path, repr(sorted(options.items())))
    with _LOCK:
        found_model = _MODELS.get(key)
        if found_model is None:
            found_model = _MODELS[key] = load(path, **options)
        return found_model
