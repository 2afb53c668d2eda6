"""Reading the keys of a model's description: typed, ranged, and named when one is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from treadle.errors import FileError, UnsupportedError

SIZE_MAX = 1 << 24  # of any width: far above what exists, far below what overflows
POSITION_MAX = 1 << 31  # tokens


class MetadataReader:
    """The values of one file, of GGUF or JSON; an error names the file and the key in full.

    ``prefix`` is what stands before each key there; ``defaults`` are for keys that the file leaves
    out, and so is the default that a question brings; None (JSON's null) is "not set" too.
    ``missing`` is what to say where there is neither. Raises FileError.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: Path,
        defaults: Mapping[str, Any] | None = None,
        prefix: str = "",
        missing: str = "is missing",
    ) -> None:
        self.values, self.path, self.defaults, self.prefix = values, path, defaults or {}, prefix
        self.missing = missing

    def error(self, key: str, found: str, expected: str | None = None) -> FileError:
        """A FileError about a key."""
        return FileError(found, path=self.path, where=self.prefix + key, expected=expected)

    def fail(self, key: str, found: str, expected: str | None = None) -> NoReturn:
        """Raise it."""
        raise self.error(key, found, expected)

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise UnsupportedError about a key."""
        raise UnsupportedError(f"{self.path}: {self.prefix}{key}: {why}")

    def has(self, key: str) -> bool:
        """Whether the file itself has the key."""
        return key in self.values

    def get(self, key: str) -> Any:
        """The value, of whatever type; None where there is none."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def integer(
        self, key: str, default: int | None = None, *, lo: int = 1, hi: int = SIZE_MAX
    ) -> int:
        """An integer from ``lo`` to ``hi``."""
        value: int = self._read(key, default, int, f"an integer from {lo} to {hi}", lo, hi)
        return value

    def number(
        self, key: str, default: float | None = None, *, lo: float, hi: float = 1e12
    ) -> float:
        """A number from ``lo`` to ``hi``."""
        expected = f"a number from {lo:g} to {hi:g}"
        return float(self._read(key, default, (int, float), expected, lo, hi))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value: bool = self._read(key, default, bool, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value: str = self._read(key, default, str, "a string")
        return value

    def within(self, key: str) -> MetadataReader | None:
        """The object under ``key``; None where there is none."""
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
