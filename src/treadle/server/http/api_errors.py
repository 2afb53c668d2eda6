"""API errors: an HTTP status and OpenAI's error object."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from typing import Any

from treadle.errors import (
    CacheError,
    CompileError,
    ContextFullError,
    DeviceError,
    FileError,
    NoRoomError,
    NotFiniteError,
    TreadleError,
)
from treadle.server.http.redaction import without_folders, without_paths

RETRY_S = 2  # Retry-After if it is unknown when there will be room

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error response with HTTP ``status``. ``type``, ``param`` (the wrong field), ``code`` and
    ``more``: keys of OpenAI's error object. Folders of served files are removed from ``message``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        message = without_paths(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or TYPES.get(status, "invalid_request_error")
        self.param = param
        self.code = code
        self.headers = headers or {}
        self.more = more

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's error object: ``{"error": {"message", "type", "param", "code",
        ...}}``.
        """
        known = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**known, **self.more}}


class GoneError(Exception):
    """The client has disconnected."""


def too_long(
    n_prompt: int, n_ctx: int, n_most: int | None = None, *, at_least: bool = False
) -> ApiError:
    """Return the error (400) for a prompt of ``n_prompt`` tokens, more than the context of
    ``n_ctx``; prompts are never cut silently. ``n_most``: the most tokens allowed, None for
    ``n_ctx``. ``at_least``: ``n_prompt`` is a lower bound. The first words are those of Anthropic's
    API: agents look for them, and shorten the prompt.
    """
    n_most = n_ctx if n_most is None else n_most
    shown = f"at least {n_prompt}" if at_least else str(n_prompt)
    return ApiError(
        400,
        f"prompt is too long: {shown} tokens > {n_most} maximum: shorten it, or start the server "
        "with a larger --context",
        type="exceed_context_size_error",
        code="context_length_exceeded",
        n_prompt_tokens=n_prompt,
        n_ctx=n_ctx,
    )


@contextmanager
def within(where: str) -> Iterator[None]:
    """Prefix the messages of ApiError and TreadleError raised in the block with ``where``, a part
    of the body, and set it as ``param``; both become ApiError.
    """
    try:
        yield
    except (ApiError, TreadleError) as error:
        problem = problem_of(error)
        problem.message = f"{where}: {problem.message}"
        problem.param = where
        raise problem from error


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Rewrite field names in errors raised in the block. ``names``: from treadle's names to those
    that the client used.
    """
    try:
        yield
    except (ApiError, TreadleError) as error:
        problem = problem_of(error)
        at = problem.param or ""
        own = next((name for name in names if re.match(rf"{re.escape(name)}(?![\w-])", at)), None)
        if own is None:
            raise
        if problem.message.startswith(own):
            problem.message = names[own] + problem.message.removeprefix(own)
        problem.param = names[own] + at.removeprefix(own)
        raise problem from error


def busy(message: str, retry_s: float = RETRY_S) -> ApiError:
    """Return a 503 error with ``message``, for a server without room at present; its
    ``Retry-After`` header tells the client to retry in ``retry_s`` seconds.
    """
    return ApiError(
        503,
        message,
        type="overloaded_error",
        code="overloaded",
        headers={"Retry-After": str(min(max(ceil(retry_s), 1), 600))},
    )


def timed_out(timeout_s: float) -> ApiError:
    """Return the 504 error for a request that took longer than its limit of ``timeout_s``
    seconds.
    """
    return ApiError(504, f"not done within {timeout_s:g} s", code="timeout")


def not_yet(what: str) -> ApiError:
    """Return a 501 error for ``what``, a path or a field's value that is known but not
    implemented.
    """
    return ApiError(501, f"{what}: not supported by treadle yet", code="not_implemented")


def problem_of(error: BaseException) -> ApiError:
    """Return the ApiError for any exception: 400 for the client's mistakes, 500 for problems of
    files and devices, 503 without room. Internal errors show only the exception's class.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NoRoomError):
        return busy("the KV cache has no free pages for this request now: retry later")
    if isinstance(error, ContextFullError):
        return ApiError(400, str(error), type="exceed_context_size_error")
    if isinstance(error, FileError | CompileError | CacheError | DeviceError | NotFiniteError):
        return ApiError(500, without_folders(str(error), getattr(error, "path", "")))
    if isinstance(error, TreadleError):
        return ApiError(400, str(error), param=error.setting)
    return ApiError(500, f"internal error: {type(error).__name__}")
