"""Whether a server can take one more request: its model is loaded and usable, and there is room."""

from __future__ import annotations

from typing import Protocol

from treadle.server.http.api_errors import ApiError, busy
from treadle.server.http.redaction import without_folders


class ModelThread(Protocol):
    """The thread that runs a model. ``state``: "loading", "ok" or "error"; ``why``: the error's
    text.
    """

    @property
    def state(self) -> str:
        """One of "loading", "ok", and "error": the model cannot be used (any more)."""

    @property
    def why(self) -> str:
        """The text of the error, "" without one."""


def check_usable(engine: ModelThread) -> None:
    """Raise ApiError if the model of the thread ``engine`` is still being loaded (503), or cannot
    be used (500).
    """
    if engine.state == "loading":
        raise ApiError(
            503,
            "the model is loading",
            type="unavailable_error",
            code="loading",
            headers={"Retry-After": "1"},
        )
    if engine.state != "ok":
        raise ApiError(500, f"the model cannot be used: {without_folders(engine.why)}")


def check_limit(n_requests: int, limit: int) -> None:
    """Raise ApiError (503) if the server's ``n_requests`` have reached its ``limit``."""
    if n_requests >= limit:
        raise busy(f"the server already has {limit} requests, its limit (--max-requests)")
