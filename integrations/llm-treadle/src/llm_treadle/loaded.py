"""Models in memory: each is opened once in a process, for the first call that needs it."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import treadle

_models: dict[str, treadle.Model] = {}
_lock = threading.Lock()


def loaded_model(source: str, options: Mapping[str, Any]) -> treadle.Model:
    """Return the model of ``source``, opened with these options of ``treadle.load``. Raises the
    errors of ``treadle.load``.
    """
    key = json.dumps([source, dict(options)], sort_keys=True)
    with _lock:
        if key not in _models:
            try:
                _models[key] = treadle.load(source, **options)
            except TypeError as error:
                raise treadle.TreadleError(f"{source}: {error}") from error
        return _models[key]


def close_models() -> None:
    """Close every model."""
    with _lock:
        while _models:
            _models.popitem()[1].close()
