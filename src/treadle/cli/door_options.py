"""Options of a server's access: file of API keys, TLS certificate and key, prefix of all paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path)


def path_prefix(text: str) -> str:
    """Parse a prefix of URL paths, such as ``/llm``. Raises click.BadParameter if it is invalid."""
    from treadle.server.http.path_prefix import read_prefix

    try:
        return read_prefix(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


_OPTIONS = (
    click.option(
        "--api-key-file",
        metavar="FILE",
        type=_FILE,
        help="File of API keys, one a line, each with its own name and limits if wanted; it is "
        "read again when it changes.",
    ),
    click.option(
        "--ssl-cert-file",
        metavar="FILE",
        type=_FILE,
        help="Certificate of the server (PEM), for TLS; it is read again when it changes.",
    ),
    click.option(
        "--ssl-key-file",
        metavar="FILE",
        type=_FILE,
        help="Private key of the certificate (PEM); by default in the same file.",
    ),
    click.option(
        "--api-prefix",
        default="",
        metavar="/PATH",
        type=path_prefix,
        help="Prefix of all paths, the page's included.",
    ),
    click.option(
        "--props",
        is_flag=True,
        help="Let clients change the sampling defaults of all requests (POST /props).",
    ),
)


def door_options(function: F) -> F:
    """Add the options of this file to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def check_files(settings: Mapping[str, Any]) -> None:
    """Read the certificate, the private key and the file of API keys, so that errors in them are
    reported before a model is loaded. Raises FileError for a file that is missing or invalid,
    click.UsageError for a key without a certificate.
    """
    certificate = settings["ssl_cert_file"]
    if certificate is None and settings["ssl_key_file"] is not None:
        raise click.UsageError("--ssl-key-file needs --ssl-cert-file")
    if certificate is not None:
        from treadle.server.http.tls import TlsFiles

        TlsFiles(certificate, settings["ssl_key_file"])
    if settings["api_key_file"] is not None:
        from treadle.server.http.api_keys import ApiKeyStore

        ApiKeyStore(settings["api_keys"], settings["api_key_file"])
