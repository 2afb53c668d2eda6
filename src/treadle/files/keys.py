"""Typed, range-checked access to a model's metadata keys, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from treadle.errors import FileError, UnsupportedError

SIZE_MAX = 1 << 24  # bound on any width: far above real models, far below overflow
POSITION_MAX = 1 << 31  # tokens


class MetadataReader:
    """Typed access to ``values``, the metadata of the GGUF or JSON file ``path``. Errors name the
    file and the full key.

    A key that is absent or None (JSON's null) takes its value from ``defaults``, else from the
    call's ``default``. If there is none either, or the value has another type or is out of range,
    FileError is raised. ``missing``: the error's text for a key without a value. ``prefix`` is
    prepended to keys in errors only.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: Path,
        defaults: Mapping[str, Any] | None = None,
        prefix: str = "",
        missing: str = "is missing",
    ) -> None:
        self.values = values
        self.path = path
        self.defaults = defaults or {}
        self.prefix = prefix
        self.missing = missing

    def error(self, key: str, found: str, expected: str | None = None) -> FileError:
        """Return a FileError about ``key``; ``found`` and ``expected`` are clauses for the
        message.
        """
        return FileError(found, path=self.path, where=self.prefix + key, expected=expected)

    def fail(self, key: str, found: str, expected: str | None = None) -> NoReturn:
        """Raise the FileError that ``error`` returns for these arguments."""
        raise self.error(key, found, expected)

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise UnsupportedError about ``key``: its value is valid, but not supported, because of
        ``why``.
        """
        raise UnsupportedError(f"{self.path}: {self.prefix}{key}: {why}")

    def has(self, key: str) -> bool:
        """Return whether the file itself has the key, even as null; defaults do not count."""
        return key in self.values

    def get(self, key: str) -> Any:
        """Return the value or its default, of any type; None if there is neither."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def integer(
        self, key: str, default: int | None = None, *, lo: int = 1, hi: int = SIZE_MAX
    ) -> int:
        """Return the integer ``key``. Raises FileError unless it is from ``lo`` to ``hi``."""
        value: int = self._read(key, default, int, f"an integer from {lo} to {hi}", lo, hi)
        return value

    def number(
        self, key: str, default: float | None = None, *, lo: float, hi: float = 1e12
    ) -> float:
        """Return the number ``key`` as a float. Raises FileError unless it is from ``lo`` to
        ``hi``.
        """
        expected = f"a number from {lo:g} to {hi:g}"
        return float(self._read(key, default, (int, float), expected, lo, hi))

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean ``key``. Raises FileError for a value of another type."""
        value: bool = self._read(key, default, bool, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return the string ``key``. Raises FileError for a value of another type."""
        value: str = self._read(key, default, str, "a string")
        return value

    def within(self, key: str) -> MetadataReader | None:
        """Return a reader of the nested object ``key``, without defaults; None if it is absent or
        null.
        """
        if self.get(key) is None:
            return None
        value = self._read(key, None, dict, "an object")
        return MetadataReader(value, self.path, prefix=f"{self.prefix}{key}.")

    def _read(
        self,
        key: str,
        default: Any,
        kinds: type | tuple[type, ...],
        expected: str,
        lo: float = 0,
        hi: float | None = None,  # None: no range
    ) -> Any:
        value = self.get(key)
        value = default if value is None else value
        sound = isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))
        if not sound or (hi is not None and not lo <= value <= hi):  # NaN fails this as well
            self.fail(key, self.missing if value is None else f"is {value!r:.60}", expected)
        return value
