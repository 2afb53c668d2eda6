"""The server's log: JSON objects on standard error, one a line."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

COMMON: dict[str, Any] = {}  # fields of every line: a router's engine has its model's name


def log(**line: Any) -> None:
    """Write one line of JSON: the time, the fields in ``COMMON``, and the given fields."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    print(json.dumps({"time": now, **COMMON, **line}), file=sys.stderr, flush=True)
