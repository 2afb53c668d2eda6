"""Clients of the ``openai`` package for a model of this process."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from treadle.api.model import Model, load
from treadle.openai.transport import transport_types

if TYPE_CHECKING:
    import openai

ADDRESS = "http://treadle.invalid"  # no request is sent to it
BASE_URL = f"{ADDRESS}/v1"
PATHS = (str, os.PathLike, type(None))


@cache
def _http_package() -> Any:
    """Return the HTTP package of the installed ``openai``: httpx, or httpx2."""
    try:
        import openai
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "treadle.openai gives the clients of the openai package, which is not installed: "
            'pip install "treadle[openai]"',
            name=error.name,
        ) from error
    roots = [base.__module__.partition(".")[0] for base in openai.DefaultHttpxClient.__mro__]
    return import_module(next(root for root in roots if root.startswith("httpx")))


def _opened(model: Model | str | os.PathLike[str] | None, transport_type: Any) -> Any:
    """Return ``transport_type`` (as of ``transport_types``) for ``model``: a loaded one, or what
    ``load`` opens, which is then closed with the client. Raises TypeError for other types.
    """
    owned = isinstance(model, PATHS)
    loaded = load(model) if owned else model  # type: ignore[arg-type]
    if not isinstance(loaded, Model):
        raise TypeError(f"model is {type(model).__name__}: expected a treadle.Model or a path")
    try:
        return transport_type(loaded, owned=owned)
    except BaseException:
        if owned:
            loaded.close()
        raise


def http_client(model: Model | str | os.PathLike[str] | None = None) -> Any:
    """Return an ``httpx.Client`` (``httpx2.Client`` with openai 3) whose requests a model in this
    process answers, whatever host they name: for classes that take an HTTP client, such as
    LangChain's ``ChatOpenAI``. ``model``: a ``treadle.Model``, or an argument for ``treadle.load``
    (None: the small model in the package); a model loaded here is closed with the client.

    Raises ModuleNotFoundError without the ``openai`` package, and the errors of ``treadle.load``.
    """
    package = _http_package()
    transport = _opened(model, transport_types(package).plain)
    return package.Client(transport=transport, timeout=None, base_url=ADDRESS)


def async_http_client(model: Model | str | os.PathLike[str] | None = None) -> Any:
    """Return an ``httpx.AsyncClient`` (``httpx2.AsyncClient`` with openai 3) for asyncio; otherwise
    as ``http_client``.
    """
    package = _http_package()
    transport = _opened(model, transport_types(package).asynchronous)
    return package.AsyncClient(transport=transport, timeout=None, base_url=ADDRESS)


def OpenAI(
    model: Model | str | os.PathLike[str] | None = None,
    *,
    timeout: float | None = None,
    **options: Any,
) -> openai.OpenAI:
    """Return an ``openai.OpenAI`` whose requests a model of this process answers.

    ``model``: a ``treadle.Model``, or what ``treadle.load`` opens, which is then closed with the
    client. The ``model=`` of each call may be any text. ``timeout``: seconds that a call waits for
    the next part of its answer, None for no limit; ``options``: others of ``openai.OpenAI``, such
    as ``max_retries``. Clients of one model share its batches, and any number of threads may use
    one. ``close`` it, or use it in ``with``.

    Raises ModuleNotFoundError without the ``openai`` package, and the errors of ``treadle.load``.
    """
    client = http_client(model)
    import openai

    settings = {"api_key": "none", "base_url": BASE_URL, "timeout": timeout, **options}
    return openai.OpenAI(http_client=client, **settings)


def AsyncOpenAI(
    model: Model | str | os.PathLike[str] | None = None,
    *,
    timeout: float | None = None,
    **options: Any,
) -> openai.AsyncOpenAI:
    """Return an ``openai.AsyncOpenAI`` whose requests a model of this process answers; arguments
    and errors as of ``OpenAI``. The model computes in other threads, so the event loop stays free.
    Several event loops may use it, one after the other.
    """
    client = async_http_client(model)
    import openai

    settings = {"api_key": "none", "base_url": BASE_URL, "timeout": timeout, **options}
    return openai.AsyncOpenAI(http_client=client, **settings)
