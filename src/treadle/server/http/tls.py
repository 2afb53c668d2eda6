"""TLS of the server: its certificate and private key, which are read again when they change."""

from __future__ import annotations

import ssl
from pathlib import Path

from treadle.errors import FileError
from treadle.server.http.file_watch import FileWatch

BEGIN_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
KEY_END = b"PRIVATE KEY-----"
MISMATCH = "KEY_VALUES_MISMATCH"


class _EncryptedKeyError(Exception):
    """The private key asks for a password."""


class TlsFiles:
    """A server's TLS ``context`` and its files. ``certificate``: a PEM file with the server's
    certificate, followed by those of the authorities that signed it; ``key``: a PEM file with its
    private key, by default in the certificate's file. Raises FileError if one cannot be used.
    """

    def __init__(self, certificate: Path, key: Path | None = None) -> None:
        self._certificate = certificate
        self._key = certificate if key is None else key
        self._watches = [FileWatch(path) for path in {certificate, self._key}]
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self._load(self.context)

    def refresh(self) -> None:
        """Load the files again if they have changed, for later connections. Raises FileError if
        they cannot be used; the former certificate then stays in use.
        """
        if any([watch.has_changed() for watch in self._watches]):  # each notes its own change
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # a failure must not half-load
            self._load(self.context)

    def _load(self, context: ssl.SSLContext) -> None:
        def no_password() -> str:
            raise _EncryptedKeyError

        _check_pem(self._certificate, BEGIN_CERTIFICATE, "a certificate", "--ssl-cert-file")
        _check_pem(self._key, KEY_END, "a private key", "--ssl-key-file")
        try:
            context.load_cert_chain(self._certificate, self._key, no_password)
        except _EncryptedKeyError:
            raise FileError(
                "the private key is encrypted: the server cannot ask for a password; write it "
                "decrypted, with `openssl pkey`",
                path=self._key,
            ) from None
        except ssl.SSLError as error:
            if error.reason == MISMATCH:
                raise FileError(
                    f"the private key does not belong to the certificate in {self._certificate}",
                    path=self._key,
                ) from error
            raise FileError(
                f"cannot be used for TLS: {(error.reason or 'damaged').replace('_', ' ').lower()}",
                path=self._certificate,
                expected="a certificate and its private key, as PEM",
            ) from error


def _check_pem(path: Path, mark: bytes, what: str, option: str) -> None:
    """Raise FileError if the file cannot be read, or does not contain ``mark``, bytes of a PEM
    line. For the message: ``what`` was looked for ("a certificate" or "a private key"), and the
    command-line ``option``.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror or error}", path=path) from error
    if mark not in text:
        raise FileError(f"{what} was not found in it ({option})", path=path, expected="a PEM file")
